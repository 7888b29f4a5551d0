"""Flight files and their scanners by a clock that the test moves, and what the snapshots say."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.rank_files import Clock, File
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def scanner_of(directory: Path | str, clock: Clock, **options: Any) -> Scanner:
    """A scanner of a directory; the options are `ExporterConfig`'s."""
    return Scanner(ExporterConfig(flight_dir=str(directory), **options), clock)


@pytest.fixture
def clock() -> Clock:
    """The exporter's clocks: `clock.seconds` after the files are born. A module whose tests begin later has its own."""
    return Clock()


@pytest.fixture
def scanner(flight_dir: Path, clock: Clock) -> Iterator[Scanner]:
    """A scanner of the flight directory."""
    with closing(scanner_of(flight_dir, clock)) as made:
        yield made


@pytest.fixture
def file(flight_dir: Path) -> Iterator[File]:
    """A living rank's file, not written yet."""
    made = File(flight_dir).hold()
    made.beat(1.0)
    yield made
    made.release()


def states(snapshot: Snapshot) -> dict[str, str]:
    """State by rank."""
    return {one.rank: one.state for one in snapshot.ranks}


def steps(snapshot: Snapshot) -> dict[str, Any]:
    """Steps by rank."""
    return {
        one.rank: next(value for series, value in one.view.points if series.name == catalog.STEPS.name)
        for one in snapshot.ranks
    }
