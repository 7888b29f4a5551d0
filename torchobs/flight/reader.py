"""The reading side of a flight file, which trusts nothing in it.

Opened by ``dir_fd`` with ``O_NOFOLLOW`` and ``O_NONBLOCK`` (a FIFO or a lease must not hold us), a regular file with one link,
of the right device and owner, of the size that its header says; every offset and count is checked before use (``layout``,
``series``); ``pread`` only, for a map of a file that somebody truncates is SIGBUS. No counter that was served ever steps back:
a snapshot in which one would is not served.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.catalog import Kind
from torchobs.flight import events, record
from torchobs.flight.birth import LOCK_SUFFIX, SUFFIX
from torchobs.flight.layout import (
    BLOCK_WORDS, EXIT_SET, HEADER_SIZE, MAX_READ_SIZE, RECORD_SIZE, SLOT_HEADER, SLOT_SIZE, BadFlightFileError, Header, Live, Region,
    decode_header, words_crc,
)  # fmt: skip
from torchobs.flight.series import INT_ABSENT, Series, ValueType, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = re.compile(rf"^r\d{{1,9}}-[0-9a-f]{{32}}{re.escape(SUFFIX)}$")
_RETRIES = 4
MAX_NAMES = 200_000
MAX_FILES = 4096


class Distribution(NamedTuple):
    """A histogram's value: counts per bucket (one more than bounds), sum, least and greatest value (None: no value)."""

    counts: tuple[int, ...]
    sum: float
    least: float | None
    greatest: float | None


class Point(NamedTuple):
    """One series and its value."""

    series: Series
    value: float | Distribution


@dataclass(frozen=True, slots=True)
class LiveWords:
    """The live words, decoded; ``None`` where one is absent or out of range."""

    heartbeat_ns: int | None
    phase: str | None
    phase_begun_ns: int | None
    exit_reason: int | None
    exit_code: int
    level: int


@dataclass(frozen=True, slots=True)
class View:
    """A flight file at one moment. Points are exact up to the last acknowledged record."""

    header: Header
    live: LiveWords
    points: tuple[Point, ...]
    last_step_ns: int | None
    """CLOCK_MONOTONIC at the end of the last step"""


def names(directory_fd: int) -> list[str]:
    """Return the names of the flight files in a directory, at most 4,096 of at most 200,000 names looked at. Raises ``OSError``."""
    found = []
    with os.scandir(directory_fd) as entries:
        for seen, entry in enumerate(entries):
            if seen >= MAX_NAMES or len(found) >= MAX_FILES:
                break
            if _NAME.match(entry.name):
                found.append(entry.name)
    return sorted(found)


def lock_of(name: str) -> str:
    """Return the name of a flight file's lock."""
    return name.removesuffix(SUFFIX) + LOCK_SUFFIX


class FlightFile:
    """An open flight file; keeps what it last served."""

    def __init__(self, fd: int, header: Header) -> None:
        """Use :func:`open_file` or :func:`open_path`."""
        self.header = header
        self._fd = fd
        self._series: list[Series] = []
        self._taken: set[tuple[int, int]] = set()
        self._table_at = 0
        self._generations: dict[int, int] = {}
        self._words: dict[int, bytes] = {}
        self._served: View | None = None
        self.rejected = 0
        """snapshots that were not served, because a counter would have stepped back"""

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def read(self, *, final: bool = False) -> View:
        """Return the file's state. ``final``: its writer is dead, so that a record missing in the row never comes.

        Raises :class:`BadFlightFileError` when the file shrank and nothing was served before.
        """
        live = self.live()
        self._more_series()
        for block in sorted({series.block for series in self._series} | {0}):
            self._read_block(block)
        core = record.Totals(bytearray(self._words.get(0, b"").ljust(BLOCK_WORDS * 8, b"\0")))
        newest = self._fold(core, final=final)
        points = tuple(self._points(core))
        if self._served is not None and _steps_back(self._served.points, points):
            self.rejected += 1
            return View(self.header, live, self._served.points, self._served.last_step_ns)
        last = newest.end_ns if newest else self._last_step_ns(core)
        self._served = View(self.header, live, points, last)
        return self._served

    def steps(self, limit: int | None = None) -> list[record.StepRecord]:
        """Return the records in the ring, oldest first, the last ``limit`` of them."""
        ring = self._region(Region.STEPS)
        found = []
        for at in range(0, len(ring), RECORD_SIZE):
            decoded = record.unpack(ring[at : at + RECORD_SIZE], self.header.seed)
            if decoded is not None and (decoded.seq - 1) % (len(ring) // RECORD_SIZE) == at // RECORD_SIZE:
                found.append(decoded)
        found.sort()
        return found if limit is None else found[len(found) - min(limit, len(found)) :]

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the position and the fields of each event and span still in the ring, oldest first."""
        return events.scan(self._region(Region.EVENTS), self.header.seed)

    def _region(self, region: Region) -> bytes:
        span = self.header.regions[region]
        raw = os.pread(self._fd, span.length, span.offset)
        return raw.ljust(span.length, b"\0")

    def live(self) -> LiveWords:
        """Return the live words alone: 256 bytes, for who looks every second and reads all only when asked to."""
        words = memoryview(self._region(Region.LIVE)).cast("Q")
        heartbeat, phase, exit_word = words[Live.HEARTBEAT_NS], words[Live.PHASE], words[Live.EXIT]
        phase_id = phase >> 56
        known = 1 <= phase_id <= len(record.PHASE_NAMES)
        ended = bool(exit_word & EXIT_SET)
        code = exit_word & 0xFFFFFFFF
        return LiveWords(
            heartbeat if 0 < heartbeat < 1 << 62 else None,
            record.PHASE_NAMES[phase_id - 1] if known else None,
            (phase & ((1 << 56) - 1)) * 1000 if known else None,
            (exit_word & ~EXIT_SET) >> 32 if ended else None,
            code - (1 << 32) if code >> 31 else code,
            words[Live.LEVEL] if words[Live.LEVEL] < 16 else 0,  # noqa: PLR2004  # out of range: absent
        )

    def _more_series(self) -> None:
        span, start = self.header.regions[Region.SERIES], self._table_at
        if not any(os.pread(self._fd, min(4, span.length - start), span.offset + start)):
            return  # no length: nothing new
        raw = os.pread(self._fd, span.length - start, span.offset + start)
        taken = self._taken
        for series, end in decode(raw, self.header.seed, self.header.regions[Region.BLOCKS].count):
            words = {(series.block, word) for word in range(series.word, series.word + series.width)}
            self._table_at = start + end
            if taken.isdisjoint(words):  # a twin or an overlap is forged
                taken.update(words)
                self._series.append(series)

    def _read_block(self, block: int) -> None:
        offset = self.header.regions[Region.BLOCKS].offset + block * 2 * SLOT_SIZE
        least = self._generations.get(block, 0)
        for _ in range(_RETRIES):
            slots = (self._slot(offset), self._slot(offset + SLOT_SIZE))
            best = max((slot for slot in slots if slot is not None), default=None)
            if best is not None and best[0] >= least:
                self._generations[block], self._words[block] = best
                return

    def _slot(self, offset: int) -> tuple[int, bytes] | None:
        raw = os.pread(self._fd, SLOT_SIZE, offset)
        if len(raw) < SLOT_HEADER.size:
            return None
        generation, length, crc = SLOT_HEADER.unpack_from(raw)
        words = raw[SLOT_HEADER.size : SLOT_HEADER.size + length]
        if length % 8 or length > BLOCK_WORDS * 8 or len(words) != length or not generation:
            return None
        return (generation, words) if words_crc(generation, words, self.header.seed) == crc else None

    def _fold(self, core: record.Totals, *, final: bool) -> record.StepRecord | None:
        """Fold what the writer had not folded; return the newest step among it."""
        upto = core.ints[record.Word.FOLDED_UPTO]
        batch = list(self._after(upto, final=final))
        record.fold(core, batch)
        return next((item for item in reversed(batch) if item.kind == record.Kind.STEP), None)

    def _after(self, upto: int, *, final: bool) -> Iterator[record.StepRecord]:
        if final:
            yield from (decoded for decoded in self.steps() if decoded.seq > upto)
            return
        span = self.header.regions[Region.STEPS]
        chunk = 64
        seq = upto + 1
        while seq <= upto + span.count:
            slot = (seq - 1) % span.count
            many = min(chunk, span.count - slot)
            raw = os.pread(self._fd, many * RECORD_SIZE, span.offset + slot * RECORD_SIZE)
            for at in range(0, len(raw), RECORD_SIZE):
                decoded = record.unpack(raw[at : at + RECORD_SIZE], self.header.seed)
                if decoded is None or decoded.seq != seq:
                    return  # not there yet
                yield decoded
                seq += 1
            if len(raw) < many * RECORD_SIZE:
                return

    def _last_step_ns(self, core: record.Totals) -> int | None:
        timestamp = core.floats[record.Word.LAST_STEP_TIMESTAMP]
        if not core.ints[record.Word.STEPS] or not isfinite(timestamp):
            return None
        return round(timestamp * 1e9) - self.header.wall_ns + self.header.monotonic_ns

    def _points(self, core: record.Totals) -> Iterator[Point]:
        ints, floats = {}, {}
        for block, raw in self._words.items():
            words = memoryview(raw if block else core.buffer)
            ints[block], floats[block] = words.cast("Q").tolist(), words.cast("d").tolist()
        for series in self._series:
            block, word = series.block, series.word
            if word + series.width <= len(ints.get(block, ())):
                value = _VALUES[series.value_type](ints[block], floats[block], word, series)
                if value is not None:
                    yield Point(series, value)


def _int_value(ints: list[int], _: list[float], word: int, __: Series) -> int | None:
    return ints[word] if ints[word] < 1 << 63 else None


def _float_value(_: list[int], floats: list[float], word: int, __: Series) -> float | None:
    return floats[word] if isfinite(floats[word]) else None


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
    if not isfinite(floats[total]) or max(counts) >> 62:
        return None
    return Distribution(counts, floats[total], least if isfinite(least) else None, greatest if isfinite(greatest) else None)


_VALUES: dict[int, Callable[[list[int], list[float], int, Series], float | Distribution | None]] = {
    ValueType.INT: _int_value,
    ValueType.FLOAT: _float_value,
    ValueType.EITHER: _either_value,
    ValueType.HISTOGRAM: _distribution,
}


def _steps_back(before: tuple[Point, ...], now: tuple[Point, ...]) -> bool:
    """Tell whether a counter or a bucket went down, or a counter went away."""
    served = {point.series: point.value for point in now}
    for series, old in before:
        new = served.get(series)
        if isinstance(old, Distribution):
            if not isinstance(new, Distribution) or any(a < b for a, b in zip(new.counts, old.counts, strict=True)):
                return True
        elif series.kind is Kind.COUNTER and (new is None or isinstance(new, Distribution) or new < old):
            return True
    return False


def open_file(directory_fd: int, name: str, owner: int | None = None) -> FlightFile:
    """Open a flight file by its name in a directory. ``owner``: the only uid to accept.

    Raises ``OSError`` when it cannot be opened, :class:`BadFlightFileError` when it is not one.
    """
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        status = os.fstat(fd)
        _check(status, os.fstat(directory_fd).st_dev, owner)
        return FlightFile(fd, decode_header(os.pread(fd, HEADER_SIZE, 0), status.st_size))
    except (OSError, BadFlightFileError):
        os.close(fd)
        raise


def open_path(path: str) -> FlightFile:
    """Open a flight file by its path, for a person's tools. Raises as :func:`open_file`."""
    directory, name = os.path.split(path)
    fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_file(fd, name)
    finally:
        os.close(fd)


def _check(status: os.stat_result, device: int, owner: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BadFlightFileError("not a regular file")
    if status.st_nlink != 1 or status.st_dev != device:
        raise BadFlightFileError("a link, or on another device")
    if owner is not None and status.st_uid != owner:
        msg = f"owned by uid {status.st_uid}, not {owner}"
        raise BadFlightFileError(msg)
    if status.st_size > MAX_READ_SIZE:
        raise BadFlightFileError("larger than any flight file")
