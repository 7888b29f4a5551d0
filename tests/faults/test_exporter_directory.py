"""The flight directory and its files under the exporter's hands: deleted, replaced, shut, and changed while they are read."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.exporters import Client, Service, start_program
from tests.rank_files import BOOT, Clock, File, live_rank, train
from tests.support import wait_until
from torchobs.exporter import service
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.scan import Scanner, Snapshot
from torchobs.flight import lock, reader

NOBODY = 65534
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def clock() -> Clock:
    """Just after the files' birth."""
    return Clock(0.1)


@pytest.fixture
def scanner(flight_dir: Path, clock: Clock) -> Iterator[Scanner]:
    """Of the flight directory."""
    made = Scanner(ExporterConfig(flight_dir=str(flight_dir)), clock)
    yield made
    made.close()


@pytest.fixture
def file(flight_dir: Path) -> Iterator[File]:
    """A living rank's, after one step."""
    made = File(flight_dir)
    made.step(1, 0.05)
    made.writer.fold()
    yield made.save().hold()
    made.release()


def states(snapshot: Snapshot) -> dict[str, str]:
    """State by rank."""
    return {one.rank: one.state for one in snapshot.ranks}


def steps(client: Client) -> float | None:
    """The steps of rank 0."""
    return client.value("torchobs_steps_total", rank="0")


def test_a_directory_that_is_made_again_is_followed(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted, a file in its place, made again by its rank: no scrape fails, and the rank goes on where it was."""
    monkeypatch.setattr(service, "TICK_S", 0.05)
    home = flight_dir / "run"
    home.mkdir(mode=0o700)
    writer = live_rank(home)
    train(writer, [1, 2, 3])
    with Service(ExporterConfig(flight_dir=str(home))) as exporter:
        assert steps(exporter) == 3
        shutil.rmtree(home)
        wait_until(lambda: exporter.value("torchobs_exporter_config_ok") == 0)
        home.write_text("a file")
        assert exporter.value("torchobs_exporter_config_ok") == 0
        home.unlink()
        writer.keep_file()
        train(writer, [4])
        wait_until(lambda: steps(exporter) == 4)
        assert exporter.value("torchobs_exporter_config_ok") == 1
        assert exporter.state() == "alive"
    writer.close()


class _Refusing:
    """The system call that has stopped to work, with whatever it says."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *_: object, **__: object) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_asked_for_at_present_makes_nobody_dead(
    scanner: Scanner, file: File, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Names, files and locks that cannot be opened: who was alive stays so by its heartbeat, and unresponsive without one."""
    assert states(scanner.scan()) == {"0": "alive"}
    with monkeypatch.context() as failing:
        for module, name in ((reader, "names"), (lock, "_probe"), (lock, "held_here")):
            failing.setattr(module, name, _Refusing(number))
        clock.seconds = 0.5
        file.step(2, 0.4)
        file.beat(0.5)
        file.save()
        snapshot = scanner.scan()
        assert states(snapshot) == {"0": "alive"}
        assert snapshot.problems == (os.strerror(number),)
        assert snapshot.ranks[0].view.last_step_ns is not None
        clock.seconds = 5.0
        assert states(scanner.scan()) == {"0": "unresponsive"}
    file.release()
    clock.seconds = 6.0
    assert states(scanner.scan()) == {"0": "lost"}


@pytest.mark.parametrize("replacement", ["garbage", "shorter", "sparse", "another's"])
def test_a_file_that_is_replaced_between_two_reads_is_what_it_is_now(
    scanner: Scanner, flight_dir: Path, file: File, monkeypatch: pytest.MonkeyPatch, replacement: str
) -> None:
    """Another inode of the same name, in the middle of a scan: that scan serves what it has open, the next what is there."""
    sound = file.path.read_bytes()
    other = File(flight_dir, rank=7, seed=7)
    content = {"garbage": os.urandom(len(sound)), "shorter": sound[:5000], "sparse": b"", "another's": bytes(other.buffer)}
    pread, reads = os.pread, 0

    def replacing(fd: int, length: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 4:
            new = flight_dir / ".new"
            new.write_bytes(content[replacement])
            if replacement == "sparse":
                os.truncate(new, 1 << 40)
            new.rename(file.path)
        return pread(fd, length, offset)

    assert states(scanner.scan()) == {"0": "alive"}
    monkeypatch.setattr(os, "pread", replacing)
    assert states(scanner.scan()) == {"0": "alive"}
    assert reads > 4
    snapshot = scanner.scan()
    assert (states(snapshot), snapshot.files["bad"]) == ({}, 1)
    file.path.write_bytes(sound)


@pytest.mark.skipif(os.getuid() != 0, reason="another user's doing takes root")
def test_a_directory_that_is_shut_for_a_while(start: Start, flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Mode 000 and back, with an exporter that is not root: what is open is served on, and what is wrong is said."""


def test_memory_that_a_file_asks_for_is_not_given(start: Start, flight_dir: Path, tmp_path: Path) -> None:
    """placeholder"""
