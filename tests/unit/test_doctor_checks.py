"""What `torchobs doctor` finds, and the remedy it names, on machines that are not this one."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.diagnosis_files import fact, facts, steps
from tests.exporters import Service
from torchobs import catalog
from torchobs.cli import doctor, doctor_checks, selftest
from torchobs.cli.doctor_checks import FAIL, OK, WARN, Check
from torchobs.cli.terminal_style import TerminalStyle
from torchobs.config import settings
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.files import location
from torchobs.flight.format.layout import DEFAULT_SIZE


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, WARN), ("2.3.1", WARN), ("2.4.0", OK), ("2.13.0+cpu", OK), ("3.0.0.dev20260101", OK), ("1.13", WARN), ("odd", OK)],
)
def test_torch_is_judged_by_its_version(version: str | None, status: str) -> None:
    """Nothing is imported for it."""
    assert doctor_checks.torch(version).status == status


@pytest.mark.parametrize(("platform", "status"), [("linux", OK), ("darwin", OK), ("win32", FAIL)])
def test_systems(platform: str, status: str) -> None:
    """Where init() does nothing, that is said."""
    assert doctor_checks.system(platform).status == status


def test_a_misspelled_variable_is_named_with_the_right_one() -> None:
    """Ours and the exporter's; a value that is not allowed, too."""
    environ = {"TORCHOBS_LEVLE": "basic", "TORCHOBS_EXPORTER_GARCE": "5m", "TORCHOBS_FILE_SIZE": "7", "TORCHOBS_DIR": "/x"}
    found = list(doctor_checks.variables(environ))
    assert [check.status for check in found] == [WARN] * 3
    told = " ".join(check.text for check in found)
    assert "TORCHOBS_LEVLE is an unknown setting, did you mean TORCHOBS_LEVEL?" in told
    assert "TORCHOBS_EXPORTER_GARCE is an unknown option, did you mean TORCHOBS_EXPORTER_GRACE?" in told
    assert "TORCHOBS_FILE_SIZE='7'" in told


def test_what_is_set_and_understood_is_listed() -> None:
    """Names only: a value may be a secret."""
    (found,) = doctor_checks.variables({"TORCHOBS_LEVEL": "basic", "TORCHOBS_EXPORTER_LOG_LEVEL": "info", "PATH": "/bin"})
    assert (found.status, found.text) == (OK, "set and understood: TORCHOBS_EXPORTER_LOG_LEVEL, TORCHOBS_LEVEL")


def test_the_exporter_s_variables_are_known() -> None:
    """Those of the push, too, and what Kubernetes says of a Service with the exporter's name."""
    environ = {"TORCHOBS_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "TORCHOBS_EXPORTER_SERVICE_HOST": "10.0.0.1"}
    (found,) = doctor_checks.variables(environ)
    assert (found.status, found.text) == (OK, "set and understood: TORCHOBS_EXPORTER_OTLP_ENDPOINT")


def test_the_directory_is_told_with_the_reason(flight_dir: Path) -> None:
    """The path, why it is that one, the file system, mode and owner."""
    found = doctor_checks.directory(str(flight_dir), None)
    assert found.status in {OK, WARN}
    assert f"{flight_dir} (by TORCHOBS_DIR; " in found.text
    assert "mode 0700" in found.text
    assert doctor_checks.directory(str(flight_dir / "a" / "b"), None).text.endswith("the first training makes it")
    assert not (flight_dir / "a").exists(), "doctor changes nothing"


def test_a_directory_that_cannot_be_made_fails(tmp_path: Path) -> None:
    """With what to do; root, who may write everywhere, cannot make one below a file either."""
    (tmp_path / "file").write_text("")
    found = doctor_checks.directory(str(tmp_path / "file" / "flight"), None)
    assert found.status == FAIL
    assert "TORCHOBS_DIR" in found.remedy


def test_what_a_training_could_not_make_a_directory_of_fails(tmp_path: Path) -> None:
    """Plain files, devices, the kernel's file systems, links to nowhere, a path below a file: each with the right reason."""
    file, link, real = tmp_path / "file", tmp_path / "link", tmp_path / "real"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    real.mkdir()
    (tmp_path / "to_real").symlink_to(real)
    said = {
        "/dev/null": "/dev/null is no directory",
        str(file): f"{file} is no directory",
        str(link): f"{link} is no directory",
        str(file / "a" / "b"): f"{file} is no directory",
        str(link / "a"): f"{link} is no directory",
        "/proc/nope": "/proc is of the kernel's own (proc)",
        str(tmp_path / "to_real"): "",
    }
    for path, why in said.items():
        found = doctor_checks.directory(path, None)
        assert (found.status, why in found.text, bool(found.remedy)) == (FAIL, True, True)
        with pytest.raises(OSError, match=re.escape(path)):
            location.open_place(path, None)
        existing = location.find_existing(path, None)
        assert doctor_checks.space(existing, DEFAULT_SIZE).status == (WARN if existing else OK)


@pytest.mark.parametrize(
    ("kind", "status"), [("nfs4", FAIL), ("fuse.sshfs", FAIL), ("lustre", FAIL), ("ext4", OK), ("tmpfs", OK)]
)
def test_a_directory_still_to_be_made_is_judged_by_its_file_system(tmp_path: Path, kind: str, status: str) -> None:
    """On a server that may be away, a training would refuse it."""
    mountinfo = f"1 0 0:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:2 / {tmp_path} rw - {kind} server:/x rw\n"
    found = doctor_checks.directory(str(tmp_path / "a" / "b"), None, mountinfo)
    assert (found.status, kind in found.text) == (status, status == FAIL)


def test_where_the_best_place_cannot_be_made_the_next_one_is_told(tmp_path: Path) -> None:
    """As a training takes it: a session's directory that is a plain file is passed over."""
    (tmp_path / "torchobs").touch()
    found = doctor_checks.directory(None, str(tmp_path))
    assert "torchobs" in found.text
    assert str(tmp_path / "torchobs") + " " not in found.text


def test_room_is_judged_as_a_rank_judges_it(flight_dir: Path) -> None:
    """Before a training finds out."""
    assert doctor_checks.space(str(flight_dir), DEFAULT_SIZE).status == OK
    full = doctor_checks.space(str(flight_dir), 1 << 60)
    assert full.status == FAIL
    assert "bytes left" in full.text


def test_a_pod_s_volumes(tmp_path: Path) -> None:
    """Outside of Kubernetes nothing; in a pod the mount, the fsGroup's bit, the second volume."""
    flight, control = tmp_path / "flight", tmp_path / "control"

    def found() -> Check | None:
        return doctor_checks.kubernetes({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, str(flight), str(control))

    assert doctor_checks.kubernetes({}) is None
    missing = found()
    assert missing
    assert (missing.status, "emptyDir" in missing.remedy) == (WARN, True)
    flight.mkdir()
    flight.chmod(0o777)
    plain = found()
    assert plain
    assert "fsGroup" in plain.remedy
    flight.chmod(0o3777)
    one = found()
    assert one
    assert "second emptyDir" in one.remedy
    control.mkdir()
    both = found()
    assert both
    assert both.status == OK


def test_shared_memory(tmp_path: Path) -> None:
    """What is not there, and what is there."""
    assert doctor_checks.shared_memory(str(tmp_path / "none")).status == WARN
    assert doctor_checks.shared_memory("/dev/shm").text.startswith("/dev/shm has ")


@pytest.mark.parametrize(("now_s", "state", "status"), [(1.8e9, 0, OK), (1.8e9, 5, WARN), (100.0, 0, FAIL)])
def test_the_clock(now_s: float, state: int, status: str) -> None:
    """One that nothing keeps right, and one that is in the past."""
    assert doctor_checks.clock(now_s, state).status == status


def test_this_machine_s_own_figures_can_be_had() -> None:
    """Whatever they are: no check raises."""
    found = [doctor_checks.cgroup(), doctor_checks.clock(), doctor_checks.gpus(), *doctor_checks.extras()]
    assert {check.status for check in found} <= {OK, WARN, FAIL}
    assert all(check.remedy for check in found if check.status != OK)


def test_an_exporter_that_answers_is_ready(flight_dir: Path) -> None:
    """By the address it has; one that does not answer is only missed where one was announced."""
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
        assert doctor_checks.exporter(None, service.address).status == OK
        address = service.address
    assert doctor_checks.exporter(None, address).status == WARN


def test_a_pod_without_a_temporary_directory_has_its_trial_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the flight files, or in shared memory; where that cannot be written to either, that is told, with the remedy."""
    nowhere = str(tmp_path / "read-only")
    monkeypatch.setattr(tempfile, "tempdir", nowhere)
    assert selftest.places(str(tmp_path / "flight")) == (None, str(tmp_path), "/dev/shm")
    (told,) = selftest.selftest([None, nowhere])
    assert (told.status, told.text.startswith("no place for a trial"), "TMPDIR" in told.remedy) == (WARN, True, True)
    tried = list(selftest.selftest([None, str(tmp_path)]))
    assert tried[0].text.startswith("a training of five steps was recorded")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seen", "status", "said", "expected"),
    [
        (facts(steps(5), values={catalog.STEPS: 5, catalog.LOSS: 1.0, (catalog.PROBE_DISABLED, "loss"): 0.0}), 0, "", OK),
        (facts(steps(2), values={catalog.STEPS: 2, catalog.LOSS: 1.0}), 0, "", WARN),
        (None, 1, "Traceback\nImportError: libcudart.so.12", FAIL),
        (None, 0, "torchobs: off, no room", FAIL),
    ],
)
def test_the_trial_is_judged(seen: object, status: int, said: str, expected: str) -> None:
    """By its steps, its status, and the last line that it printed."""
    first = next(selftest.evaluate(seen, status, said))  # type: ignore[arg-type]  # facts, or none
    assert first.status == expected
    assert not said or said.splitlines()[-1] in first.text


def test_a_probe_that_is_off_is_told_with_its_reason() -> None:
    """Where it raised."""
    event = fact(catalog.EVENT_PROBE_DISABLED, 1.0, probe="amp", exception__type="AttributeError", location="amp.py:7")
    values = {catalog.STEPS: 5, catalog.LOSS: 1.0, (catalog.PROBE_DISABLED, "amp"): 1.0, (catalog.PROBE_DISABLED, "loss"): 0.0}
    told = [check.text for check in selftest.evaluate(facts(steps(5), values=values, events=[event]), 0, "")]
    assert "amp is off: AttributeError at amp.py:7" in told
    assert any(text.startswith("gradients is not installed") for text in told)
    assert set(settings.PROBES) > {"amp", "loss", "gradients"}


def test_every_finding_that_is_not_well_has_its_remedy_below_it() -> None:
    """Wrapped to the width, without a control character."""
    check = Check("directory", FAIL, "a\x1b[2Jb " * 20, "do this " * 10)
    lines = doctor.lines_of(check, TerminalStyle(60))
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("FAIL  directory: a?[2Jb")
    assert any(line.startswith("      -> do this") for line in lines)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([OK, OK], "All is well."),
        ([OK, WARN], "1 warning: each has its remedy above."),
        ([FAIL, WARN, WARN], "1 failure and 2 warnings: each has its remedy above."),
        ([FAIL], "1 failure: each has its remedy above."),
    ],
)
def test_the_last_line_counts(statuses: list[str], said: str) -> None:
    """For who scrolled past the rest."""
    assert doctor.summary([Check("x", status, "y") for status in statuses]) == said
