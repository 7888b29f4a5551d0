"""Thousands of damaged and forged files: no exception that no caller expects, no counter back, no long read."""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import pytest

from tests import flights
from tests.faults.flight_forger import Forger
from torchobs import catalog
from torchobs.flight.format.layout import HEADER_SIZE, BadFlightFileError, Extent, Header, Region, encode_header
from torchobs.flight.reader import reader
from torchobs.flight.reader.decode import Distribution, SeriesValue
from torchobs.flight.writer.series_table import USER
from torchobs.flight.writer.writer import FlightWriter

FILES = 100_000
TASKS = 8
"""Each forges with a seed of its own."""
RECORDS = 64
STEPS = 149
CPU_LIMIT_S = 0.25
"""What one read of a file of 256 KiB may take at most; it takes 0.2 ms."""


@dataclass
class Outcome:
    """What became of the files of one task."""

    bad: int = 0
    served: int = 0
    rejected: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def forged_life() -> tuple[Header, bytes]:
    """A rank's file in the middle of its life: a wrapped ring, records that are not folded yet, two blocks, events."""
    header = flights.header(RECORDS)
    events = header.regions[Region.EVENTS]
    header = replace(header, regions={**header.regions, Region.EVENTS: Extent(events.offset, 4096, events.item_size)})
    memory = flights.RecordingMemory(header.file_size)
    writer = FlightWriter(header, memory)
    for number in range(1, STEPS + 1):
        flights.step(writer, number)
        if number == STEPS - 5:
            writer.fold()
    for index in range(8):
        metric = catalog.Metric(f"test.{index}", catalog.Kind.COUNTER, "", "brief " * 100 * (index % 2), integer=index > 3)
        cell = writer.table.open(metric, {"layer": f"block.{index}"}, USER, either=index % 3 == 0)
        assert cell
        cell.add(index)
        writer.event("test", {"index": index, "text": "x" * index})
    writer.publish()
    return header, encode_header(header) + memory.snapshot()[HEADER_SIZE:]


class Attack:
    """Forges one file after the other in one place, and reads each as an exporter does."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.header, self.whole = forged_life()
        self.image = flights.Image(directory, self.header, f"r{seed}-{0:032x}.flight")
        self.image.store(0, self.whole)
        self.forger, self.outcome = Forger(self.header, self.whole, seed), Outcome()
        self.unseen_before = self.header.regions[Region.BLOCKS].offset
        self._begin()

    def _begin(self) -> None:
        self.follower = self.image.open()
        self.points = self.follower.read().points

    def once(self) -> None:
        """Forge, read, and put it right."""
        touched, before = self.forger.forge(), self.points
        for begin, end in touched:
            self.image.store(begin, bytes(self.forger.raw[begin:end]))
        # a follower has read the header and the series: only who opens the file anew sees what was done to them
        if min(touched)[0] < self.unseen_before or self.forger.chance.random() < 0.1:
            self._open_anew()
        self._timed(self._follow)
        if max(touched)[1] > self.header.regions[Region.EVENTS].offset:
            self._timed(lambda: self._read_events(self.follower))
        self.forger.undo(touched)
        for begin, end in touched:
            self.image.store(begin, self.whole[begin:end])
        if self.points is not before or self.follower.rejected:
            self._timed(self._follow)
        if self.follower.rejected:
            self.outcome.rejected += 1  # a lie was higher than the truth, and has been served
            self.follower.close()
            self._begin()

    def _timed(self, read: Callable[[], None]) -> None:
        began = time.thread_time()
        read()
        self.outcome.slowest_s = max(self.outcome.slowest_s, time.thread_time() - began)

    def _open_anew(self) -> None:
        try:
            file = self.image.open()
        except (BadFlightFileError, OSError):
            self.outcome.bad += 1
            return
        try:
            self._timed(lambda: self._read_all(file))
        except (BadFlightFileError, OSError):
            self.outcome.bad += 1
        file.close()

    def _read_all(self, file: reader.FlightFile) -> None:
        self._check(file.read(final=self.outcome.served % 2 == 0).points)
        self.outcome.served += 1
        assert len(file.steps(5)) <= 5
        self._read_events(file)

    def _read_events(self, file: reader.FlightFile) -> None:
        positions = []
        for position, fields in file.events():
            str(fields).encode()
            positions.append(position)
        if positions != sorted(set(positions)):
            self.outcome.wrong.append("events twice, or out of order")

    def _follow(self) -> None:
        """What is served after what was served: no counter lower, none gone."""
        points = self.follower.read().points
        self.outcome.served += 1
        if points == self.points:
            return
        self._check(points)
        now = dict(points)
        for series, old in self.points:
            new = now.get(series)
            if series.kind is catalog.Kind.COUNTER and not (isinstance(new, (int, float)) and new >= float(str(old))):
                self.outcome.wrong.append(f"{series.name}: {old} → {new}")
        self.points = points

    def _check(self, points: tuple[SeriesValue, ...]) -> None:
        """Every value is a number, every text can be put on a page, and no two series have one word."""
        for series, value in points:
            numbers = (value.sum, *value.counts) if isinstance(value, Distribution) else (value,)
            f"{series.name}{series.unit}{series.brief}{series.attributes}".encode()
            if not all(map(isfinite, numbers)):
                self.outcome.wrong.append(f"{series.name}: {value}")
        if len({(series.block, series.word) for series, _ in points}) < len(points):
            self.outcome.wrong.append("two series in one word")


def attack(directory: Path, seed: int, count: int) -> Outcome:
    """Forge and read ``count`` files."""
    one = Attack(directory, seed)
    for _ in range(count):
        one.once()
    return one.outcome


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_forged_file_of_a_hundred_thousand_harms_its_reader(flight_dir: Path, share_of: Callable[[int], int]) -> None:
    """100,000 files, half of the changes with right CRCs: bad or served; a follower's counters never step back."""
    files = share_of(FILES)
    workers = ProcessPoolExecutor(min(os.cpu_count() or 1, TASKS), mp_context=multiprocessing.get_context("spawn"))
    with workers:
        tasks = [workers.submit(attack, flight_dir, seed, files // TASKS) for seed in range(TASKS)]
        outcomes = [task.result() for task in tasks]
    assert [wrong for outcome in outcomes for wrong in outcome.wrong] == []
    assert max(outcome.slowest_s for outcome in outcomes) < CPU_LIMIT_S
    assert sum(outcome.bad for outcome in outcomes) > files // 20
    assert sum(outcome.served for outcome in outcomes) > files // 2
    assert sum(outcome.rejected for outcome in outcomes) > files // 1000
