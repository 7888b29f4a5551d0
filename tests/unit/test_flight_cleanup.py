"""Cleaning: what goes, what stays, and what is never touched."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests import flights
from torchobs.flight.files import entries, lock
from torchobs.flight.files.cleanup import SETTLED_S, STALE_S, clean
from torchobs.flight.files.create import file_name, lock_name
from torchobs.flight.format.layout import MIN_SIZE, Header, Live, Region, encode_header
from torchobs.flight.writer.writer import open_writer

HOUR_NS = 3600 * 1_000_000_000
NOW = time.monotonic_ns() + 1000 * HOUR_NS
"""A moment so late that a file's age is what the test says, not what the machine's uptime allows."""


Make = Callable[..., str]


@pytest.fixture
def make(flight_dir: Path) -> Make:
    """Make a flight file whose last heartbeat was some hours before NOW."""

    def one(hours: float, *, lock_file: bool = True, other_boot: bool = False, of: Header | None = None) -> str:
        header = of or flights.header()
        if other_boot:
            header = replace(header, boot_id=bytes(range(16)))
        raw = bytearray(header.file_size)
        raw[: len(encode_header(header))] = encode_header(header)
        beat = header.regions[Region.LIVE].offset + 8 * Live.HEARTBEAT_NS
        raw[beat : beat + 8] = (NOW - int(hours * HOUR_NS)).to_bytes(8, "little")
        name = file_name(header)
        (flight_dir / name).write_bytes(raw)
        if lock_file:
            (flight_dir / lock_name(name)).touch()
        return name

    return one


def age(path: Path, seconds: float) -> Path:
    """Make a file that much older by its mtime."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)
    return path


def test_a_dead_file_goes_when_it_is_old_enough_and_takes_its_lock_along(
    directory_fd: int, flight_dir: Path, make: Make
) -> None:
    """By the last heartbeat in it, not by its mtime, which stores through a map do not move."""
    old, young = make(25), age(flight_dir / make(23), 10 * 24 * 3600).name
    assert clean(directory_fd, now=NOW, min_age_s=24 * 3600) == [old]
    assert sorted(path.name for path in flight_dir.iterdir()) == sorted([young, lock_name(young)])


def test_beyond_the_total_size_the_oldest_go_first(directory_fd: int, make: Make) -> None:
    """As many as it takes."""
    names = {hours: make(hours) for hours in (1, 5, 3, 2, 4)}
    assert clean(directory_fd, now=NOW, max_total_bytes=3 * MIN_SIZE) == [names[5], names[4]]
    assert clean(directory_fd, now=NOW, max_total_bytes=3 * MIN_SIZE) == []


def test_a_living_rank_s_file_never_goes(directory_fd: int, flight_dir: Path) -> None:
    """However old its heartbeat: a rank may be stopped for days. And asking does not drop its lock."""
    writer = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == []
    assert (flight_dir / writer.name).exists()
    assert lock.is_held(directory_fd, lock_name(writer.name))
    writer.close()


def test_a_rank_that_lost_its_lock_is_known_by_its_heartbeat(directory_fd: int, make: Make) -> None:
    """A program that closes all descriptors drops our lock and lives on; so it does when the lock was deleted."""
    beat_ago_h = (SETTLED_S - 1) / 3600
    make(beat_ago_h)
    make(beat_ago_h, lock_file=False)
    assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == []
    dead = make(2 * SETTLED_S / 3600, lock_file=False)
    assert clean(directory_fd, now=NOW, min_age_s=0.0) == [dead]


def test_a_file_of_another_boot_is_as_old_as_this_one_at_least(directory_fd: int, make: Make) -> None:
    """Its heartbeat counts from another zero; but whoever beat then is gone since this boot began."""
    dead = make(0, other_boot=True)
    assert clean(directory_fd, now=24 * HOUR_NS, min_age_s=25 * 3600) == []
    assert clean(directory_fd, now=24 * HOUR_NS, min_age_s=23 * 3600) == [dead]


def test_a_file_that_cannot_be_read_is_as_old_as_its_mtime(directory_fd: int, flight_dir: Path) -> None:
    """Garbage under one of our names, or a later version's file, whose lock is free."""
    name = file_name(flights.header())
    (flight_dir / name).write_bytes(b"garbage")
    assert clean(directory_fd, now=NOW, min_age_s=3600) == []
    age(flight_dir / name, 7200)
    assert clean(directory_fd, now=NOW, min_age_s=3600) == [name]


def test_names_that_are_not_ours_are_never_touched(directory_fd: int, flight_dir: Path, make: Make) -> None:
    """Nor what has one of our names and is no file of ours: links, directories, pipes, hard links."""
    target = age(flight_dir / make(500), STALE_S * 10)
    foreign = ["exporter.json", "exporter.lock", "control", "x.flight", ".tmp-x", ".tmp-" + "g" * 16, "r0-x.lock", "data"]
    for name in foreign:
        (flight_dir / name).touch()
    names = [file_name(flights.header()) for _ in range(4)]
    (flight_dir / names[0]).symlink_to(target)
    (flight_dir / names[1]).mkdir()
    os.mkfifo(flight_dir / names[2])
    (flight_dir / names[3]).hardlink_to(target)
    for name in (*foreign, *names):
        age(flight_dir / name, STALE_S * 10)
    before = {path.name for path in flight_dir.iterdir()}
    assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == []
    assert {path.name for path in flight_dir.iterdir()} == before


def test_what_a_birth_that_was_killed_left_goes_after_an_hour(directory_fd: int, flight_dir: Path) -> None:
    """Temporary files, and locks without their file; the young ones may belong to a birth that goes on."""
    orphan = lock_name(file_name(flights.header()))
    for name in (".tmp-0123456789abcdef", orphan):
        (flight_dir / name).touch()
    assert clean(directory_fd, now=NOW) == []
    for name in (".tmp-0123456789abcdef", orphan):
        age(flight_dir / name, STALE_S + 1)
    assert sorted(clean(directory_fd, now=NOW)) == [".tmp-0123456789abcdef", orphan]
    assert list(flight_dir.iterdir()) == []


def test_a_lock_that_is_held_stays_without_its_file(directory_fd: int, flight_dir: Path) -> None:
    """Its rank is about to make the file anew."""
    writer = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    (flight_dir / writer.name).unlink()
    age(flight_dir / lock_name(writer.name), STALE_S * 2)
    assert clean(directory_fd, now=NOW) == []
    writer.close()


def test_a_file_of_another_user_stays(directory_fd: int, flight_dir: Path, make: Make) -> None:
    """Root may remove it, and does not."""
    name = make(100)
    if os.getuid() == 0:
        os.chown(flight_dir / name, 12345, 12345)
        assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == []
    else:
        assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == [name]


def test_a_name_that_was_given_to_another_file_meanwhile_stays(
    directory_fd: int, flight_dir: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed is what was looked at."""
    header = flights.header()
    name = make(100, of=header)

    def replace_it(directory_fd: int, name: str) -> int:
        (flight_dir / name).unlink()
        make(100, of=header)
        return inode(directory_fd, name)

    inode = entries.inode
    monkeypatch.setattr(entries, "inode", replace_it)
    assert clean(directory_fd, now=NOW) == []
    assert (flight_dir / name).exists()
