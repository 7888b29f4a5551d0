"""What a process leaves behind that is killed between any two of its stores, or whose stores are seen out of order."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import flights
from torchobs import catalog
from torchobs.flight.format.layout import BadFlightFileError, Region
from torchobs.flight.format.step_record import unpack
from torchobs.flight.reader import reader
from torchobs.flight.writer.series_table import USER

RECORDS = 16
STEPS = 60
EQUAL = [catalog.Metric(f"test.{name}", catalog.Kind.COUNTER, "", "", integer=True) for name in "abc"]
"""Three counters that are changed together, and that a view must never show apart."""
WINDOW = 12
"""Stores that may be seen in any order: some times what a processor's store buffer and the length of a step allow."""


class Life:
    """A writer's whole life, store by store, and what it had promised after each."""

    def __init__(self) -> None:
        self.writer, self.memory = flights.recorded(RECORDS)
        self.header = self.writer.header
        self.promised_steps = [0] * (len(self.memory.stores) + 1)
        self.promised_counts = [0] * len(self.promised_steps)
        for number in range(1, STEPS + 1):
            self._round(number)
        ring = self.header.regions[Region.STEPS]
        raws = [raw for offset, raw in self.stores if ring.offset <= offset < ring.offset + ring.length]
        records = [made for raw in raws if (made := unpack(raw, self.header.seed))]
        assert [made.seq for made in records] == list(range(1, STEPS + 1))
        self.states = list(flights.folded_states(self.header, records))

    @property
    def stores(self) -> list[tuple[int, bytes]]:
        """Offset and bytes of every store."""
        return self.memory.stores

    def _round(self, number: int) -> None:
        (flights.plain_step if number % 3 else flights.step)(self.writer, number)
        self._acknowledge(steps=number)
        cells = [self.writer.table.cell(metric, {}, USER) for metric in EQUAL]
        self.writer.heartbeat()
        self.writer.event("test", {"number": number})
        for cell in cells:
            assert cell
            cell.add(1)
        self.writer.table.publish()
        self._acknowledge(counts=number)
        if number % 7 == 0:
            self.writer.fold()

    def _acknowledge(self, steps: int = 0, counts: int = 0) -> None:
        """What was promised before holds for all stores but the last."""
        for promised, now in ((self.promised_steps, steps), (self.promised_counts, counts)):
            missing = len(self.stores) + 1 - len(promised)
            promised.extend([promised[-1]] * missing)
            promised[-1] = max(promised[-1], now)

    def judge(self, view: reader.View, known: int) -> tuple[int, int]:
        """Check a view of a file that holds the first ``known`` stores; return its steps and its counts."""
        steps, count = self.judge_order(view, known)
        assert count >= self.promised_counts[known]
        return steps, count

    def judge_order(self, view: reader.View, known: int) -> tuple[int, int]:
        """The same, where some of the next stores are visible before others.

        Of a block that is published twice meanwhile both slots may be on their way, and the one before is not promised.
        """
        core, seen = flights.values(view, folded=True), flights.values(view)
        steps = flights.whole(core.get((catalog.STEPS.name, ())))
        assert core.items() <= self.states[steps].items()  # less: an entry of the series table that is not seen yet
        counts = {flights.whole(seen[metric.name, ()]) for metric in EQUAL if (metric.name, ()) in seen}
        assert len(counts) <= 1
        assert steps >= self.promised_steps[known]
        return steps, max(counts, default=0)


@pytest.fixture(scope="module")
def life() -> Life:
    """One life for all tests of this module."""
    return Life()


@pytest.fixture
def image(flight_dir: Path, life: Life) -> Iterator[flights.Image]:
    """A file that nothing but the header has been stored into."""
    made = flights.Image(flight_dir, life.header)
    yield made
    made.close()


def fresh(image: flights.Image, *, final: bool = False) -> reader.View:
    """What a reader sees that has never seen the file before."""
    file = image.open()
    try:
        return file.read(final=final)
    finally:
        file.close()


def test_killed_after_any_store_every_acknowledged_step_is_there_and_nothing_is_mixed(life: Life, image: flights.Image) -> None:
    """After every prefix of the stores: readable, an exact state, all that was acknowledged, no counter lower than before."""
    follower = image.open()
    last = last_final = (0, 0)
    for known in range(len(life.stores) + 1):
        if known:
            image.store(*life.stores[known - 1])
        now, final = life.judge(fresh(image), known), life.judge(fresh(image, final=True), known)
        assert life.judge(follower.read(), known) == now
        assert all(a >= b for a, b in zip(now, last, strict=True))
        assert all(a >= b for a, b in zip(final, last_final, strict=True))
        last, last_final = now, final
    assert last == (STEPS, STEPS)
    assert not follower.rejected
    follower.close()


def test_stores_seen_out_of_order_or_torn_never_show_a_state_that_did_not_exist(life: Life, image: flights.Image) -> None:
    """Any 12 consecutive stores seen in part and one of them torn: 4,000 such files, all of them readable and exact."""
    chance = random.Random(64)
    starts = sorted(chance.randrange(len(life.stores)) for _ in range(4000))
    known = 0
    for start in starts:
        while known < start:
            image.store(*life.stores[known])
            known += 1
        undo = _store_some(image, life.stores[start : start + WINDOW], chance)
        life.judge_order(fresh(image), start)
        for offset, data in reversed(undo):
            image.store(offset, data)


def test_killed_in_the_middle_of_a_store_the_rest_is_there(life: Life, image: flights.Image) -> None:
    """A process that is killed while it copies a record, a slot or an entry loses what it had not acknowledged, no more."""
    chance = random.Random(8)
    for known, (offset, data) in enumerate(life.stores):
        before = image.read(offset, len(data))
        if len(data) > 8:
            image.store(offset, _tear(before, data, chance))
            life.judge(fresh(image, final=True), known)
        image.store(offset, data)


def _store_some(image: flights.Image, stores: list[tuple[int, bytes]], chance: random.Random) -> list[tuple[int, bytes]]:
    undo = []
    seen = [store for store in stores if chance.random() < 0.5]
    torn = chance.randrange(len(seen)) if seen else -1
    for number, (offset, data) in enumerate(seen):
        before = image.read(offset, len(data))
        undo.append((offset, before))
        image.store(offset, _tear(before, data, chance) if number == torn and len(data) > 8 else data)
    return undo


def _tear(before: bytes, data: bytes, chance: random.Random) -> bytes:
    """A part of the words of ``data``, the rest as it was: a copy that was interrupted, or seen while it ran."""
    if chance.random() < 0.5:
        cut = chance.randrange(len(data) + 1)
        return data[:cut] + before[cut:]
    words = range(0, len(data), 8)
    return b"".join((data if chance.random() < 0.5 else before)[at : at + 8] for at in words)


def test_any_subset_of_all_stores_is_readable(life: Life, image: flights.Image) -> None:
    """However absurd the order (stores of the whole life, in part): no exception, and no mixed values."""
    chance = random.Random(1)
    for _ in range(300):
        share = chance.random()
        image.clear()
        for offset, data in life.stores:
            if chance.random() < share:
                image.store(offset, data)
        try:
            seen = flights.values(fresh(image, final=True))
        except BadFlightFileError:
            continue
        assert len({seen[metric.name, ()] for metric in EQUAL if (metric.name, ()) in seen}) <= 1
