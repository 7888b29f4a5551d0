"""The flight directory and its files under the exporter's hands: deleted, replaced, shut, and changed while they are read."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exporters import Client, Service
from tests.rank_files import Clock, File, live_rank, train
from tests.scanners import scanner_of, states
from tests.support import wait_until
from torchobs import catalog
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.files import lock
from torchobs.flight.reader import reader
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Snapshot

NOBODY = 65534


@pytest.fixture
def clock() -> Clock:
    """Just after the files' birth."""
    return Clock(0.1)


@pytest.fixture
def file(flight_dir: Path) -> Iterator[File]:
    """A living rank's, after one step."""
    made = File(flight_dir)
    made.step(1, 0.05)
    made.writer.fold()
    yield made.save().hold()
    made.release()


def steps_of(snapshot: Snapshot) -> float | None:
    """The steps of the first rank."""
    return next((value for series, value in snapshot.ranks[0].view.points if series.name == catalog.STEPS.name), None)  # type: ignore[return-value]  # a counter


def steps(client: Client) -> float | None:
    """The steps of rank 0."""
    return client.value("torchobs_steps_total", rank="0")


def test_a_directory_that_is_made_again_is_followed(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted, a file in its place, made again by its rank: no scrape fails, and the rank goes on where it was."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    home = flight_dir / "run"
    home.mkdir(mode=0o700)
    writer = live_rank(home)
    train(writer, [1, 2, 3])

    def is_alive() -> bool:
        writer.heartbeat()
        writer.publish()
        return exporter.state() == "alive"

    with Service(ExporterConfig(flight_dir=str(home))) as exporter:
        assert steps(exporter) == 3
        shutil.rmtree(home)
        wait_until(lambda: exporter.value("torchobs_exporter_config_ok") == 0)
        home.write_text("a file")
        assert exporter.value("torchobs_exporter_config_ok") == 0
        home.unlink()
        writer.check_name()
        train(writer, [4])
        wait_until(lambda: steps(exporter) == 4)
        assert exporter.value("torchobs_exporter_config_ok") == 1
        wait_until(is_alive)
    writer.close()


class _Refusing:
    """The system call that has stopped to work, with whatever it says."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *_: object, **__: object) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_what_cannot_be_asked_for_at_present_makes_nobody_dead(
    scanner: Scanner, flight_dir: Path, file: File, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Names, files and locks that cannot be opened: who was alive stays so by its heartbeat, and unresponsive without one."""
    assert states(scanner.scan()) == {"0": "alive"}
    with monkeypatch.context() as failing:
        for module, name in ((reader, "list_names"), (lock, "_probe"), (lock, "held_here")):
            failing.setattr(module, name, _Refusing(number))
        (flight_dir / "new").touch()
        clock.seconds = 0.5
        file.step(2, 0.4)
        file.beat(0.5)
        file.save()
        snapshot = scanner.scan()
        assert states(snapshot) == {"0": "alive"}
        assert snapshot.problems == (f"{os.strerror(number)}: {flight_dir}",)
        assert snapshot.ranks[0].view.last_step_ns is not None
        clock.seconds = 5.0
        assert states(scanner.scan()) == {"0": "unresponsive"}
    file.release()
    clock.seconds = 6.0
    assert states(scanner.scan()) == {"0": "lost"}


def test_a_file_that_cannot_be_looked_at_for_a_while_is_served_on(
    scanner: Scanner, file: File, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system's hiccup is no reason to forget a rank, nor to call its file bad."""
    scanner.scan()
    with monkeypatch.context() as failing:
        failing.setattr(reader.FlightFile, "follow", _Refusing(errno.EIO))
        clock.seconds = 0.5
        file.beat(0.5)
        file.save()
        failing.setattr(reader, "open_file", _Refusing(errno.EIO))
        snapshot = scanner.scan()
    assert (states(snapshot), snapshot.files["bad"]) == ({"0": "alive"}, 0)


@pytest.mark.parametrize("replacement", ["garbage", "shorter", "another's"])
def test_a_file_that_is_replaced_between_two_reads_is_what_it_is_now(
    scanner: Scanner, flight_dir: Path, file: File, monkeypatch: pytest.MonkeyPatch, replacement: str
) -> None:
    """Another inode of the same name, in the middle of a scan: that scan serves what it has open, the next what is there."""
    sound = file.path.read_bytes()
    other = File(flight_dir, rank=7, seed=7)
    content = {"garbage": os.urandom(len(sound)), "shorter": sound[:5000], "another's": bytes(other.buffer)}
    pread, reads = os.pread, 0

    def replacing(fd: int, length: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 2:
            new = flight_dir / ".new"
            new.write_bytes(content[replacement])
            new.rename(file.path)
        return pread(fd, length, offset)

    assert states(scanner.scan()) == {"0": "alive"}
    monkeypatch.setattr(os, "pread", replacing)
    assert states(scanner.scan()) == {"0": "alive"}
    assert reads > 2
    snapshot = scanner.scan()
    assert (states(snapshot), snapshot.files["bad"]) == ({}, 1)
    file.path.write_bytes(sound)


@contextlib.contextmanager
def powerless() -> Iterator[None]:
    """Without root's rights over other people's files."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_directory_that_is_shut_for_a_while(flight_dir: Path, file: File, clock: Clock) -> None:
    """Mode 000 and back: what is open is served on, what is wrong is said, and what came meanwhile is found."""
    if os.geteuid() == 0:
        for path in (flight_dir, *flight_dir.iterdir()):
            os.chown(path, NOBODY, NOBODY)
    writing = os.open(file.path, os.O_RDWR)
    with powerless():
        scanner = scanner_of(flight_dir, clock)
        assert states(scanner.scan()) == {"0": "alive"}
        flight_dir.chmod(0)
        file.step(2, 0.08)
        file.writer.publish()
        os.pwrite(writing, file.buffer, 0)
        shut = scanner.scan()
        assert (states(shut), steps_of(shut)) == ({"0": "alive"}, 2)
        assert "Permission denied" in shut.problems[0]
        assert not scanner_of(flight_dir, clock).scan().ranks, "who comes now sees nothing"
        flight_dir.chmod(0o700)
    other = File(flight_dir, rank=1, seed=2).save()
    os.chown(other.path, *((NOBODY, NOBODY) if os.geteuid() == 0 else (-1, -1)))
    with powerless():
        again = scanner.scan()
        assert (sorted(states(again)), len(again.problems)) == (["0", "1"], 0)
        scanner.close()
    os.close(writing)
