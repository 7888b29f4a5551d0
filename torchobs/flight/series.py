"""The series table: which series each word of a value block belongs to.

An entry is ``length:u32 crc:u32 block:u16 word:u16 width:u16 kind:u8 type:u8``, then a JSON array ``[name, unit, brief,
attributes, bounds]`` in UTF-8, padded with spaces to a multiple of 8 bytes; ``length`` counts all of it, and the CRC covers
all of it but itself. Entries are append-only; the table ends at the first entry with a bad CRC.
A user's instrument has a sixth element, its instrumentation scope ``[name, version, schema_url, attributes]``.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.catalog import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEAD = struct.Struct("<IIHHHBB")
_MAX_ENTRY = 16 * 1024


class ValueType:
    """How a series' words hold its value."""

    INT = 0
    """one word, u64"""
    FLOAT = 1
    """one word, f64; any NaN: absent"""
    EITHER = 2
    """a user's instrument that may receive ints and floats: i64 word (its minimum: absent), f64 word (NaN: absent); a
    sum is their sum, a gauge is the one that is present"""
    HISTOGRAM = 3
    """u64 buckets (one more than bounds), then f64 sum, least, greatest"""


INT_ABSENT = 1 << 63
WIDTHS = {ValueType.INT: 1, ValueType.FLOAT: 1, ValueType.EITHER: 2}


class Scope(NamedTuple):
    """OpenTelemetry's instrumentation scope: the library that created the instrument. ``attributes`` as in :class:`Series`."""

    name: str
    version: str = ""
    schema_url: str = ""
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """One series. ``attributes`` are (name, value) pairs sorted by name; ``word`` is its first word in ``block``.

    ``scope``: ``None`` for the instruments of torchobs itself.
    """

    name: str
    kind: Kind
    unit: str
    brief: str
    attributes: tuple[tuple[str, Any], ...]
    bounds: tuple[float, ...]
    value_type: int
    block: int
    word: int
    scope: Scope | None = None

    @property
    def width(self) -> int:
        """Number of words of the value."""
        return len(self.bounds) + 4 if self.value_type == ValueType.HISTOGRAM else WIDTHS[self.value_type]


def encode(series: Series, seed: int) -> bytes:
    """Return the entry's bytes. Raises ``ValueError`` when it is over 16 KiB."""
    fields: list[object] = [series.name, series.unit, series.brief, dict(series.attributes), list(series.bounds)]
    if series.scope is not None:
        fields.append([*series.scope[:3], dict(series.scope.attributes)])
    payload = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=str).encode(errors="replace")
    payload = payload.ljust(-(-len(payload) // 8) * 8)
    length = _HEAD.size + len(payload)
    if length > _MAX_ENTRY:
        msg = f"series {series.name[:64]!r} needs {length} bytes of the series table, at most {_MAX_ENTRY} are given"
        raise ValueError(msg)
    tail = (series.block, series.word, series.width, series.kind.value, series.value_type)
    crc = zlib.crc32(payload, zlib.crc32(_HEAD.pack(length, 0, *tail), seed))
    return _HEAD.pack(length, crc, *tail) + payload


def decode(table: bytes, seed: int) -> Iterator[tuple[Series, int]]:
    """Yield each valid entry with the offset after it."""
    at = 0
    while at + _HEAD.size <= len(table):
        length, crc, *tail = _HEAD.unpack_from(table, at)
        if not _HEAD.size < length <= len(table) - at:
            return
        payload = table[at + _HEAD.size : at + length]
        if crc != zlib.crc32(payload, zlib.crc32(_HEAD.pack(length, 0, *tail), seed)):
            return
        at += length
        yield _parse(payload, *tail), at


def _parse(payload: bytes, block: int, word: int, _: int, kind: int, value_type: int) -> Series:
    name, unit, brief, attributes, bounds, *scope = json.loads(payload)
    edges = tuple(map(float, bounds))
    library = Scope(scope[0][0], scope[0][1], scope[0][2], _pairs(scope[0][3])) if scope else None
    return Series(name, Kind(kind), unit, brief, _pairs(attributes), edges, value_type, block, word, library)


def _pairs(attributes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    values = ((name, tuple(value) if isinstance(value, list) else value) for name, value in attributes.items())
    return tuple(sorted(values, key=itemgetter(0)))
