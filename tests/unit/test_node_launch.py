"""What a trainer hands to the exporter it starts, and what keeps it from starting one."""

import logging
import os
import sys
from pathlib import Path

import pytest

from torchobs.flight.files import lock
from torchobs.flight.files.create import lock_name
from torchobs.flight.files.location import open_place
from torchobs.flight.format.layout import MIN_SIZE, Exit
from torchobs.flight.writer.writer import open_writer
from torchobs.node import announcement, election, launch
from torchobs.support.descriptors import Descriptor

LOG = logging.getLogger("torchobs.test")


@pytest.fixture(autouse=True)
def _nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_warned", set())


def test_the_environment_is_chosen_and_not_copied() -> None:
    """A profiler's injection, PYTHONPATH, a rank's identity, a job's name and foreign secrets stay with the trainer."""
    kept = (
        *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "TORCHOBS_EXPORTER_ADDRESS"),
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"),
        *("SSL_CERT_FILE", "https_proxy", "NO_PROXY"),
    )
    left = (
        *("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "PYTHONPATH", "PYTHONSTARTUP", "BASH_ENV", "ENV"),
        *(
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "TORCHOBS_RUN_ID",
            "OTEL_SERVICE_NAME",
            "OTEL_RESOURCE_ATTRIBUTES",
        ),
        *("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"),
    )
    chosen = launch.inherited({name: f"value of {name}" for name in kept + left})
    assert chosen == {name: f"value of {name}" for name in kept}


def test_modules_are_located_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer looks whether the exporter could run; it must not load a server to find out."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "located_module.py").write_text("raise RuntimeError")
    (tmp_path / "second" / "located_package").mkdir(parents=True)
    (tmp_path / "second" / "located_package" / "__init__.py").write_text("raise RuntimeError")
    for part in ("first", "second"):
        monkeypatch.syspath_prepend(tmp_path / part)
    found, missing = launch.locate(("located_module", "located_package", "no_such_module", "no.such.module"))
    assert found == [str(tmp_path / "first"), str(tmp_path / "second")]
    assert missing == ["no_such_module", "no.such.module"]


def test_an_installed_extra_is_complete_and_left_unloaded() -> None:
    """`pip install torchobs[exporter]` brings what is looked for, and looking loads none of it into the trainer."""
    before = set(sys.modules)
    assert launch.locate(launch.NEEDED)[1] == []
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= {"opentelemetry"}


def test_a_missing_extra_is_one_line_that_names_the_command(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No exporter installed: training goes on, and the log says what to type, once in a run that asks again and again."""
    monkeypatch.setattr(launch, "NEEDED", ("no_such_server", "json"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            launch.ensure_exporter(str(flight_dir), "127.0.0.1:0", LOG)
    assert caplog.messages == ["no exporter: no_such_server missing; pip install 'torchobs[exporter]'"]
    assert list(flight_dir.iterdir()) == []


def test_none_is_started_in_kubernetes(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There the sidecar is the exporter; a second one would live in the trainer's container and die with it."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    launch.ensure_exporter(str(flight_dir), "127.0.0.1:0", LOG)
    assert "Kubernetes" in caplog.text
    assert list(flight_dir.iterdir()) == []


def test_a_directory_that_is_gone_is_logged_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever keeps the exporter from starting, the training begins."""
    launch.ensure_exporter(str(tmp_path / "gone"), "127.0.0.1:0", LOG)
    assert "could not be started" in caplog.text


@pytest.mark.parametrize("executable", ["", None])
def test_a_program_that_embeds_python_starts_none(
    executable: str | None, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`sys.executable` names no Python there: what would be started is anybody's guess."""
    monkeypatch.setattr(sys, "executable", executable)
    launch.ensure_exporter(str(flight_dir), "127.0.0.1:0", LOG)
    assert "torchobs exporter" in caplog.text


def test_the_lock_decides_and_is_left_by_a_release(directory_fd: int) -> None:
    """Free, taken, free again; and taken anew by the same process."""
    candidate = election.Election(directory_fd)
    assert not election.is_decided(directory_fd)
    for _ in range(2):
        assert candidate.win()
        assert election.is_decided(directory_fd)
        assert candidate.holds()
        candidate.release()
        assert not election.is_decided(directory_fd)
        assert not candidate.holds()


def test_whose_lock_has_lost_its_name_is_the_exporter_no_more(directory_fd: int, flight_dir: Path) -> None:
    """Somebody emptied the directory: the next rank elects another exporter, and this one has to notice."""
    candidate = election.Election(directory_fd)
    assert candidate.win()
    (flight_dir / election.LOCK).unlink()
    assert not candidate.holds()
    assert not election.is_decided(directory_fd)
    (flight_dir / election.LOCK).touch()
    assert not candidate.holds()
    assert candidate.win()
    assert election.is_decided(directory_fd)
    candidate.release()


def test_a_planted_link_is_no_lock(directory_fd: int, flight_dir: Path) -> None:
    """It would have us create or lock any file of this user."""
    (flight_dir / election.LOCK).symlink_to(flight_dir / "target")
    with pytest.raises(OSError, match="symbolic links"):
        election.Election(directory_fd).win()
    assert not (flight_dir / "target").exists()


def test_an_announcement_counts_while_its_exporter_lives(directory_fd: int, flight_dir: Path) -> None:
    """A killed exporter leaves its announcement behind: the lock tells that nobody listens there any more."""
    candidate = election.Election(directory_fd)
    assert candidate.win()
    made = announcement.announce(directory_fd, "127.0.0.1:10961")
    assert announcement.read(directory_fd) == made
    assert (made.pid, made.url) == (os.getpid(), "http://127.0.0.1:10961/")
    assert announcement.announce(directory_fd, "127.0.0.1:10961", tls=True).url == "https://127.0.0.1:10961/"
    assert [path.name for path in flight_dir.iterdir() if path.name != election.LOCK] == ["exporter.json"]
    candidate.release()
    assert announcement.read(directory_fd) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": 1}', "\N{SNOWMAN}" * 3000, '{"surprise": 1}'])
def test_garbage_is_no_announcement(content: str, directory_fd: int, flight_dir: Path) -> None:
    """The file is read by other programs while anything may lie there."""
    (flight_dir / announcement.NAME).write_text(content)
    candidate = election.Election(directory_fd)
    assert candidate.win()
    assert announcement.read(directory_fd) is None
    candidate.release()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:10960", "http://127.0.0.1:10960/"),
        (":10960", "http://127.0.0.1:10960/"),
        ("0.0.0.0:10961", "http://127.0.0.1:10961/"),
        ("[::]:10960", "http://[::1]:10960/"),
        ("[::1]:10960", "http://[::1]:10960/"),
    ],
)
def test_the_url_is_one_that_can_be_typed(address: str, expected: str) -> None:
    """Every interface is an address to listen on, none to connect to."""
    assert announcement.url(address) == expected


def test_a_rank_lives_while_its_heart_beats(directory_fd: int, flight_dir: Path) -> None:
    """A script that closes descriptors which it has not opened drops the lock; an end that was recorded is one all the same."""
    writer = open_writer(open_place(str(flight_dir), None), {"rank": 0}, MIN_SIZE)
    assert writer._created is not None
    os.close(writer._created.lock.number())
    writer.heartbeat()
    assert not lock_is_held_by_anybody(directory_fd, lock_name(writer.name))
    assert election.anyone_alive(directory_fd)
    assert writer.restore()
    assert lock_is_held_by_anybody(directory_fd, lock_name(writer.name))
    os.close(writer._created.lock.number())
    writer.heartbeat()
    writer.exit(Exit.FINISHED, 0)
    lock._held.clear()
    assert not election.anyone_alive(directory_fd)
    writer.close()


def lock_is_held_by_anybody(directory_fd: int, name: str) -> bool:
    """What another process gets for an answer."""
    child = os.fork()
    if not child:
        os._exit(lock.is_held(directory_fd, name))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_rank_lives_while_its_lock_is_held(directory_fd: int, flight_dir: Path) -> None:
    """The rescan counts published files with a held lock: not dead ones, not unpublished ones, not those without a lock."""
    name = f"r0-{'0' * 32}"
    assert not election.anyone_alive(directory_fd)
    (flight_dir / f"{name}.flight").touch()
    assert not election.anyone_alive(directory_fd)
    file = Descriptor("lock", str(flight_dir / f"{name}.lock"), os.O_RDWR | os.O_CREAT)
    assert not election.anyone_alive(directory_fd)
    lock.take(file)
    assert election.anyone_alive(directory_fd)
    (flight_dir / f"{name}.flight").rename(flight_dir / ".tmp-0")
    assert not election.anyone_alive(directory_fd)
    lock.release(file)
