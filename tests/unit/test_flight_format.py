"""The format of a flight file: header and regions, series, documents, events, identifiers of spans."""

from __future__ import annotations

import ast
import json
import re
import struct
import zlib
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchobs.flight
from tests import flights
from tests.flights import header
from torchobs import catalog
from torchobs.flight.details import Document, decode_history, encode_history, newest
from torchobs.flight.events import EventRing, SpanIds, Tail, derived, scan
from torchobs.flight.layout import (
    DEFAULT_SIZE,
    HEADER_SIZE,
    MAX_SIZE,
    MIN_SIZE,
    RECORD_SIZE,
    BadFlightFileError,
    Extent,
    Region,
    decode_header,
    encode_header,
    plan,
)
from torchobs.flight.series import Scope, Series, ValueType, decode, encode
from torchobs.flight.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterable

HEADER = flights.header()
MOVES = ("writer.py", "memory.py")
"""Where `Memory.move` is defined and called: another file, not `mmap.move`."""


def test_nothing_in_the_flight_file_s_code_packs_into_memory() -> None:
    """CPython zeroes the target of pack_into first, and a reader saw those zeros in 3-17 % of its reads."""
    sources = list(Path(torchobs.flight.__file__).parent.rglob("*.py"))
    assert len(sources) > 15
    for path in sources:
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        banned = {"pack_into", "readinto", "memmove", "memset", *(() if path.name in MOVES else ("move",))}
        assert not names & banned, path


def test_a_header_is_what_was_put_in_also_by_a_later_minor_version() -> None:
    """Every field, and the description of the rank; regions that a later minor version adds are not read."""
    described = replace(HEADER, resource={"rank": 7, "host": "böse\n\"'\\", "n": -5})
    assert decode_header(encode_header(described), described.file_size) == described
    raw = bytearray(encode_header(HEADER))
    raw[96 + 24 * 7 : 96 + 24 * 8] = struct.pack("<IIQQ", 99, 8, HEADER_SIZE, 1 << 40)
    raw[10:12], raw[80:84] = b"\x07\x00", struct.pack("<I", 8)
    raw[HEADER_SIZE - 4 :] = struct.pack("<I", zlib.crc32(raw[: HEADER_SIZE - 4]))
    assert decode_header(bytes(raw), HEADER.file_size) == replace(HEADER, minor=7)


def test_a_plan_fills_the_file_and_no_region_lies_in_another() -> None:
    """Half of it are records, a power of two of them; offsets are multiples of 64."""
    for size in (MIN_SIZE, 300_032, DEFAULT_SIZE, 1_500_032, MAX_SIZE):
        regions, end = plan(size), HEADER_SIZE
        for span in regions.values():
            assert (span.offset, span.offset % 64) == (end, 0)
            assert span.count > 0
            end = span.offset + span.length
        assert size - 64 < end <= size
        records = regions[Region.STEPS].count
        assert records & (records - 1) == 0
        assert size // 4 < records * RECORD_SIZE <= size // 2


def test_a_header_that_lies_is_refused_by_name() -> None:
    """With a right CRC: every offset and count is checked before use."""
    cases: list[tuple[int, str, int, str]] = [
        (0, "<Q", 0, "not a flight file"),
        (8, "<H", 1, "format version 1"),
        (16, "<Q", MIN_SIZE + 64, "size"),
        (80, "<I", 4, "missing"),
        (100, "<I", 16, "items"),
        (104, "<Q", 0, "outside"),
        (112, "<Q", (1 << 64) - 8, "outside"),
    ]
    for offset, form, value, why in cases:
        raw = bytearray(encode_header(HEADER))
        struct.pack_into(form, raw, offset, value)
        struct.pack_into("<I", raw, HEADER_SIZE - 4, zlib.crc32(raw[: HEADER_SIZE - 4]))
        with pytest.raises(BadFlightFileError, match=why):
            decode_header(bytes(raw), HEADER.file_size)


SEED = flights.header().seed
TEXT = st.text(max_size=30)
SCALARS = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


def one_series(**given_fields: Any) -> Series:
    """A counter, except for what is given."""
    return replace(Series("x", catalog.Kind.COUNTER, "", "", (), (), ValueType.INT, 0, 200), **given_fields)


@given(
    TEXT,
    TEXT,
    st.dictionaries(TEXT, SCALARS | st.lists(SCALARS, max_size=3), max_size=4),
    st.none() | st.builds(Scope, TEXT, TEXT, TEXT, st.just(())),
)
def test_a_series_is_what_was_put_in(name: str, brief: str, attributes: dict[str, Any], scope: Scope | None) -> None:
    """Any text, any attribute that OpenTelemetry has; lists become tuples, so that a series can be a key."""
    pairs = tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in attributes.items()))
    series = one_series(name=name, brief=brief, attributes=pairs, scope=scope)
    ((back, end),) = decode(encode(series, SEED), SEED)
    assert back == series
    assert hash(back) == hash(series)
    assert end == len(encode(series, SEED))


def test_entries_follow_each_other_and_the_first_bad_one_ends_the_table() -> None:
    """Append-only, counted by their CRCs alone."""
    entries = [encode(one_series(name=f"n{index}", word=200 + index), SEED) for index in range(5)]
    table = b"".join(entries) + bytes(64)
    assert [series.name for series, _ in decode(table, SEED)] == ["n0", "n1", "n2", "n3", "n4"]
    broken = bytearray(table)
    broken[len(entries[0]) + len(entries[1]) + 20] ^= 1
    assert [series.name for series, _ in decode(bytes(broken), SEED)] == ["n0", "n1"]
    assert list(decode(table, SEED ^ 1)) == []


SPAN = Extent(0, 1024, 64)


def test_the_newest_version_is_read_and_a_torn_one_is_not() -> None:
    """Damage to the newest leaves the one before; a version too long for its slot is refused."""
    raw = bytearray(1024)
    document = Document(Storage(memoryview(raw)), SPAN, 7)
    assert newest(bytes(raw), 7) == b""
    assert document.replace(b"one")
    assert document.replace(b"two")
    assert not document.replace(b"x" * (document.room + 1))
    assert newest(bytes(raw), 7) == b"two"
    assert newest(bytes(raw), 8) == b""
    raw[raw.index(b"two")] ^= 1
    assert newest(bytes(raw), 7) == b"one"


def test_history_there_and_back() -> None:
    """Names that came later have no value in earlier rows; a value that is not finite, or not in an f32, is none."""
    packed = encode_history(["a", "b{x}"], [(0.5, 1, (1.0,)), (1.0, 2, (nan, 3.0)), (1.5, 3, (1e39, -1e39))])
    history = decode_history(packed)
    assert [(row.time_s, row.step, row.values) for row in history.rows] == [
        (0.5, 1, (1.0, None)), (1.0, 2, (None, 3.0)), (1.5, 3, (None, None)),
    ]  # fmt: skip
    assert [(name, [(row.step, value) for row, value in points]) for name, points in history.curves("b").items()] == [
        ("x", [(2, 3.0)])
    ]
    assert list(history.curves("a")) == [""]


class Ring:
    """An event ring in memory."""

    def __init__(self, size: int = 1024) -> None:
        self.memory = flights.RecordingMemory(4096 + size)
        self.ring = EventRing(self.memory, 4096, size, SEED, 0)

    def content(self) -> bytes:
        """The ring's bytes."""
        return self.memory.snapshot()[4096:]

    def seen(self) -> list[Any]:
        """The numbers of the events in it."""
        return numbers(scan(self.content(), SEED))

    def taken(self, tail: Tail, content: bytes | None = None) -> list[Any]:
        """The numbers of those that a tail takes, who sees that content; counts the bytes that are read."""
        self.bytes, ring = 0, content or self.content()

        def read(at: int, length: int) -> bytes:
            self.bytes += length
            return ring[at : at + length]

        return numbers(tail.read_new(self.ring._position, read))


def test_the_newest_events_are_there_in_order_however_often_the_ring_wrapped() -> None:
    """Frames of many lengths over many laps: always the last ones, a run without a hole."""
    ring = Ring()
    for number in range(500):
        ring.ring.append({"n": number, "text": "x" * (number * 7 % 150)})
        present = ring.seen()
        assert [event for event in present if event > number - 4] == list(range(max(number - 3, 0), number + 1))
        assert present == sorted(present)
    assert ring.ring.dropped == 0


def numbers(frames: Iterable[tuple[int, bytes]]) -> list[Any]:
    """The numbers of the events in frames."""
    return [json.loads(payload)["n"] for _, payload in frames]


@pytest.mark.parametrize("pause", [1, 3, 5, 40])
def test_a_tail_gives_each_event_once_and_reads_what_is_new(pause: int) -> None:
    """Over many laps, whoever looks often enough misses none; who looks too seldom gets what is left, in order."""
    ring, tail = Ring(), Tail(1024, SEED)
    taken: list[int] = []
    for number in range(200):
        ring.ring.append({"n": number, "text": "x" * (number * 7 % 150)})
        if number % pause == pause - 1:
            taken += ring.taken(tail)
            assert taken[-1] == number
            assert ring.bytes <= min(1024, (pause + 1) * 256)
            assert (ring.taken(tail), ring.bytes) == ([], 0)
    assert taken == sorted(set(taken))
    if pause <= 3:
        assert taken == list(range(200 // pause * pause))


def test_a_tail_knows_what_was_overwritten() -> None:
    """In bytes, of the call before which it happened: from the first event on, and not the room that a lap's end leaves."""
    size = 64 * 1024
    ring, tail = Ring(size), Tail(size, SEED)
    missed, delivered = [], 0
    for count in (1000, 10, 0, 2000):
        for number in range(count):
            ring.ring.append({"n": number, "text": "x" * 100})
        delivered += len(ring.taken(tail))
        missed.append(tail.missed)
    assert [bool(size_of_gap) for size_of_gap in missed] == [True, False, False, True]
    assert abs(sum(missed) - (3010 - delivered) * ring.ring._position / 3010) < size / 16


def test_a_tail_waits_for_a_frame_whose_head_came_first() -> None:
    """Where stores are reordered, the head can be there before the frame: it is given with the next one."""
    ring, tail = Ring(), Tail(1024, SEED)
    ring.ring.append({"n": 0})
    assert ring.taken(tail) == [0]
    before = ring.content()
    ring.ring.append({"n": 1})
    assert ring.taken(tail, before) == []
    ring.ring.append({"n": 2})
    assert ring.taken(tail) == [1, 2]


def test_every_value_can_be_told() -> None:
    """A NaN is data; what JSON does not have becomes a text."""
    ring = Ring(64 * 1024)
    for value in (nan, 10**5000, (1, 2.5, None, True), {1: {"a": nan}}, "\ud800"):
        ring.ring.append({"n": value})
    assert ring.seen() == ["NaN", hex(10**5000), [1, 2.5, None, True], {"1": {"a": "NaN"}}, "?"]


def test_known_identifiers() -> None:
    """The derivation is part of the format: ``printf torchobs/1234 | b2sum -l 128`` says the same, and so on."""
    assert derived("00f067aa0ba902b7", "17") == "4ffd007c9ccbe63c"
    ids = SpanIds(replace(header(), resource={"run_id": "1234", "rank": 5, "restart": 2}))
    assert ids.run.trace == "99b9893a94b1aa0f6437987b4d1022e0"
    assert ids.step(17).trace == "bfb475a693aff9a02a756a9409e7b542"
    assert ids.segment(3, 1).trace == "b2ca9638023d467de1e4c7c8258699d7"


@pytest.mark.parametrize("launcher", [{}, {"trace_id": "0af7651916cd43dd8448eb211c80319c"}])
def test_all_ranks_of_a_run_share_its_traces(launcher: dict[str, str]) -> None:
    """Run, segments and steps; each rank has a span of its own in them, and each restart traces of its own but the run's."""
    runs = [("1", 0), ("1", 1)] if launcher else [("1", 0), ("1", 1), ("2", 0)]
    ids_of_ranks = [
        SpanIds(replace(header(), resource={"run_id": run, "rank": rank, "restart": restart, **launcher}))
        for run, restart in runs
        for rank in range(3)
    ]
    for spans, traces in (
        ([ids.run for ids in ids_of_ranks], len(runs) - 1),
        ([ids.segment(1, 0) for ids in ids_of_ranks], len(runs)),
        ([ids.step(7) for ids in ids_of_ranks], len(runs)),
    ):
        assert (len({span.trace for span in spans}), len({span.span for span in spans})) == (traces, len(ids_of_ranks))
    segments = [ids_of_ranks[0].segment(epoch, part) for epoch in range(5) for part in range(5)]
    of_one = [ids_of_ranks[0].run, *segments, *map(ids_of_ranks[0].step, range(99))]
    assert len({span.trace for span in of_one}) == len({span.span for span in of_one}) == len(of_one)
    assert all(re.fullmatch("(?!0{32})[0-9a-f]{32}", span.trace) for span in of_one)
