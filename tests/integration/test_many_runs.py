"""A directory with more dead runs than anybody wants to keep in memory: the living are served, the rest is counted and said."""

from __future__ import annotations

import gc
import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.rank_files import Clock, File, scanner_of, states
from torchobs.cli import inspect, report
from torchobs.flight import reader
from torchobs.flight.reader import FlightFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torchobs.ranks.scanner import Scanner

DEAD = 30
LATER_S = 1000.0
"""When the grace of what ended at the birth of the files is long over."""


@pytest.fixture
def clock() -> Clock:
    """Long after the files' birth."""
    return Clock(LATER_S)


@pytest.fixture
def living(flight_dir: Path) -> Iterator[File]:
    """A living rank, the last by its name."""
    made = File(flight_dir, seed=900, rank=9).hold()
    made.beat(LATER_S)
    yield made.save()
    made.release()


def open_files() -> int:
    """The flight files that somebody keeps in memory."""
    gc.collect()
    return sum(isinstance(one, FlightFile) for one in gc.get_objects())


def test_the_long_dead_are_not_kept_in_memory(scanner: Scanner, flight_dir: Path, living: File, clock: Clock) -> None:
    """Neither those that were dead at the first scan nor one whose grace ends later; all are counted, scan after scan."""
    for seed in range(1, DEAD + 1):
        File(flight_dir, seed=seed, run_id=f"run-{seed}").save()
    before = open_files()
    for _ in range(2):
        snapshot = scanner.scan()
        assert (states(snapshot), snapshot.files["expired"], snapshot.files["served"]) == ({"9": "alive"}, DEAD, 1)
        del snapshot
    assert open_files() == before + 1
    living.release()
    clock.seconds += 1.0
    assert states(scanner.scan()) == {"9": "lost"}
    clock.seconds += 400.0
    assert scanner.scan().files["expired"] == DEAD + 1
    assert open_files() == before


def test_a_long_dead_restart_lets_no_older_one_be_served(scanner: Scanner, flight_dir: Path, clock: Clock) -> None:
    """What ended last of a rank stands for it, also when nothing but its name is kept."""
    clock.seconds = 400.0
    File(flight_dir, seed=1).save()
    newest = File(flight_dir, seed=2, born_s=10.0)
    newest.beat(20.0)
    newest.save()
    snapshot = scanner.scan()
    assert (snapshot.ranks, snapshot.files["expired"], snapshot.files["superseded"]) == ((), 1, 1)


def test_the_living_are_served_before_all_that_ended_lately(
    flight_dir: Path, living: File, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loop of crashes, say: a scan that may open one file more opens that of the living rank."""
    for seed in range(1, DEAD + 1):
        File(flight_dir, seed=seed, born_s=LATER_S - 20.0, run_id=f"run-{seed}").save()
    monkeypatch.setattr("torchobs.ranks.scanner.OPENING_S", 1.0)
    with_scanner = scanner_of(flight_dir, clock)
    opened: list[str] = []

    def note(name: str, *_: object) -> int:
        opened.append(name)
        return 0

    monkeypatch.setattr(with_scanner, "_open", note)
    with_scanner.scan()
    with_scanner.close()
    assert opened[0] == living.path.name
    assert len(opened) == DEAD + 1


def test_what_is_left_out_is_counted_and_logged_once(
    flight_dir: Path, living: File, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the most files that are read; the living rank is never among them."""
    for seed in range(1, DEAD + 1):
        File(flight_dir, seed=seed, run_id=f"run-{seed}").save()
    os.utime(living.path, (0, 0))
    monkeypatch.setattr(reader, "MAX_FILES", 10)
    with_scanner = scanner_of(flight_dir, clock)
    for _ in range(3):
        snapshot = with_scanner.scan()
        assert states(snapshot) == {"9": "alive"}
        assert (snapshot.files["expired"], snapshot.files["left_out"]) == (9, DEAD + 1 - 10)
    with_scanner.close()
    assert caplog.text.count("21 flight files are left out") == 1


def test_commands_say_what_they_leave_out(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`runs`, its JSON and `inspect`."""
    for seed in range(1, 6):
        File(flight_dir, seed=seed, run_id=f"run-{seed}").save()
    monkeypatch.setattr(reader, "MAX_FILES", 3)
    assert report.runs(["--dir", str(flight_dir)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("2 more flight files in this directory: 3 are read")
    assert report.runs(["--dir", str(flight_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["runs"]), found["left_out"]) == (3, 2)
    inspect.main([str(flight_dir)])
    assert "2 more flight files in this directory: 3 are read" in capsys.readouterr().out
