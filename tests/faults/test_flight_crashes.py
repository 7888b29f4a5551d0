"""A rank that dies at any point, and a reader that is stopped between its reads, of files that are cut or damaged."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import flights
from tests.faults.flight_victims import BUCKETS, HISTOGRAMS
from torchobs import catalog
from torchobs.flight import reader
from torchobs.flight.files import lock_name
from torchobs.flight.layout import SLOT_SIZE, BadFlightFileError, Header, Region
from torchobs.flight.step_record import StepRecord, unpack
from torchobs.flight.storage import Storage
from torchobs.flight.value_blocks import USER
from torchobs.flight.writer import FlightWriter

if TYPE_CHECKING:
    from pathlib import Path


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
        records = [record for raw in raws if (record := unpack(raw, self.header.seed))]
        assert [record.seq for record in records] == list(range(1, STEPS + 1))
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

    def judge(self, view: reader.View, stored: int) -> tuple[int, int]:
        """Check a view of a file that holds the first ``stored`` stores; return its steps and its counts."""
        steps, count = self.judge_order(view, stored)
        assert count >= self.promised_counts[stored]
        return steps, count

    def judge_order(self, view: reader.View, stored: int) -> tuple[int, int]:
        """The same, where some of the next stores are visible before others.

        Of a block that is published twice meanwhile both slots may be on their way, and the one before is not promised.
        """
        core, shown = flights.values(view, folded=True), flights.values(view)
        steps = flights.whole(core.get((catalog.STEPS.name, ())))
        assert core.items() <= self.states[steps].items()  # less: an entry of the series table that is not seen yet
        counts = {flights.whole(shown[metric.name, ()]) for metric in EQUAL if (metric.name, ()) in shown}
        assert len(counts) <= 1
        assert steps >= self.promised_steps[stored]
        return steps, max(counts, default=0)


@pytest.fixture(scope="module")
def life() -> Life:
    """One life for all tests of this module."""
    return Life()


@pytest.fixture
def image(flight_dir: Path, life: Life) -> Iterator[flights.Image]:
    """A file that nothing but the header has been stored into."""
    empty = flights.Image(flight_dir, life.header)
    yield empty
    empty.close()


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
    for stored in range(len(life.stores) + 1):
        if stored:
            image.store(*life.stores[stored - 1])
        now, final = life.judge(fresh(image), stored), life.judge(fresh(image, final=True), stored)
        assert life.judge(follower.read(), stored) == now
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
    stored = 0
    for start in starts:
        while stored < start:
            image.store(*life.stores[stored])
            stored += 1
        undo = _store_some(image, life.stores[start : start + WINDOW], chance)
        life.judge_order(fresh(image), start)
        for offset, data in reversed(undo):
            image.store(offset, data)


def _store_some(image: flights.Image, stores: list[tuple[int, bytes]], chance: random.Random) -> list[tuple[int, bytes]]:
    undo = []
    visible = [store for store in stores if chance.random() < 0.5]
    torn = chance.randrange(len(visible)) if visible else -1
    for number, (offset, data) in enumerate(visible):
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


Kill = Callable[[str, float], tuple[reader.View, int]]


@pytest.fixture
def kill(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, directory_fd: int) -> Kill:
    """Let a child of that role live for some seconds, kill it, and tell what it left and what it had acknowledged."""
    program = start(
        sys.executable, "-m", "tests.faults.flight_victims", flight_dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def one(role: str, life_s: float) -> tuple[reader.View, int]:
        assert program.stdin
        assert program.stdout
        program.stdin.write(f"{role} {life_s}\n")
        program.stdin.flush()
        name, acknowledged = program.stdout.readline().split()
        file = reader.open_file(directory_fd, name)
        view = file.read(final=True)
        file.close()
        (flight_dir / name).unlink()
        (flight_dir / lock_name(name)).unlink()
        return view, int(acknowledged)

    return one


@pytest.mark.long
def test_a_block_that_is_only_published_is_never_unreadable_and_never_mixed(kill: Kill, share_of: Callable[[int], int]) -> None:
    """400 kills of a process that only publishes 306 words: each time all words of one publication, the last acknowledged."""
    chance = random.Random(400)
    published, kills = 0, share_of(400)
    for _ in range(kills):
        view, acknowledged = kill("publish", chance.uniform(0.0, 0.003))
        shown = flights.values(view)
        first, second = (shown[metric.name, ()] for metric in HISTOGRAMS)
        number = sum(first.counts)
        assert number in {acknowledged, acknowledged + 1}
        assert first == second
        assert first.counts == tuple((number - rest) // BUCKETS + (rest > 0) for rest in range(BUCKETS))
        published += acknowledged
    assert published > kills


@pytest.mark.long
@pytest.mark.timeout(900)  # 10 s of work, but two thousand processes on a busy machine
def test_no_acknowledged_step_is_lost_in_a_thousand_kills(kill: Kill, share_of: Callable[[int], int]) -> None:
    """1,000 ranks killed at random moments, the sampler folding meanwhile: each step whose append returned counts, once."""
    chance = random.Random(1000)
    appended, kills = 0, share_of(1000)
    for _ in range(kills):
        view, acknowledged = kill("rank", chance.uniform(0.0, 0.003))
        steps = flights.whole(flights.value(view, catalog.STEPS))
        assert acknowledged <= steps <= acknowledged + 1
        assert flights.value(view, catalog.TOKENS) == 16 * steps
        assert flights.value(view, catalog.FLIGHT_DROPPED, what="record") == 0
        if steps:
            assert flights.value(view, catalog.LOSS) == steps / 64
        appended += acknowledged
    assert appended > kills


ROUNDS = 250


class Stopped(reader.FlightFile):
    """A reader that lets the writer run on after the read of each slot and before every read of the ring."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _pair(self, offset: int) -> bytes:
        first = super()._pair(offset)[:SLOT_SIZE]
        self.meanwhile()
        second = super()._pair(offset)[SLOT_SIZE:]
        self.meanwhile()
        return first + second

    def _following(self, upto: int) -> Iterator[StepRecord]:
        self.meanwhile()
        for record in super()._following(upto):
            self.meanwhile()
            yield record


class Training:
    """A writer into a file that is also read."""

    def __init__(self, wrapping: flights.Image) -> None:
        self._map = mmap.mmap(wrapping.fd, wrapping.header.file_size)
        self.writer = FlightWriter(wrapping.header, Storage(memoryview(self._map)))
        self.steps = 0

    def run(self, rounds: int) -> None:
        """Train for that many steps."""
        for _ in range(rounds):
            self.steps += 1
            flights.step(self.writer, self.steps)
            for metric in EQUAL:
                cell = self.writer.table.cell(metric, {}, USER)
                assert cell
                cell.add(1)
            self.writer.table.publish()
            if self.steps % 5 == 0:
                self.writer.fold()


@pytest.fixture
def wrapping(flight_dir: Path) -> Iterator[flights.Image]:
    """A file with a ring so small that it wraps while it is read."""
    image = flights.Image(flight_dir, flights.header(RECORDS))
    yield image
    image.close()


def stopped(wrapping: flights.Image) -> Stopped:
    """A reader of that file that can be stopped."""
    file = wrapping.open()
    reading = Stopped(os.dup(file._fd), file.header)
    file.close()
    return reading


def states(header: Header, count: int) -> list[flights.Values]:
    """What the fold shows after no step, one, two …."""
    return list(flights.folded_states(header, [flights.step_record(header, number) for number in range(1, count + 1)]))


def test_a_reader_stopped_between_its_reads_shows_one_moment_and_never_an_older_one(wrapping: flights.Image) -> None:
    """Between any two reads the writer goes on by up to three rings: exact, unmixed, and never behind what was shown."""
    chance = random.Random(3)
    training, file = Training(wrapping), stopped(wrapping)
    training.run(1)
    budget = 0

    def go_on() -> None:
        nonlocal budget
        rounds = min(chance.choice([0, 0, 1, 3, RECORDS, 3 * RECORDS]), budget)
        budget -= rounds
        training.run(rounds)

    file.meanwhile = go_on
    shown = []
    for _ in range(ROUNDS):
        budget = 4 * RECORDS
        shown.append((file.read(), training.steps))
    expected = states(wrapping.header, training.steps)
    last = 0
    for view, now in shown:
        steps = flights.whole(flights.value(view, catalog.STEPS))
        assert flights.values(view, folded=True) == expected[steps]
        assert last <= steps <= now
        assert len({flights.value(view, metric) for metric in EQUAL}) == 1
        last = steps
    assert last > training.steps - 8 * RECORDS
    assert training.steps > ROUNDS


def test_a_slot_of_a_lower_generation_is_never_served_again(wrapping: flights.Image) -> None:
    """The newer slot damaged: what was served stays; a reader that has served nothing takes the older one."""
    training, file = Training(wrapping), wrapping.open()
    training.run(20)
    before = flights.values(file.read())
    blocks = wrapping.header.regions[Region.BLOCKS].offset
    first, second = (int.from_bytes(wrapping.read(blocks + slot * SLOT_SIZE, 8), "little") for slot in (0, 1))
    wrapping.store(blocks + (second > first) * SLOT_SIZE + 100, b"\xff" * 8)
    assert flights.values(file.read()) == before
    other = wrapping.open()
    assert flights.value(other.read(final=True), catalog.STEPS) == 20
    other.close()


@pytest.mark.parametrize("at", ["open", "read"])
def test_a_file_that_was_cut_off_anywhere_is_bad_or_serves_what_it_served(wrapping: flights.Image, at: str) -> None:
    """Truncated at every 4 KiB: opened afterwards it is bad; opened before it serves what it served, if anything."""
    Training(wrapping).run(40)
    whole, size = wrapping.read(0, wrapping.header.file_size), wrapping.header.file_size
    for length in range(0, size, 4096):
        file = wrapping.open()
        before = file.read() if at == "read" else None
        os.ftruncate(wrapping.fd, length)
        if before:
            assert flights.values(file.read()) == flights.values(before)
        else:
            _read_or_bad(file)
        with pytest.raises(BadFlightFileError):
            wrapping.open()
        os.ftruncate(wrapping.fd, size)
        wrapping.store(0, whole)
        assert flights.value(file.read(), catalog.STEPS) == 40
        file.close()


def _read_or_bad(file: reader.FlightFile) -> None:
    try:
        shown = flights.values(file.read(), folded=True)
    except BadFlightFileError:
        return
    assert flights.whole(shown.get((catalog.STEPS.name, ()), 0)) <= 40  # none: its entry in the series table is damaged


def damage(chance: random.Random, whole: bytes) -> bytes:
    """The file with up to four places changed: bytes by chance, zeros, or what lies elsewhere in it."""
    raw = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        length = chance.choice([1, 8, 64, 512, 4096])
        at, other = chance.randrange(len(raw) - length), chance.randrange(len(raw) - length)
        raw[at : at + length] = chance.choice([chance.randbytes(length), bytes(length), whole[other : other + length]])
    return bytes(raw)


@pytest.mark.long
def test_a_thousand_damaged_files_are_bad_or_served(wrapping: flights.Image, share_of: Callable[[int], int]) -> None:
    """Torn by a crash or a disk: no other exception, no counter beyond what was written, none back for who follows."""
    chance = random.Random(5)
    Training(wrapping).run(40)
    whole = wrapping.read(0, wrapping.header.file_size)
    follower = wrapping.open()
    follower.read()
    opened = 0
    for _ in range(share_of(1000)):
        wrapping.store(0, damage(chance, whole))
        assert flights.value(follower.read(), catalog.STEPS) == 40
        with contextlib.suppress(BadFlightFileError):
            file = wrapping.open()
            opened += 1
            _read_or_bad(file)
            assert len(file.steps(5)) <= 5
            for fields in flights.frames(file):
                str(fields).encode()
            file.close()
    assert opened
    follower.close()
