"""The event ring: dated facts and finished spans, as frames at multiples of 64 bytes.

A frame is ``position:u64 length:u32 crc:u32`` and ``length`` bytes of a JSON object. ``position`` is virtual: it counts
bytes since birth and never wraps, so that a frame stands at ``position % ring``; the CRC covers position, length and
payload. A frame never wraps around the ring's end: what does not fit there starts at the next lap. A reader needs no
head: it looks at every 64 bytes and takes what stands where its position says and matches its CRC.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import deque
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any

from torchobs.flight.layout import ALIGN, Live, encodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchobs.flight.memory import Memory

_FRAME = struct.Struct("<QII")
MAX_PAYLOAD = 16 * 1024
_MAX_PENDING = 1024
_MAX_CHECKED = 8
_MAX_DEPTH = 32
_MAX_BITS = 128


def plain(value: object, depth: int = _MAX_DEPTH) -> Any:
    """Return ``value`` as something JSON has: a non-finite float becomes its name, an unknown or too deep object its text."""
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124  # the NaN test
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return hex(value)  # Python refuses to print 4,300 digits in decimal
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if isinstance(value, (list, tuple)) and depth > 1:
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, dict) and depth > 1:
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    return str(value)


class EventRing:
    """The writing side. Any thread may append; none ever waits: who finds the ring busy leaves its frame to the holder."""

    __slots__ = ("_lock", "_memory", "_offset", "_pending", "_position", "_seed", "_size", "dropped", "live_at")

    def __init__(self, memory: Memory, offset: int, size: int, seed: int, live_at: int) -> None:
        self._memory, self._offset, self._size, self._seed = memory, offset, size, seed
        self.live_at = live_at
        self._position = 0
        self._pending: deque[bytes] = deque()
        self._lock = Lock()
        self.dropped = 0

    @property
    def limit(self) -> int:
        """Bytes that a frame's payload may have."""
        return min(MAX_PAYLOAD, self._size // 4)

    def append(self, fields: Mapping[str, object]) -> None:
        """Add one frame; one that is too long, or comes while 1,024 wait, is dropped and counted."""
        self.put(json.dumps(plain(dict(fields)), separators=(",", ":")).encode())

    def put(self, payload: bytes) -> None:
        """Add one frame whose JSON is ready."""
        if len(payload) > self.limit or len(self._pending) >= _MAX_PENDING:
            self.dropped += 1
            return
        self._pending.append(payload)
        self.drain()

    def drain(self) -> None:
        """Write what is pending, unless another thread is at it."""
        while self._pending:
            if self._lock.locked():
                return
            with self._lock:  # see block.Block.publish
                if self._pending:
                    self._write(self._pending.popleft())

    def _write(self, payload: bytes) -> None:
        length = -(-(_FRAME.size + len(payload)) // ALIGN) * ALIGN
        room = self._size - self._position % self._size
        position = self._position if length <= room else self._position + room
        crc = zlib.crc32(payload, zlib.crc32(_FRAME.pack(position, len(payload), 0), self._seed))
        frame = _FRAME.pack(position, len(payload), crc) + payload
        self._memory.store(self._offset + position % self._size, frame)
        self._position = position + length
        self._memory.word(self.live_at + Live.EVENT_HEAD, self._position)


def scan(ring: bytes, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(position, fields)`` of every valid frame, oldest first.

    Forged lengths could make every 64 bytes cost the CRC of 16 KiB: after ``_MAX_CHECKED`` rings' worth of bytes it ends.
    """
    for position, payload in sorted(_frames(ring, seed)):
        try:
            fields = json.loads(payload.decode())  # json.loads would take bytes for UTF-16, too
            if b"\\u" in payload or payload.count(b"[") + payload.count(b"{") > _MAX_DEPTH:
                fields = _sane(fields, _MAX_DEPTH)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            yield position, fields


def _frames(ring: bytes, seed: int) -> Iterator[tuple[int, bytes]]:
    at, left = 0, _MAX_CHECKED * len(ring)
    while at < len(ring) - _FRAME.size and left > 0:
        position, length, crc = _FRAME.unpack_from(ring, at)
        begin, at = at, at + ALIGN
        if not length or position % len(ring) != begin or length > min(MAX_PAYLOAD, len(ring) - begin - _FRAME.size):
            continue
        left -= length
        payload = ring[begin + _FRAME.size : begin + _FRAME.size + length]
        if crc == zlib.crc32(payload, zlib.crc32(_FRAME.pack(position, length, 0), seed)):
            yield position, payload
            at = begin + -(-(_FRAME.size + length) // ALIGN) * ALIGN  # no frame begins inside another


def _sane(value: object, depth: int) -> object:
    """Return ``value`` without lone surrogates. Raises ``ValueError`` when it is nested deeper than ``depth``."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, (dict, list)) and not depth:
        raise ValueError
    if isinstance(value, dict):
        return {encodable(key): _sane(item, depth - 1) for key, item in value.items()}
    return [_sane(item, depth - 1) for item in value] if isinstance(value, list) else value
