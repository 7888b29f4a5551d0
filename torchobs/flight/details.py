"""Two regions that no metric comes from: how the run was started (*details*), and gauges over time (*history*).

Each region has two slots of half its length: ``generation:u64 length:u32 crc:u32`` (:data:`~.layout.SLOT_HEADER`) and the
payload. A new version goes to the slot of its generation's parity, so that the one before stays readable whenever the process
dies. Only ``torchobs inspect``, ``report`` and ``compare`` read them: neither the metrics page nor OTLP shows any of it.

Details are a JSON object. A history is ``head:u32``, a JSON object ``{"names": […]}`` of that many bytes, and rows of the time
since the header's in seconds and the last step as f64, and one f32 for each name, NaN where it has no value.
"""

from __future__ import annotations

import json
import struct
from array import array
from math import isfinite, nan
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.layout import SLOT_HEADER, Extent, words_crc
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.flight.storage import Storage

_HEAD = struct.Struct("<I")


class Document:
    """Writer of one of the regions. Any thread may replace it."""

    __slots__ = ("__weakref__", "_generation", "_lock", "_memory", "_seed", "_span")

    def __init__(self, memory: Storage, span: Extent, seed: int) -> None:
        self._memory, self._span, self._seed, self._generation = memory, span, seed, 0
        self._lock = Lock()
        renew_in_child(self, _lock=Lock)

    @property
    def room(self) -> int:
        """Most bytes that a version may have."""
        return self._span.length // 2 - SLOT_HEADER.size

    def replace(self, payload: bytes) -> bool:
        """Store the next version; False if it is too long, or while another thread stores one."""
        if len(payload) > self.room or not self._lock.acquire(blocking=False):
            return False
        try:
            self._generation += 1
            head = SLOT_HEADER.pack(self._generation, len(payload), words_crc(self._generation, payload, self._seed))
            self._memory.store(self._span.offset + self._generation % 2 * (self._span.length // 2), head + payload)
        finally:
            self._lock.release()
        return True


def newest(region: bytes, seed: int) -> bytes:
    """Return the newest valid version in a region; empty if there is none."""
    half, best = len(region) // 2, (0, b"")
    for at in (0, half):
        generation, length, crc = SLOT_HEADER.unpack_from(region, at)
        payload = region[at + SLOT_HEADER.size : at + SLOT_HEADER.size + length]
        if best[0] < generation and words_crc(generation, payload, seed) == crc:
            best = generation, payload
    return best[1]


class HistoryRow(NamedTuple):
    """Values at one time: seconds since the file's creation, the last step, and a value for each name (``None``: absent)."""

    time_s: float
    step: int
    values: tuple[float | None, ...]


class History(NamedTuple):
    """Gauges over time; ``names`` are ``metric`` or ``metric{attribute value}``."""

    names: tuple[str, ...] = ()
    rows: tuple[HistoryRow, ...] = ()

    def curves(self, metric: str) -> dict[str, list[tuple[HistoryRow, float]]]:
        """Return a metric's curves by attribute value (``""`` without one); rows where it has a value."""
        curves: dict[str, list[tuple[HistoryRow, float]]] = {}
        for index, name in enumerate(self.names):
            if name.partition("{")[0] == metric:
                points = [(row, value) for row in self.rows if (value := row.values[index]) is not None]
                if points:
                    curves[name.partition("{")[2].removesuffix("}")] = points
        return curves


def encode_history(names: Sequence[str], rows: Sequence[tuple[float, int, Sequence[float]]]) -> bytes:
    """Return the payload; a row with fewer values than names had no later ones."""
    head = json.dumps({"names": list(names)}, separators=(",", ":")).encode()
    packed = struct.Struct(f"<dd{len(names)}f")
    blank = [nan] * len(names)
    body = b"".join(
        # array: what is beyond an f32's range becomes infinite, where `pack` raises OverflowError
        packed.pack(time_s, step, *array("f", values), *blank[len(values) :])
        for time_s, step, values in rows
    )
    return _HEAD.pack(len(head)) + head + body


def decode_history(payload: bytes) -> History:
    """Return the history; an empty one where none was written."""
    if len(payload) < _HEAD.size:
        return History()
    end = _HEAD.size + _HEAD.unpack_from(payload)[0]
    names = json.loads(payload[_HEAD.size : end])["names"]
    packed = struct.Struct(f"<dd{len(names)}f")
    body = payload[end : end + (len(payload) - end) // packed.size * packed.size]
    rows = (
        HistoryRow(time_s, int(step), tuple(value if isfinite(value) else None for value in values))
        for time_s, step, *values in packed.iter_unpack(body)
    )
    return History(tuple(names), tuple(rows))
