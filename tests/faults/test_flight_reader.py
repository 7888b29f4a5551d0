"""A reader that is stopped between its reads, and files that shrink under it."""

import contextlib
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import flights
from torchobs import catalog
from torchobs.flight.format.layout import SLOT_SIZE, BadFlightFileError, Header, Region
from torchobs.flight.format.step_record import StepRecord
from torchobs.flight.reader import reader
from torchobs.flight.writer.series_table import USER
from torchobs.flight.writer.storage import Storage
from torchobs.flight.writer.writer import FlightWriter

RECORDS = 16
ROUNDS = 250
EQUAL = [catalog.Metric(f"test.{name}", catalog.Kind.COUNTER, "", "", integer=True) for name in "abc"]


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
        for one in super()._following(upto):
            self.meanwhile()
            yield one


class Training:
    """A writer into a file that is also read."""

    def __init__(self, image: flights.Image) -> None:
        self._map = mmap.mmap(image.fd, image.header.file_size)
        self.writer = FlightWriter(image.header, Storage(memoryview(self._map)))
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
def image(flight_dir: Path) -> Iterator[flights.Image]:
    """A file with a ring so small that it wraps while it is read."""
    made = flights.Image(flight_dir, flights.header(RECORDS))
    yield made
    made.close()


def stopped(image: flights.Image) -> Stopped:
    """A reader of that file that can be stopped."""
    file = image.open()
    made = Stopped(os.dup(file._fd), file.header)
    file.close()
    return made


def states(header: Header, count: int) -> list[flights.Values]:
    """What the fold shows after no step, one, two …."""
    return list(flights.folded_states(header, [flights.step_record(header, number) for number in range(1, count + 1)]))


def test_a_reader_stopped_between_its_reads_shows_one_moment_and_never_an_older_one(image: flights.Image) -> None:
    """Between any two reads the writer goes on by up to three rings: exact, unmixed, and never behind what was shown."""
    chance = random.Random(3)
    training, file = Training(image), stopped(image)
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
    expected = states(image.header, training.steps)
    last = 0
    for view, now in shown:
        steps = flights.whole(flights.value(view, catalog.STEPS))
        assert flights.values(view, folded=True) == expected[steps]
        assert last <= steps <= now
        assert len({flights.value(view, metric) for metric in EQUAL}) == 1
        last = steps
    assert last > training.steps - 8 * RECORDS
    assert training.steps > ROUNDS


def test_a_slot_of_a_lower_generation_is_never_served_again(image: flights.Image) -> None:
    """The newer slot damaged: what was served stays; a reader that has served nothing takes the older one."""
    training, file = Training(image), image.open()
    training.run(20)
    before = flights.values(file.read())
    blocks = image.header.regions[Region.BLOCKS].offset
    first, second = (int.from_bytes(image.read(blocks + slot * SLOT_SIZE, 8), "little") for slot in (0, 1))
    image.store(blocks + (second > first) * SLOT_SIZE + 100, b"\xff" * 8)
    assert flights.values(file.read()) == before
    other = image.open()
    assert flights.value(other.read(final=True), catalog.STEPS) == 20
    other.close()


@pytest.mark.parametrize("at", ["open", "read"])
def test_a_file_that_was_cut_off_anywhere_is_bad_or_serves_what_it_served(image: flights.Image, at: str) -> None:
    """Truncated at every 4 KiB: opened afterwards it is bad; opened before it serves what it served, if anything."""
    Training(image).run(40)
    whole, size = image.read(0, image.header.file_size), image.header.file_size
    for length in range(0, size, 4096):
        file = image.open()
        before = file.read() if at == "read" else None
        os.ftruncate(image.fd, length)
        if before:
            assert flights.values(file.read()) == flights.values(before)
        else:
            _read_or_bad(file)
        with pytest.raises(BadFlightFileError):
            image.open()
        os.ftruncate(image.fd, size)
        image.store(0, whole)
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
def test_a_thousand_damaged_files_are_bad_or_served(image: flights.Image, share_of: Callable[[int], int]) -> None:
    """Torn by a crash or a disk: no other exception, no counter beyond what was written, none back for who follows."""
    chance = random.Random(5)
    Training(image).run(40)
    whole = image.read(0, image.header.file_size)
    follower = image.open()
    follower.read()
    opened = 0
    for _ in range(share_of(1000)):
        image.store(0, damage(chance, whole))
        assert flights.value(follower.read(), catalog.STEPS) == 40
        with contextlib.suppress(BadFlightFileError):
            file = image.open()
            opened += 1
            _read_or_bad(file)
            assert len(file.steps(5)) <= 5
            for _, fields in file.events():
                str(fields).encode()
            file.close()
    assert opened
    follower.close()
