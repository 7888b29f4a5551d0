r"""The format of a flight file, version 2: little-endian, every region aligned to 64 bytes.

====== =========================================================================================================
offset content
====== =========================================================================================================
0      static header, 4,096 bytes, complete before the file gets its name (:class:`Header`)
4,096  live words: 8-byte words, each stored and valid independently (:class:`Live`)
…      series table: append-only entries (``series.py``)
…      value blocks: ``BLOCK_COUNT`` blocks of two slots, A and B (:data:`SLOT_HEADER`, then up to 512 words)
…      step ring: 128-byte records (``step_record.py``)
…      event ring: frames at multiples of 64 bytes (``events.py``)
…      details and history: two slots each (``details.py``)
====== =========================================================================================================

**Header**: ``magic[8] major:u16 minor:u16 header_size:u32 file_size:u64 incarnation[16] boot_id[16] monotonic_ns:u64
wall_ns:u64 pid:u32 uid:u32 region_count:u32 resource_length:u32 resource_crc:u32 storage:u32``, then at 96 ``region_count`` ×
``kind:u32 item_size:u32 offset:u64 length:u64``, then at 288 the resource, a flat JSON object in UTF-8 that describes the rank,
and in the last four bytes the CRC-32 of everything before. A bad CRC or size in the header invalidates the file. ``storage`` is
1 if the file was created in memory (tmpfs), 2 if not, and 0, unknown, in files of earlier versions, where it was padding.

**CRCs** of everything but the header are seeded with the low 32 bits of the incarnation, so that stale frames do
not validate. **Versions**: a reader takes any minor version of its major; minor versions add regions, never fields.

**Stores**: a word is one aligned item store, a record, slot, entry or frame is packed privately and stored by ONE slice
assignment; nothing depends on the order of stores, because Python has no fences and arm64 reorders. Packing straight into the
map is forbidden: CPython zeroes the target first, and a reader saw those zeros in 3-17 % of its reads.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MAGIC = b"TORCHOBS"
MAJOR, MINOR = 2, 0
ALIGN = 64
HEADER_SIZE = 4096
MIN_SIZE = 256 * 1024
DEFAULT_SIZE = 1024 * 1024
MAX_SIZE = 2 * 1024 * 1024
RESOURCE_LIMIT = HEADER_SIZE - 4 - 288
BLOCK_WORDS = 512
BLOCK_COUNT = 16
RECORD_SIZE = 128

SLOT_HEADER = struct.Struct("<QII")
"""generation, length of the words in bytes, CRC over (generation, length, words)"""
SLOT_SIZE = -(-(SLOT_HEADER.size + BLOCK_WORDS * 8) // ALIGN) * ALIGN

_FIXED = struct.Struct("<8sHHIQ16s16sQQIIIIII")
_REGION = struct.Struct("<IIQQ")
_REGIONS_AT, _MAX_REGIONS = 96, 8
_U32 = struct.Struct("<I")
_STORAGE = (None, True, False)
"""``Header.in_memory`` by the header's ``storage``"""
_CERTAIN = ("data", "forward", "backward", "optimizer", "other", "evaluation", "checkpoint", "compile")
PHASE_NAMES = (*_CERTAIN, "between")
LIVE_PHASES = (*_CERTAIN, "idle")
"""Phases that the training thread can be in now; idle: it has left its training loop."""
FADED_AFTER_S = 0.6
"""A rank with a free lock is dead after this long without a heartbeat. A free lock alone is no proof: a living process that
closes unknown descriptors, as daemons do, loses its lock."""

_MICROSECONDS = (1 << 56) - 1


class BadFlightFileError(ValueError):
    """The bytes are not a flight file that this version reads; the message has the reason."""


class Region(IntEnum):
    """Kinds in the region table, in the order of the regions."""

    LIVE = 1
    SERIES = 2
    BLOCKS = 3
    STEPS = 4
    EVENTS = 5
    DETAILS = 6
    HISTORY = 7


_ITEM_SIZES = {
    Region.LIVE: 8, Region.SERIES: 1, Region.BLOCKS: 2 * SLOT_SIZE, Region.STEPS: RECORD_SIZE, Region.EVENTS: ALIGN,
    Region.DETAILS: ALIGN, Region.HISTORY: ALIGN,
}  # fmt: skip
DETAILS_SIZE = 8 * 1024
HISTORY_SIZE = 64 * 1024
"""In a file of the default size or more, else a quarter"""


class Live:
    """Indexes of the live words. Heads are hints only."""

    HEARTBEAT_NS = 0
    """CLOCK_MONOTONIC of the sampler's last round"""
    PHASE = 1
    """phase id << 56 | CLOCK_MONOTONIC in µs at which it began (names: ``LIVE_PHASES``)"""
    STEP_HEAD = 2
    """sequence number of the newest step record"""
    EVENT_HEAD = 3
    """virtual position after the newest event frame"""
    SERIES_COUNT = 4
    """entries in the series table"""
    EXIT = 5
    """0 while running, else 1 << 63 | reason << 32 | exit code & 0xffffffff"""
    LEVEL = 6
    """debug level in force"""
    STEPS_SINCE_NS = 7
    """CLOCK_MONOTONIC since when steps are recorded; 0: since the start; all ones: recording is off"""
    COMMAND = 8
    """number of the newest command read (``flight.control``)"""


LIVE_WORDS = 32


class Exit:
    """Reasons in the exit word."""

    FINISHED = 1
    EXCEPTION = 2
    EXIT_CODE = 3
    INTERRUPTED = 4
    TERMINATED = 5
    """by a handler of the script's for SIGTERM; without one it is never written, but SIGTERM leaves its mark"""
    CRASHED = 6
    """by a fatal signal; never written, for it leaves its mark"""


EXIT_SET = 1 << 63
NO_STEPS = (1 << 64) - 1


PROCESS_BEGUN = "process_begun_ms"
"""Field of the resource: when the process began, in Unix time; absent where only the begin of the recording is meaningful"""


@dataclass(frozen=True, slots=True)
class Extent:
    """Offset and length of a region in bytes, and the size of its items."""

    offset: int
    length: int
    item_size: int

    @property
    def count(self) -> int:
        """Whole items in the region."""
        return self.length // self.item_size


@dataclass(frozen=True, slots=True)
class Header:
    """The static header."""

    file_size: int
    incarnation: bytes
    boot_id: bytes
    monotonic_ns: int
    wall_ns: int
    pid: int
    uid: int
    regions: Mapping[Region, Extent]
    resource: Mapping[str, str | int]
    minor: int = MINOR
    in_memory: bool | None = None
    """whether it was created in memory, so that stores into the mapped file survived the process's end; ``None``: unknown"""

    @property
    def begun_s(self) -> float:
        """When the process began, in Unix time, if it is known and was before the recording; else when recording did."""
        begun_ms = self.resource.get(PROCESS_BEGUN)
        recorded_s = self.wall_ns / 1e9
        return min(begun_ms / 1e3, recorded_s) if isinstance(begun_ms, int) and begun_ms > 0 else recorded_s

    @property
    def seed(self) -> int:
        """Start value of every CRC in the file."""
        return int.from_bytes(self.incarnation[:4], "little")

    def wall_s(self, monotonic_ns: int) -> float:
        """Unix time in seconds of a CLOCK_MONOTONIC reading, by the pair read at creation: clock jumps have no effect."""
        return self.wall_ns_of(monotonic_ns) / 1e9

    def wall_ns_of(self, monotonic_ns: int) -> int:
        """Return the same in nanoseconds."""
        return self.wall_ns + monotonic_ns - self.monotonic_ns


def plan(size: int) -> dict[Region, Extent]:
    """Lay out a file of ``size`` bytes: half for step records, fixed value blocks, the rest shared by series and events.

    Raises ``ValueError`` for a size outside ``MIN_SIZE``…``MAX_SIZE`` or not a multiple of ``ALIGN``.
    """
    if not MIN_SIZE <= size <= MAX_SIZE or size % ALIGN:
        msg = f"a flight file has {MIN_SIZE} to {MAX_SIZE} bytes, a multiple of {ALIGN}, not {size}"
        raise ValueError(msg)
    records = 1 << ((size // 2 // RECORD_SIZE).bit_length() - 1)
    live = LIVE_WORDS * 8
    blocks = 2 * SLOT_SIZE * (BLOCK_COUNT if size >= DEFAULT_SIZE else BLOCK_COUNT // 4)
    history = HISTORY_SIZE if size >= DEFAULT_SIZE else HISTORY_SIZE // 4
    rest = size - HEADER_SIZE - live - blocks - records * RECORD_SIZE - DETAILS_SIZE - history
    series = rest // 2 // ALIGN * ALIGN
    events = (rest - series) // ALIGN * ALIGN
    regions, offset = {}, HEADER_SIZE
    lengths = (live, series, blocks, records * RECORD_SIZE, events, DETAILS_SIZE, history)
    for region, length in zip(Region, lengths, strict=True):
        regions[region] = Extent(offset, length, _ITEM_SIZES[region])
        offset += length
    return regions


def encode_header(header: Header) -> bytes:
    """Return the header's 4,096 bytes. Raises ``ValueError`` when the resource does not fit ``RESOURCE_LIMIT`` bytes."""
    # host and job names need not be UTF-8; the error handler keeps what can be encoded
    resource = json.dumps(dict(header.resource), ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    if len(resource) > RESOURCE_LIMIT:
        msg = f"the resource takes {len(resource)} bytes, at most {RESOURCE_LIMIT} fit"
        raise ValueError(msg)
    fixed = _FIXED.pack(
        MAGIC, MAJOR, header.minor, HEADER_SIZE, header.file_size, header.incarnation, header.boot_id, header.monotonic_ns,
        header.wall_ns, header.pid, header.uid, len(header.regions), len(resource), zlib.crc32(resource),
        _STORAGE.index(header.in_memory),
    )  # fmt: skip
    table = b"".join(_REGION.pack(kind, span.item_size, span.offset, span.length) for kind, span in header.regions.items())
    body = fixed.ljust(_REGIONS_AT, b"\0") + table.ljust(_REGION.size * _MAX_REGIONS, b"\0") + resource
    body = body.ljust(HEADER_SIZE - 4, b"\0")
    return body + _U32.pack(zlib.crc32(body))


def decode_header(raw: bytes, size: int) -> Header:
    """Check and decode a header; ``size``: the file's length. Every returned offset lies within the file.

    Raises :class:`BadFlightFileError`.
    """
    if len(raw) < HEADER_SIZE:
        raise BadFlightFileError("shorter than a header")
    magic, major, minor, header_size, file_size, incarnation, boot_id, *rest = _FIXED.unpack_from(raw)
    monotonic_ns, wall_ns, pid, uid, region_count, resource_length, _, storage = rest
    if magic != MAGIC:
        raise BadFlightFileError("not a flight file")
    if major != MAJOR:
        msg = f"format version {major}.{minor}, this reader knows {MAJOR}.x"
        raise BadFlightFileError(msg)
    if zlib.crc32(raw[: HEADER_SIZE - 4]) != _U32.unpack_from(raw, HEADER_SIZE - 4)[0]:
        raise BadFlightFileError("header CRC does not match")
    if header_size != HEADER_SIZE or file_size != size or not MIN_SIZE <= size <= MAX_SIZE:
        msg = f"size {size} is not the header's {file_size}"
        raise BadFlightFileError(msg)
    regions, resource = _regions(raw, region_count, size), _resource(raw, resource_length)
    in_memory = _STORAGE[storage] if storage < len(_STORAGE) else None
    return Header(file_size, incarnation, boot_id, monotonic_ns, wall_ns, pid, uid, regions, resource, minor, in_memory)


def _regions(raw: bytes, count: int, size: int) -> dict[Region, Extent]:
    regions: dict[Region, Extent] = {}
    for at in range(_REGIONS_AT, _REGIONS_AT + min(count, _MAX_REGIONS) * _REGION.size, _REGION.size):
        kind, item_size, offset, length = _REGION.unpack_from(raw, at)
        if kind not in Region._value2member_map_:
            continue  # added by a later minor version
        region = Region(kind)
        if item_size != _ITEM_SIZES[region] or length < item_size or offset < HEADER_SIZE or offset + length > size:
            msg = f"region {region.name} lies outside the file, or has items of another size"
            raise BadFlightFileError(msg)
        regions[region] = Extent(offset, length, item_size)
    if len(regions) < len(Region):
        raise BadFlightFileError("a region is missing")
    return regions


def _resource(raw: bytes, length: int) -> dict[str, str | int]:
    try:
        decoded: dict[str, str | int] = json.loads(raw[288 : 288 + min(length, RESOURCE_LIMIT)])
    except ValueError:
        raise BadFlightFileError("the resource is no JSON") from None
    return decoded


def encodable(text: str) -> str:
    r"""Return ``text`` without lone surrogates: JSON can spell them (``"\ud800"``), and no page with one could be encoded."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def nonfinite_name(value: float) -> str:
    """Return the name of NaN or an infinity, which JSON cannot hold, as OpenTelemetry spells it."""
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124  # the NaN test


def words_crc(generation: int, words: bytes | memoryview, seed: int) -> int:
    """Return the CRC of a value slot."""
    return zlib.crc32(words, zlib.crc32(SLOT_HEADER.pack(generation, len(words), 0), seed))


@dataclass(frozen=True, slots=True)
class LiveWords:
    """The live words; ``None`` where one is absent. Times are CLOCK_MONOTONIC in nanoseconds."""

    heartbeat_ns: int | None
    phase: str | None
    phase_begun_ns: int | None
    exit_reason: int | None
    exit_code: int
    level: int
    event_head: int = 0
    """changes with every event; a hint only"""
    steps_since_ns: int | None = 0
    """since when steps are recorded: 0 = since the start, ``None`` = recording was switched off"""
    command: int = 0
    """number of the newest command that the rank has read"""


def decode_live(raw: bytes) -> LiveWords:
    """Decode the live words; missing bytes (of a file that shrank) count as zeros."""
    words = memoryview(raw.ljust(8 * (Live.COMMAND + 1), b"\0")).cast("Q")
    phase, exit_word, level = words[Live.PHASE], words[Live.EXIT], words[Live.LEVEL]
    heartbeat, code = words[Live.HEARTBEAT_NS], exit_word & 0xFFFFFFFF
    since = words[Live.STEPS_SINCE_NS]
    is_known, ended = 1 <= phase >> 56 <= len(LIVE_PHASES), bool(exit_word & EXIT_SET)
    return LiveWords(
        heartbeat or None,
        LIVE_PHASES[(phase >> 56) - 1] if is_known else None,
        (phase & _MICROSECONDS) * 1000 if is_known else None,
        (exit_word & ~EXIT_SET) >> 32 if ended else None,
        code - (1 << 32) if code >> 31 else code,
        level,
        words[Live.EVENT_HEAD],
        None if since == NO_STEPS else since,
        words[Live.COMMAND],
    )
