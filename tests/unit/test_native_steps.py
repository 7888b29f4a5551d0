"""The compiled writer of plain steps: on any input it leaves the bytes, the answers and the errors of the one in Python."""

from __future__ import annotations

import gc
import struct
import weakref
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests import flights
from tests.support import NEEDS_COMPILER
from torchobs.flight.format.layout import RECORD_SIZE, Region
from torchobs.flight.format.step_record import NO_FETCH, PLAIN_CODES, unpack
from torchobs.flight.writer.native import compiled
from torchobs.flight.writer.storage import Storage
from torchobs.flight.writer.writer import FlightWriter

NATIVE: Any = compiled()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=NEEDS_COMPILER)
HEADER = flights.header(4)
EDGES = [bits + step for width in (16, 32, 64) for bits in (1 << width,) for step in (-2, -1, 0, 1)]

counts = some.one_of(some.integers(0, 1 << 20), some.sampled_from([-1, *EDGES]), some.booleans(), some.floats())
values = some.one_of(some.floats(), some.integers(-(1 << 1100), 1 << 1100), some.sampled_from([3.5e38, 1e39, -1e39, None, "1"]))
stamps = some.one_of(
    some.builds(
        lambda codes, times: [at << 4 | code for at, code in zip(times, codes, strict=False)],
        some.sampled_from([PLAIN_CODES, PLAIN_CODES[2:], NO_FETCH, (0, 2, 5, 6, 7), (0, 1, 5, 6, 7, 7)]),
        some.lists(some.integers(0, 1 << 61), min_size=6, max_size=6),
    ),
    some.lists(some.one_of(counts, some.none()), max_size=6),
    some.just(()),
)
plain = some.lists(some.integers(0, 1 << 59), min_size=5, max_size=5).map(
    lambda times: [at << 4 | code for at, code in zip(times, PLAIN_CODES, strict=True)]
)
u16, u32, u64 = (some.integers(0, (1 << width) - 1) for width in (16, 32, 64))
steps = some.one_of(
    some.tuples(stamps, *[counts] * 5, *[values] * 3, *[counts] * 2, values),
    some.tuples(plain, u64, u64, u64, u16, u32, *[some.floats()] * 3, u64, u32, values),
)


def pair() -> tuple[FlightWriter, FlightWriter]:
    """Two writers of one file's header, the first without the compiled part; the map of each is bytes."""
    made = [FlightWriter(HEADER, Storage(memoryview(bytearray(HEADER.file_size))), native=native) for native in (False, True)]
    return made[0], made[1]


def ring(writer: FlightWriter) -> bytes:
    """The step ring's bytes."""
    region = HEADER.regions[Region.STEPS]
    return writer.memory.snapshot()[region.offset : region.offset + region.length]


def outcome(writer: FlightWriter, step: tuple[Any, ...]) -> object:
    """What the writer returns, or the error that it raises."""
    try:
        return writer.append_plain(*step)
    except Exception as error:  # noqa: BLE001  # whichever: it has to be the same
        return type(error), str(error)


@given(some.lists(steps, max_size=8))
def test_both_leave_the_same_bytes_on_any_input(given_steps: list[tuple[Any, ...]]) -> None:
    """Values that no field holds, others' types, boundaries of any kind: the answer, the ring, and what the fold is given."""
    python, native = pair()
    for step in given_steps:
        assert outcome(native, step) == outcome(python, step)
        assert ring(native) == ring(python)
    assert list(native._recent) == list(python._recent)
    assert next(native._sequence) == next(python._sequence), "the next number"


@given(some.floats(), some.floats(width=32), some.integers(0, (1 << 60) - 1))
def test_any_value_that_its_fields_hold_is_read_back(loss: float, scale: float, at_ns: int) -> None:
    """With the CRC that ``zlib`` computes, without going through Python."""
    _, writer = pair()
    boundaries = [at_ns << 4 | code for code in PLAIN_CODES]
    assert writer.append_plain(boundaries, 1, at_ns, at_ns, 3, 1, loss, 0.5, 0.25, 7, 8, scale)
    made = unpack(writer._recent[0], HEADER.seed)
    assert made is not None
    assert struct.pack("<d", made.loss) == struct.pack("<d", loss)
    assert (made.seq, made.end_ns, made.tokens, made.samples) == (1, at_ns, 7, 8)


def test_a_wrong_number_of_arguments_is_the_reference_s_error() -> None:
    """Not a read beyond them."""
    _, native = pair()
    for count in (0, 11, 13):
        with pytest.raises(TypeError, match="append_plain"):
            native.append_plain(*[0] * count)


def test_a_ring_full_of_unfolded_records_is_folded() -> None:
    """By either, before one is written over."""
    for writer in pair():
        for number in range(1, 10):
            flights.plain_step(writer, number)
        assert writer.unfolded < HEADER.regions[Region.STEPS].count


def test_after_a_detach_nothing_reaches_the_file() -> None:
    """In a forked child the map is the parent's."""
    content = bytearray(HEADER.file_size)
    writer = FlightWriter(HEADER, Storage(memoryview(content)))
    flights.plain_step(writer, 1)
    before = bytes(content)
    writer.detach()
    flights.plain_step(writer, 2)
    assert bytes(content) == before
    assert ring(writer)[RECORD_SIZE : RECORD_SIZE + 8] == (2).to_bytes(8, "little")
    content.extend(b"nobody holds it any longer")


def test_a_ring_outside_of_the_map_is_not_written_to() -> None:
    """A header that does not fit its memory raises, and writes nowhere."""
    region = HEADER.regions[Region.STEPS]
    beyond = replace(region, offset=HEADER.file_size - RECORD_SIZE + 8)
    writer = FlightWriter(
        replace(HEADER, regions={**HEADER.regions, Region.STEPS: beyond}), Storage(memoryview(bytearray(HEADER.file_size)))
    )
    with pytest.raises(ValueError, match="not within the map"):
        flights.plain_step(writer, 1)


def test_a_writer_is_freed() -> None:
    """The compiled part refers to the writer and the writer to it, which the garbage collector sees."""
    _, writer = pair()
    flights.plain_step(writer, 1)
    known = weakref.ref(writer)
    del writer
    gc.collect()
    assert known() is None
