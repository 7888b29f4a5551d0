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

from torchobs.flight.layout import ALIGN, Live

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchobs.flight.memory import Memory

_FRAME = struct.Struct("<QII")
MAX_PAYLOAD = 16 * 1024
_MAX_PENDING = 1024


def plain(value: object) -> Any:
    """Return ``value`` as something JSON has: a non-finite float becomes its name, an unknown object its text."""
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124  # the NaN test
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
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

    def append(self, fields: Mapping[str, object]) -> None:
        """Add one frame; one that is too long, or comes while 1,024 wait, is dropped and counted."""
        payload = json.dumps(plain(dict(fields)), separators=(",", ":")).encode()
        if len(payload) > min(MAX_PAYLOAD, self._size // 4) or len(self._pending) >= _MAX_PENDING:
            self.dropped += 1
            return
        self._pending.append(payload)
        self.drain()

    def drain(self) -> None:
        """Write what is pending, unless another thread is at it."""
        while self._pending:
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._write(self._pending.popleft())
            except IndexError:
                return  # the one who held the lock took the last
            finally:
                self._lock.release()

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
    """Yield ``(position, fields)`` of every valid frame, oldest first."""
    found = []
    for at in range(0, len(ring) - _FRAME.size, ALIGN):
        position, length, crc = _FRAME.unpack_from(ring, at)
        if not length or position % len(ring) != at or length > min(MAX_PAYLOAD, len(ring) - at - _FRAME.size):
            continue
        payload = ring[at + _FRAME.size : at + _FRAME.size + length]
        if crc == zlib.crc32(payload, zlib.crc32(_FRAME.pack(position, length, 0), seed)):
            found.append((position, payload))
    for position, payload in sorted(found):
        try:
            fields = json.loads(payload)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            yield position, fields
