"""What else may lie in a flight directory, what is deleted from it, and what happens where there is no room."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import flights
from tests.cgroups import inside, memory_cgroup
from tests.support import NEEDS_MOUNT, finish
from torchobs import catalog
from torchobs.flight import files, reader
from torchobs.flight.directory import open_directory, opened
from torchobs.flight.files import lock_name
from torchobs.flight.layout import MIN_SIZE, BadFlightFileError
from torchobs.flight.value_blocks import USER
from torchobs.flight.writer import FlightWriter, open_writer


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A living rank."""
    living = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    yield living
    living.close()


def name(rank: int) -> str:
    """A flight file's name that nobody has."""
    return f"r{rank}-{rank:032x}.flight"


def test_a_file_of_another_user_is_refused_where_an_owner_is_asked_for(directory_fd: int, writer: FlightWriter) -> None:
    """Whose rank it is, is decided by who may write its file."""
    reader.open_file(directory_fd, writer.name, os.getuid()).close()
    with pytest.raises(BadFlightFileError, match="uid"):
        reader.open_file(directory_fd, writer.name, os.getuid() + 1)


def test_of_ten_thousand_flight_names_the_living_are_read_first(
    flight_dir: Path, directory_fd: int, writer: FlightWriter
) -> None:
    """Nobody can make a scan open more than 4,096 files: the living, then those written last; the others are counted."""
    os.utime(writer.name, ns=(0, 0), dir_fd=directory_fd)  # a rank that stores through a map may have the oldest file
    for rank in range(10_000):
        fd = os.open(name(rank), os.O_CREAT | os.O_WRONLY, dir_fd=directory_fd)
        os.utime(fd, ns=(rank + 1, rank + 1))
        os.close(fd)
    names, left_out = reader.list_names(directory_fd)
    assert set(names) == {writer.name, *map(name, range(10_001 - reader.MAX_FILES, 10_000))}
    assert names == sorted(names) == reader.names(directory_fd)
    assert left_out == 10_001 - reader.MAX_FILES
    assert len(list(flight_dir.iterdir())) == 10_002


def test_two_scans_at_once_both_see_every_file(flight_dir: Path, directory_fd: int) -> None:
    """They share the directory's descriptor, but not the position in it: a scrape misses no rank because another one runs."""
    expected = sorted(name(rank) for rank in range(500))
    for file_name in expected:
        (flight_dir / file_name).touch()
    scans: list[list[str]] = []
    finish([threading.Thread(target=lambda: scans.extend(reader.names(directory_fd) for _ in range(40))) for _ in range(4)])
    assert len(scans) == 160
    assert all(names == expected for names in scans)


METRIC = catalog.Metric("test.count", catalog.Kind.COUNTER, "", "", integer=True)
ROUNDS = 25


@pytest.fixture
def directory(flight_dir: Path) -> Path:
    """A directory that may be deleted."""
    return flight_dir / "own" / "flight"


@pytest.fixture(params=["tmpfs", "disk"])
def writer_deleted(directory: Path, request: pytest.FixtureRequest) -> Iterator[FlightWriter]:
    """A rank with some steps, a counter and an event."""
    living = open_writer(flights.place(directory, in_memory=request.param == "tmpfs"), {"rank": 0}, MIN_SIZE)
    for number in range(1, 11):
        flights.step(living, number)
    cell = living.table.cell(METRIC, {}, USER)
    assert cell
    cell.add(7)
    living.event("test", {"n": 1})
    living.level(2)
    living.fold()
    living.publish()
    yield living
    living.close()


def delete_file(directory: Path, name: str) -> None:
    """A tidy user."""
    (directory / name).unlink()


def delete_lock(directory: Path, name: str) -> None:
    """Somebody who thought it stale."""
    (directory / lock_name(name)).unlink()


def delete_directory(directory: Path, _: str) -> None:
    """The end of a login session, which takes the runtime directory along."""
    shutil.rmtree(directory.parent)


def put_another_file_there(directory: Path, name: str) -> None:
    """A copy in its place."""
    raw = (directory / name).read_bytes()
    (directory / name).unlink()
    (directory / name).write_bytes(raw)


@pytest.mark.parametrize("delete", [delete_file, delete_lock, delete_directory, put_another_file_there])
def test_what_was_deleted_comes_back_with_all_it_held(
    writer_deleted: FlightWriter, directory: Path, delete: Callable[[Path, str], None]
) -> None:
    """Counters, steps, events, live words; a lock that is held; and what comes afterwards reaches the new file."""
    name = writer_deleted.name
    delete(directory, name)
    assert writer_deleted.check_name() is True
    assert writer_deleted.check_name() is False
    flights.step(writer_deleted, 11)
    cell = writer_deleted.table.cell(METRIC, {}, USER)
    assert cell
    cell.add(1)
    writer_deleted.fold()
    writer_deleted.publish()
    assert {path.name for path in directory.iterdir()} == {name, lock_name(name)}
    file = reader.open_path(str(directory / name))
    view = file.read()
    assert flights.value(view, catalog.STEPS) == 11
    assert flights.value(view, METRIC) == 8
    assert view.live.level == 2
    assert [record.step for record in file.steps()] == list(range(1, 12))
    assert [fields["attrs"] for fields in flights.frames(file)] == [{"n": 1}]
    assert file.header == writer_deleted.header
    file.close()
    with opened(directory) as directory_fd:
        assert files.is_locked(directory_fd, lock_name(name))
        writer_deleted.close()
        assert not files.is_locked(directory_fd, lock_name(name))


@pytest.mark.parametrize("delete", [delete_file, put_another_file_there])
def test_a_reader_goes_on_with_the_new_file(
    writer_deleted: FlightWriter, directory: Path, delete: Callable[[Path, str], None]
) -> None:
    """It follows the name; what it served never steps back."""
    fd = open_directory(str(directory))
    file = reader.open_file(fd, writer_deleted.name)
    assert flights.value(file.read(), catalog.STEPS) == 10
    assert file.follow(fd, writer_deleted.name) is False
    delete(directory, writer_deleted.name)
    writer_deleted.check_name()
    flights.step(writer_deleted, 11)
    writer_deleted.publish()
    assert file.follow(fd, writer_deleted.name) is True
    assert flights.value(file.read(), catalog.STEPS) == 11
    assert file.rejected == 0
    file.close()
    os.close(fd)


def test_where_it_cannot_be_made_anew_the_rank_goes_on_and_tries_again(writer_deleted: FlightWriter, directory: Path) -> None:
    """The error says why; nothing is lost meanwhile."""
    name = writer_deleted.name
    shutil.rmtree(directory.parent)
    directory.parent.write_text("in the way")
    for number in (11, 12):
        with pytest.raises(OSError, match=r"irectory|exists"):
            writer_deleted.check_name()
        flights.step(writer_deleted, number)
        writer_deleted.fold()
        writer_deleted.publish()
    directory.parent.unlink()
    assert writer_deleted.check_name() is True
    writer_deleted.publish()
    file = reader.open_path(str(directory / name))
    assert flights.value(file.read(), catalog.STEPS) == 12
    file.close()


def test_threads_that_write_while_it_is_made_anew_lose_nothing(writer_deleted: FlightWriter, directory: Path) -> None:
    """Steps, counts, new series and events go on while the file is deleted 25 times: in the end all of them are there."""
    done = threading.Event()
    counts = {"steps": 10, "series": 0}

    def train() -> None:
        while not done.is_set():
            counts["steps"] += 1
            flights.step(writer_deleted, counts["steps"])
            time.sleep(0.0002)  # a loop without a pause would keep the others waiting for the GIL, as no training does

    def count() -> None:
        while not done.is_set() and counts["series"] < 300:  # a file has room for 375
            cell = writer_deleted.table.cell(
                catalog.Metric(f"test.{counts['series']}", catalog.Kind.COUNTER, "", "", integer=True), {}, USER
            )
            assert cell
            cell.add(counts["series"])
            cell.publish()
            counts["series"] += 1
            time.sleep(0.0005)

    threads = [threading.Thread(target=train, daemon=True), threading.Thread(target=count, daemon=True)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(ROUNDS):
            delete_file(directory, writer_deleted.name)
            assert writer_deleted.check_name() is True
            writer_deleted.fold()
            writer_deleted.publish()
            time.sleep(0.002)
    finally:
        done.set()
    for thread in threads:
        thread.join()
    writer_deleted.fold()
    writer_deleted.publish()
    file = reader.open_path(str(directory / writer_deleted.name))
    shown = flights.values(file.read())
    assert shown[catalog.STEPS.name, ()] == counts["steps"]
    assert [shown[f"test.{index}", ()] for index in range(counts["series"])] == list(range(counts["series"]))
    assert shown[catalog.FLIGHT_DROPPED.name, (("what", "record"),)] == 0
    file.close()


MIB = 1 << 20
LIMIT = 96 * MIB
TRY = f"""
import errno, os, sys
from torchobs.flight.layout import MIN_SIZE
from torchobs.flight.directory import open_place
from torchobs.flight.writer import open_writer

def attempt(directory, size=MIN_SIZE):
    place = open_place(directory, None)
    try:
        open_writer(place, {{"rank": 0}}, size)
    except OSError as error:
        print(type(error).__name__, errno.errorcode.get(error.errno, "none"), len(os.listdir(directory)), flush=True)
    else:
        print("made", "none", len(os.listdir(directory)), flush=True)

def grow(usage_file, to_free):
    with open(usage_file) as usage:
        return b"x" * ({LIMIT} - to_free - int(usage.read()))
"""

Run = Callable[..., list[str]]


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Run:
    """Run Python code after `prefix`; return what it printed. It must end in order: no SIGBUS, no OOM kill."""

    def one(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> list[str]:
        command = [*prefix, sys.executable, "-c", TRY + code, *map(str, arguments)]
        process = start(*command, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return output.splitlines()

    return one


def mounted(options: str, then: str, directory: Path) -> tuple[str, ...]:
    """The prefix of a command that sees a small tmpfs on `directory`, alone."""
    script = f'mount -t tmpfs -o {options},mode=700 none "$DIRECTORY" && {then} && exec "$@"'
    user = () if os.getuid() == 0 else ("--user", "--map-root-user")
    if subprocess.run(("unshare", *user, "--mount", "true"), check=False, capture_output=True).returncode:
        pytest.skip(NEEDS_MOUNT)  # an unprivileged container, a chroot
    return ("env", f"DIRECTORY={directory}", "unshare", *user, "--mount", "sh", "-c", script, "sh")


@pytest.mark.parametrize(
    ("options", "then", "expected"),
    [
        ("size=1m", 'head -c 900k /dev/zero > "$DIRECTORY"/x', "NoRoomError none 1"),
        ("size=4m,nr_inodes=1", "true", "OSError ENOSPC 0"),
        ("size=4m,nr_inodes=3", "true", "made none 2"),
    ],
)
def test_a_full_tmpfs_is_an_error_at_birth_and_nothing_is_left(
    run: Run, flight_dir: Path, options: str, then: str, expected: str
) -> None:
    """No bytes, or no inode for the file or for its lock: an OSError at once, and never a SIGBUS in a later step."""
    assert run("attempt(sys.argv[1])", flight_dir, prefix=mounted(options, then, flight_dir)) == [expected]


def test_a_file_system_that_fills_up_while_the_file_is_allocated_leaves_nothing(run: Run, flight_dir: Path) -> None:
    """Allocation fails although there was room a moment before, here by a limit on the file's size."""
    limit = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    assert run(limit + "attempt(sys.argv[1])", flight_dir) == ["OSError EFBIG 0"]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit of 96 MiB, v1 or v2."""
    with memory_cgroup(LIMIT) as path:
        yield path


def test_a_cgroup_at_its_limit_is_refused_and_nobody_is_killed(run: Run, flight_dir: Path, cgroup: Path) -> None:
    """With less than sixteen times the file's size left, allocating could be the trainer's end; with more, it is done."""
    code = "attempt(sys.argv[1])\nheld = grow(sys.argv[2], 3 << 20)\nattempt(sys.argv[1])\n"
    first, second = run(code, flight_dir, _file(cgroup, "memory.usage_in_bytes", "memory.current"), prefix=inside(cgroup))
    assert first == "made none 2"
    assert second == "NoRoomError none 2"


def _file(cgroup: Path, *names: str) -> Path:
    return next(cgroup / name for name in names if (cgroup / name).exists())
