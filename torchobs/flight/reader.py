"""Reader of a flight file that may be cut, torn or half-written at any place, and the values in its words.

The file is opened by ``dir_fd`` with ``O_NOFOLLOW`` and ``O_NONBLOCK`` (a FIFO or a lease must not block us) and must be
a regular file of the right owner, with the size that its header states. Magic, version, regions and CRCs are checked; what has
a right CRC was written by torchobs and is believed. It is read by ``pread``, for a map of a truncated file raises SIGBUS.
No counter decreases: a snapshot in which one would is not served.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from math import isfinite
from operator import lt
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.catalog import Kind
from torchobs.config.identity import boot_id
from torchobs.flight import events, files, fold
from torchobs.flight.details import History, decode_history, newest
from torchobs.flight.directory import opened
from torchobs.flight.files import SUFFIX, lock_name
from torchobs.flight.forward import NO_SHARE, ForwardShare
from torchobs.flight.layout import (
    FADED_AFTER_S,
    HEADER_SIZE,
    RECORD_SIZE,
    SLOT_HEADER,
    SLOT_SIZE,
    BadFlightFileError,
    Header,
    LiveWords,
    Region,
    decode_header,
    decode_live,
    words_crc,
)
from torchobs.flight.series import INT_ABSENT, Series, ValueType, decode
from torchobs.flight.step_record import RecordKind, StepRecord, unpack
from torchobs.flight.totals import Totals, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchobs.flight.events import Event, Late, Span, Tail


class Distribution(NamedTuple):
    """A histogram's value: counts per bucket (one more than bounds), sum, least and greatest value (None: empty)."""

    counts: tuple[int, ...]
    sum: float
    least: float | None
    greatest: float | None


Value = float | Distribution


class SeriesValue(NamedTuple):
    """One series and its value."""

    series: Series
    value: Value


class Columns:
    """Decoder of a value block's series, grouped by value type, so that most values are read by one list operation."""

    __slots__ = ("_floats", "_growing", "_others", "_run", "_words", "series")

    def __init__(self, series: Sequence[Series] = ()) -> None:
        self.series = tuple(series)
        numbered = list(enumerate(self.series))
        self._floats = [(index, entry.word) for index, entry in numbered if entry.value_type == ValueType.FLOAT]
        self._others = [(index, entry) for index, entry in numbered if entry.value_type != ValueType.FLOAT]
        self._growing = [index for index, entry in numbered if entry.kind in {Kind.COUNTER, Kind.HISTOGRAM}]
        self._words = max((entry.word + entry.width for entry in self.series), default=0)
        self._run = self._consecutive()

    def _consecutive(self) -> slice | None:
        """Return the slice of the values if all are consecutive floats in series order, as a writer lays them out."""
        words = [word for _, word in self._floats]
        if self._others or not words or words != [*range(words[0], words[0] + len(words))]:
            return None
        return slice(words[0] * 8, (words[0] + len(words)) * 8)

    def read(self, words: bytes) -> DecodedBlock:
        """Return the value of each series; ``None`` where it is absent or its words are not written yet."""
        there = len(words) // 8
        if self._run is not None and there >= self._words:
            run: list[float] = list(memoryview(words)[self._run].cast("d"))
            if isfinite(sum(run)):  # then all of them are finite, as in nearly every block
                return DecodedBlock(self.series, run, whole=True)
        view = memoryview(words.ljust(self._words * 8, b"\0"))
        floats: list[float] = list(view.cast("d"))
        values: list[Value | None] = [None] * len(self.series)
        for index, word in self._floats:
            value = floats[word]
            if value - value == 0.0:  # finite: for NaN and infinities the difference is NaN
                values[index] = value
        ints = view.cast("Q").tolist() if self._others else []
        for index, entry in self._others:
            values[index] = _VALUES[entry.value_type](ints, floats, entry.word, entry)
        if there < self._words:
            values = [values[i] if entry.word + entry.width <= there else None for i, entry in enumerate(self.series)]
        return DecodedBlock(self.series, values, whole=None not in values)

    def decreases(self, before: Sequence[Value | None], now: Sequence[Value | None]) -> bool:
        """Return whether a counter or a bucket decreased, or a counter became absent. ``before`` may be shorter."""
        for index in self._growing:
            if index >= len(before):
                return False
            old, new = before[index], now[index]
            if old is None or old == new:
                continue
            if isinstance(old, Distribution):
                if not isinstance(new, Distribution) or any(map(lt, new.counts, old.counts)):
                    return True
            elif new is None or isinstance(new, Distribution) or new < old:
                return True
        return False


class DecodedBlock(NamedTuple):
    """The series of one value block, and the value of each; ``None`` where it is absent."""

    series: tuple[Series, ...] = ()
    values: Sequence[Value | None] = ()
    whole: bool = False
    """True if certainly no value is absent"""

    def points(self) -> Iterator[SeriesValue]:
        """Yield the series that have a value."""
        return (SeriesValue(entry, value) for entry, value in zip(self.series, self.values, strict=True) if value is not None)


def _int_value(ints: list[int], _: list[float], word: int, series: Series) -> int | None:
    value = ints[word]
    if value < INT_ABSENT:
        return value
    return value - (1 << 64) if series.kind is not Kind.COUNTER and value > INT_ABSENT else None


def _either_value(ints: list[int], floats: list[float], word: int, series: Series) -> float | None:
    whole, real = ints[word], floats[word + 1]
    signed = None if whole == INT_ABSENT else whole - (1 << 64) if whole >> 63 else whole
    if not isfinite(real):
        return signed
    return real if signed is None or series.kind is Kind.GAUGE else signed + real


def _distribution(ints: list[int], floats: list[float], word: int, series: Series) -> Distribution | None:
    total = word + len(series.bounds) + 1
    least, greatest = floats[total + 1], floats[total + 2]
    counts = tuple(ints[word:total])
    if not isfinite(floats[total]):
        return None
    return Distribution(counts, floats[total], least if isfinite(least) else None, greatest if isfinite(greatest) else None)


_VALUES: dict[int, Callable[[list[int], list[float], int, Series], Value | None]] = {
    ValueType.INT: _int_value,
    ValueType.EITHER: _either_value,
    ValueType.HISTOGRAM: _distribution,
}


_NAME = re.compile(rf"r[0-9]{{1,9}}-[0-9a-f]{{32}}{re.escape(SUFFIX)}")
_RETRIES = 4
_CHUNK = 64
_Slot = tuple[int, bytes]
"""generation, words"""
_NONE: _Slot = (0, b"")
_NO_BLOCK = DecodedBlock()
MAX_FILES = 4096
"""Most flight files of a directory that are read."""


@dataclass(frozen=True, slots=True)
class View:
    """Contents of a flight file at one moment, exact up to the last acknowledged record."""

    header: Header
    live: LiveWords
    blocks: tuple[DecodedBlock, ...]
    """the value blocks; an unchanged block is the same object as before"""
    last_step_ns: int | None
    """CLOCK_MONOTONIC at the end of the last step"""

    @property
    def points(self) -> tuple[SeriesValue, ...]:
        """All series with their values."""
        return tuple(chain.from_iterable(block.points() for block in self.blocks))


def list_names(directory_fd: int) -> tuple[list[str], int]:
    """Return the names of flight files in a directory, sorted: at most 4,096, and how many more there are.

    Where there are more, those of living ranks come first, by their locks, then the newest files. Raises ``OSError``.
    """
    names = [*filter(is_name, files.names(directory_fd))]
    if len(names) > MAX_FILES:
        chosen = heapq.nlargest(MAX_FILES, (_rank(directory_fd, name) for name in names))
        return sorted(name for _, _, name in chosen), len(names) - MAX_FILES
    return sorted(names), 0


def names(directory_fd: int) -> list[str]:
    """Return the names of :func:`list_names`. Raises ``OSError``."""
    return list_names(directory_fd)[0]


def _rank(directory_fd: int, name: str) -> tuple[bool, int, str]:
    """Return the key that decides which files are read: whether a rank holds its lock, and when it was written last."""
    is_locked, written_ns = False, 0
    with suppress(OSError):
        written_ns = os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mtime_ns
        is_locked = files.is_locked(directory_fd, lock_name(name))
    return is_locked, written_ns, name


def is_name(name: str) -> bool:
    """Return whether ``name`` is that of a published flight file."""
    return _NAME.fullmatch(name) is not None


class FlightFile:
    """An open flight file; keeps the last served view."""

    def __init__(self, fd: int, header: Header) -> None:
        """Use :func:`open_file` or :func:`open_path`."""
        self.header = header
        self._fd = fd
        self._series: dict[int, list[Series]] = {}
        self._table_at = 0
        self._slots: dict[int, _Slot] = {}
        self._columns: dict[int, Columns] = {}
        self._blocks: dict[int, DecodedBlock] = {}
        self._last_step_ns: int | None = None
        self._upto = 0
        self.size = 0
        """number of known series"""
        self.rejected = 0
        """number of snapshots not served because a counter would have decreased"""

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def follow(self, directory_fd: int, name: str) -> bool:
        """Switch to the file that has this name now, if its writer recreated it; return whether it did.

        The served values are kept. Raises as :func:`open_file`, also if the file belongs to another incarnation.
        """
        ours = os.fstat(self._fd)
        if os.path.samestat(os.stat(name, dir_fd=directory_fd, follow_symlinks=False), ours):
            return False
        fd, header = _open(directory_fd, name, ours.st_uid)
        if header != self.header:
            os.close(fd)
            raise BadFlightFileError("another incarnation has this name now")
        os.close(self._fd)
        self._fd = fd
        return True

    def read(self, *, final: bool = False) -> View:
        """Read the file. ``final``: its writer is dead, so that missing records will not arrive.

        Raises :class:`BadFlightFileError` when the file shrank and nothing was served before, ``OSError`` if it is unreadable.
        """
        live = self.live()
        self._more_series()
        self._serve({block: self._newest(block) for block in sorted(self._series.keys() | {0})}, final=final)
        blocks = tuple(self._blocks[block] for block in sorted(self._blocks))
        has_value = any(value is not None for block in blocks for value in block.values)
        if not has_value and os.fstat(self._fd).st_size != self.header.file_size:
            raise BadFlightFileError("the file shrank")
        return View(self.header, live, blocks, self._last_step_ns)

    def _serve(self, slots: dict[int, _Slot], *, final: bool) -> None:
        """Serve the slots unless a counter would decrease: a snapshot is served whole or not at all."""
        words = {block: slot[1] for block, slot in slots.items() if self._is_new(block, slot)}
        last_step_ns, upto = None, 0
        if slots[0][0]:
            totals = Totals(bytearray(slots[0][1]))
            last_step_ns = self._fold(totals, final=final)
            upto = totals.ints[Word.FOLDED_UPTO]
            if 0 in words or upto != self._upto:
                words[0] = bytes(totals.buffer)
        blocks = {block: self._columns_of(block).read(raw) for block, raw in words.items()}
        if any(self._columns[block].decreases(self._block(block).values, new.values) for block, new in blocks.items()):
            self.rejected += 1
            return
        self._blocks.update(blocks)
        self._slots.update(slots)
        self._last_step_ns, self._upto = last_step_ns, upto

    def _is_new(self, block: int, slot: _Slot) -> bool:
        more_series = len(self._series.get(block, ())) > len(self._block(block).values)
        return more_series or slot is not self._slots.get(block, _NONE)

    def _block(self, block: int) -> DecodedBlock:
        return self._blocks.get(block, _NO_BLOCK)

    def _columns_of(self, block: int) -> Columns:
        series, columns = self._series.get(block, ()), self._columns.get(block)
        if columns is None or len(columns.series) != len(series):
            columns = self._columns[block] = Columns(series)
        return columns

    def live(self) -> LiveWords:
        """Return the live words only: 256 bytes, for a check every second between full reads."""
        return decode_live(self._region(Region.LIVE))

    def is_beating(self, now_ns: int) -> bool:
        """Return whether the rank has neither ended nor been silent for ``FADED_AFTER_S``; ``now_ns``: CLOCK_MONOTONIC."""
        live = self.live()
        beat_ns = live.heartbeat_ns if live.exit_reason is None and self.header.boot_id == boot_id() else None
        return beat_ns is not None and now_ns - beat_ns <= FADED_AFTER_S * 1e9

    def forward_share(self) -> ForwardShare:
        """Return the share of the forward pass in the time before a backward pass, by which the file's metrics are divided."""
        raw = self._newest(0)[1]
        return ForwardShare(Totals(bytearray(raw)).floats[Word.FORWARD_SHARE : Word.FORWARD_SHARE + 5]) if raw else NO_SHARE

    def steps(self, limit: int | None = None) -> list[StepRecord]:
        """Return the records in the ring, oldest first, the last ``limit`` of them."""
        return self._records(0, limit)

    def has_steps(self) -> bool:
        """Return whether a step was ever recorded: the first goes into the ring's first slot."""
        return any(self._records_at(0, 1))

    def latest(self, limit: int, earlier: Sequence[StepRecord] = ()) -> list[StepRecord]:
        """Return up to ``limit`` records, oldest first, the last being the newest one in the view of :meth:`read`.

        Only these are read, not the whole ring; overwritten or damaged ones are missing. ``known``: what an earlier call with
        the same limit, or a greater one, returned: only newer records are read.
        """
        first = max(self._upto - min(limit, self.header.regions[Region.STEPS].count), 0) + 1
        records = [record for record in earlier if record.seq >= first]
        read = self._numbered(records[-1].seq + 1 if records else first, self._upto)
        return [*records, *(record for record in read if record is not None)]

    def events(self, *names: str) -> list[Event | Span | Late]:
        """Return the events and spans that are still in the ring, oldest first; with ``names`` those that mention one."""
        ring = self._region(Region.EVENTS)
        is_mentioned = not names or any(name.encode() in ring for name in names)
        return events.read(events.scan(ring, self.header.seed), self.header, *names) if is_mentioned else []

    def details(self) -> dict[str, Any]:
        """Return how the run was started (``Region.DETAILS``); empty if unknown."""
        return events.fields_of(self._document(Region.DETAILS)) or {}

    def history(self) -> History:
        """Return the history of gauges since the start; empty if there is none."""
        return decode_history(self._document(Region.HISTORY))

    def _document(self, region: Region) -> bytes:
        return newest(self._region(region), self.header.seed)

    def fresh_events(self, tail: Tail, head: int, *names: str) -> list[Event | Span | Late]:
        """Return the new events (:meth:`Tail.take`) of these ``names``; ``head``: the event head in the live words."""
        return events.read(tail.read_new(head, self._events_at), self.header, *names)

    def _events_at(self, at: int, length: int) -> bytes:
        return self._read_at(self.header.regions[Region.EVENTS].offset + at, length)

    def _region(self, region: Region) -> bytes:
        span = self.header.regions[region]
        return self._read_at(span.offset, span.length)

    def _read_at(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset).ljust(length, b"\0")

    def _more_series(self) -> None:
        span, start = self.header.regions[Region.SERIES], self._table_at
        if not any(os.pread(self._fd, min(4, span.length - start), span.offset + start)):
            return  # zero length: no further entry
        raw = os.pread(self._fd, span.length - start, span.offset + start)
        for series, end in decode(raw, self.header.seed):
            self.size += 1
            self._table_at = start + end
            self._series.setdefault(series.block, []).append(series)

    def _newest(self, block: int) -> _Slot:
        """Return the block's slot with the highest generation, or the served one when neither is valid and newer."""
        offset = self.header.regions[Region.BLOCKS].offset + block * 2 * SLOT_SIZE
        served = self._slots.get(block, _NONE)
        for _ in range(_RETRIES):
            raw = self._pair(offset)
            first, other = SLOT_HEADER.unpack_from(raw), SLOT_HEADER.unpack_from(raw, SLOT_SIZE)
            for (generation, length, crc), at in (
                ((first, 0), (other, SLOT_SIZE)) if first > other else ((other, SLOT_SIZE), (first, 0))
            ):
                if generation < served[0] or not generation:
                    break
                if generation == served[0]:  # unchanged
                    return served
                words = raw[at + SLOT_HEADER.size : at + SLOT_HEADER.size + length]
                if words_crc(generation, words, self.header.seed) == crc:
                    return generation, words
        return served

    def _pair(self, offset: int) -> bytes:
        return self._read_at(offset, 2 * SLOT_SIZE)

    def _fold(self, core: Totals, *, final: bool) -> int | None:
        """Fold the records that the writer had not folded; return CLOCK_MONOTONIC at the last step's end."""
        upto = core.ints[Word.FOLDED_UPTO]
        batch = self._records(upto) if final else list(self._following(upto))
        fold.fold(core, batch)
        newest = next((item for item in reversed(batch) if item.kind == RecordKind.STEP), None)
        if newest is not None:
            return newest.end_ns
        timestamp = core.floats[Word.LAST_STEP_TIMESTAMP]  # NaN: absent
        if not core.ints[Word.STEPS] or not isfinite(timestamp):
            return None
        return round(timestamp * 1e9) - self.header.wall_ns + self.header.monotonic_ns

    def _records(self, after: int, limit: int | None = None) -> list[StepRecord]:
        """Return the last ``limit`` records with a number above ``after``, in order; only these are decoded."""
        ring, count = self._region(Region.STEPS), self.header.regions[Region.STEPS].count
        numbers = memoryview(ring).cast("Q")[:: RECORD_SIZE // 8].tolist()
        expected = ((seq, slot) for slot, seq in enumerate(numbers) if seq > after and (seq - 1) % count == slot)
        slots = (slot * RECORD_SIZE for _, slot in sorted(expected, reverse=True))
        decoded = (unpack(ring[at : at + RECORD_SIZE], self.header.seed) for at in slots)
        return list(islice((item for item in decoded if item is not None), limit))[::-1]

    def _following(self, upto: int) -> Iterator[StepRecord]:
        """Yield the records from ``upto`` + 1 on, up to the first gap: a missing record may still arrive."""
        for record in self._numbered(upto + 1, upto + self.header.regions[Region.STEPS].count):
            if record is None:
                return
            yield record

    def _numbered(self, first: int, last: int) -> Iterator[StepRecord | None]:
        """Yield the records with these numbers, in order; ``None`` for one that is missing, overwritten or damaged."""
        count, seq = self.header.regions[Region.STEPS].count, first
        while seq <= last:
            slot = (seq - 1) % count
            many = min(_CHUNK, last + 1 - seq, count - slot)
            raw = self._records_at(slot, many)
            for at in range(0, many * RECORD_SIZE, RECORD_SIZE):
                record = unpack(raw[at : at + RECORD_SIZE], self.header.seed)
                yield record if record is not None and record.seq == seq else None
                seq += 1

    def _records_at(self, slot: int, many: int) -> bytes:
        span = self.header.regions[Region.STEPS]
        return os.pread(self._fd, many * RECORD_SIZE, span.offset + slot * RECORD_SIZE)


def open_file(directory_fd: int, name: str, owner: int | None = None) -> FlightFile:
    """Open a flight file by its name in a directory. ``owner``: the only uid to accept.

    Raises ``OSError`` when it cannot be opened, :class:`BadFlightFileError` when it is not one.
    """
    return FlightFile(*_open(directory_fd, name, owner))


def open_path(path: str) -> FlightFile:
    """Open a flight file by its path, for a person's tools. Raises as :func:`open_file`."""
    directory, name = os.path.split(path)
    with opened(directory or ".", link=True) as directory_fd:
        return open_file(directory_fd, name)


def _open(directory_fd: int, name: str, owner: int | None) -> tuple[int, Header]:
    fd = os.open(name, files.READ, dir_fd=directory_fd)
    try:
        status = os.fstat(fd)
        _check(status, owner)
        return fd, decode_header(os.pread(fd, HEADER_SIZE, 0), status.st_size)
    except (OSError, BadFlightFileError):
        os.close(fd)
        raise


def _check(status: os.stat_result, owner: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BadFlightFileError("not a regular file")
    if owner is not None and status.st_uid != owner:
        msg = f"owned by uid {status.st_uid}, not {owner}"
        raise BadFlightFileError(msg)
