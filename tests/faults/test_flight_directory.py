"""What else may lie in a flight directory: pipes, leases, links, a hundred thousand names."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import flights
from tests.support import finish
from torchobs.flight.files.cleanup import clean
from torchobs.flight.files.create import lock_name
from torchobs.flight.format.layout import MIN_SIZE, BadFlightFileError
from torchobs.flight.reader import reader
from torchobs.flight.writer.writer import FlightWriter, open_writer

NAMES = 100_000
SCAN_LIMIT_S = 2.0
"""CPU time for a directory of 100,000 names; it takes 0.15 s."""


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A living rank."""
    made = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    yield made
    made.close()


def name(rank: int) -> str:
    """A flight file's name that nobody has."""
    return f"r{rank}-{rank:032x}.flight"


def test_a_pipe_with_a_flight_file_s_name_holds_nobody(flight_dir: Path, directory_fd: int) -> None:
    """Opening a FIFO for reading waits for a writer, unless asked not to."""
    os.mkfifo(flight_dir / name(1))
    began = time.monotonic()
    with pytest.raises(BadFlightFileError, match="regular"):
        reader.open_file(directory_fd, name(1))
    assert time.monotonic() - began < 5.0  # it would wait for ever


def test_a_symbolic_link_is_not_followed(flight_dir: Path, directory_fd: int, writer: FlightWriter) -> None:
    """Not even to a flight file."""
    (flight_dir / name(1)).symlink_to(flight_dir / writer.name)
    with pytest.raises(OSError, match="symbolic"):
        reader.open_file(directory_fd, name(1))


def test_a_directory_a_socket_and_a_device_are_refused(flight_dir: Path, directory_fd: int) -> None:
    """Only regular files."""
    (flight_dir / name(1)).mkdir()
    os.mknod(flight_dir / name(2), stat.S_IFSOCK | 0o600)
    for one in (name(1), name(2)):
        with pytest.raises((OSError, BadFlightFileError)):
            reader.open_file(directory_fd, one)


def test_a_file_of_another_user_is_refused_where_an_owner_is_asked_for(directory_fd: int, writer: FlightWriter) -> None:
    """Whose rank it is, is decided by who may write its file."""
    reader.open_file(directory_fd, writer.name, os.getuid()).close()
    with pytest.raises(BadFlightFileError, match="uid"):
        reader.open_file(directory_fd, writer.name, os.getuid() + 1)


def test_a_lease_on_a_file_holds_nobody(
    flight_dir: Path, directory_fd: int, writer: FlightWriter, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Opening a leased file waits up to 45 s for its holder, unless asked not to; it is read when the lease is gone."""
    code = (
        "import fcntl, os, signal, sys; signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR); fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK); print(1, flush=True); input()"
    )
    target = flight_dir / name(1)
    target.write_bytes((flight_dir / writer.name).read_bytes())
    holder = start(sys.executable, "-c", code, target, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline()
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        reader.open_file(directory_fd, name(1))
    assert time.monotonic() - began < 5.0  # of 45 s
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    reader.open_file(directory_fd, name(1)).close()


@pytest.mark.parametrize(
    "other",
    ["r0-0.flight", f"x{name(1)}", f"{name(1)}.bak", lock_name(name(1)), "\udcff"],
)
def test_other_names_are_nobody_s_flight_files(flight_dir: Path, directory_fd: int, other: str) -> None:
    """What is not text at all harms nobody."""
    (flight_dir / other).write_bytes(b"")
    assert reader.names(directory_fd) == []
    assert not reader.is_name(other)


def test_a_hundred_thousand_names_are_looked_at_in_time(flight_dir: Path, directory_fd: int, writer: FlightWriter) -> None:
    """100,000 foreign names: the rank among them is found, and cleaning touches none of them."""
    for index in range(NAMES):
        os.close(os.open(f"foreign-{index}.dat", os.O_CREAT | os.O_WRONLY, dir_fd=directory_fd))
    began = time.thread_time()
    assert reader.names(directory_fd) == [writer.name]
    assert clean(directory_fd, now=time.monotonic_ns(), min_age_s=0.0, max_total_bytes=0) == []
    assert time.thread_time() - began < SCAN_LIMIT_S
    assert len(list(flight_dir.iterdir())) == NAMES + 2


def test_of_ten_thousand_flight_names_the_living_are_read_first(
    flight_dir: Path, directory_fd: int, writer: FlightWriter
) -> None:
    """Nobody can make a scan open more than 4,096 files: the living, then those written last; the others are counted."""
    os.utime(writer.name, ns=(0, 0), dir_fd=directory_fd)  # a rank that stores through a map may have the oldest file
    for rank in range(10_000):
        fd = os.open(name(rank), os.O_CREAT | os.O_WRONLY, dir_fd=directory_fd)
        os.utime(fd, ns=(rank + 1, rank + 1))
        os.close(fd)
    found = reader.list_names(directory_fd)
    assert set(found.names) == {writer.name, *map(name, range(10_001 - reader.MAX_FILES, 10_000))}
    assert found.names == sorted(found.names) == reader.names(directory_fd)
    assert found.left_out == 10_001 - reader.MAX_FILES
    assert len(list(flight_dir.iterdir())) == 10_002


def test_two_scans_at_once_both_see_every_file(flight_dir: Path, directory_fd: int) -> None:
    """They share the directory's descriptor, but not the position in it: a scrape misses no rank because another one runs."""
    expected = sorted(name(rank) for rank in range(500))
    for one in expected:
        (flight_dir / one).touch()
    found: list[list[str]] = []
    finish([threading.Thread(target=lambda: found.extend(reader.names(directory_fd) for _ in range(40))) for _ in range(4)])
    assert len(found) == 160
    assert all(one == expected for one in found)
