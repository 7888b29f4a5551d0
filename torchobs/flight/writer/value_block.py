"""A value block: words in private memory, and their publication as A/B slots in the map.

Any thread may change the words at any time, a signal handler too: a change is queued, and whoever gets the block's lock
without waiting applies what is queued and publishes the block. :meth:`Block.publish` raises the generation and stores the
whole slot of its parity, so that a reader always finds one whole slot.

No total ever wraps around, however large its parts: a sum that leaves its word's range stays at the range's end, because a
reader that saw a counter step back would have to refuse the whole file from then on.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torchobs.flight.format.layout import BLOCK_WORDS, SLOT_HEADER, SLOT_SIZE
from torchobs.flight.format.series import INT_ABSENT, ValueType
from torchobs.flight.metrics.totals import ABSENT_BITS, Totals
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.writer.storage import Storage

_MASK = (1 << 64) - 1
_TOP = (1 << 63) - 1
_MAX = sys.float_info.max


class ValueBlock:
    """One value block: private words, and the two slots in the map."""

    __slots__ = (
        "__weakref__",
        "_generation",
        "_head",
        "_lock",
        "_memory",
        "_offset",
        "_pending",
        "_raw",
        "_seed",
        "_unstored",
        "totals",
        "used",
    )  # fmt: skip

    def __init__(self, memory: Storage, offset: int, seed: int) -> None:
        self._memory, self._offset, self._seed = memory, offset, seed
        self._raw = memoryview(bytearray(SLOT_SIZE))
        self._head, start = self._raw.cast("Q"), SLOT_HEADER.size
        self.totals = Totals(self._raw[start : start + BLOCK_WORDS * 8])
        self.used = 0
        self._generation = 0
        self._lock = Lock()
        renew_in_child(self, _lock=Lock)
        self._pending: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._unstored = False

    def change(self, update: Callable[..., None], *arguments: Any) -> None:
        """Queue ``update(totals, *arguments)``; the next :meth:`publish` applies it."""
        self._pending.append((update, arguments))

    def publish(self, *, force: bool = False) -> None:
        """Apply what is queued and store the block, unless another thread is at it (it will see our changes)."""
        if force:
            self._pending.append((_nothing, ()))
        while self._pending or self._unstored:
            if self._lock.locked():
                return
            # `with`, for between a call of acquire() and a `try` an interrupt could leave the lock taken for good; it waits
            # only for a thread that came first just now, never for the one that a signal handler has interrupted
            with self._lock:
                self._apply()
                self._store()

    def _apply(self) -> None:
        self._unstored = True  # until it is: an interrupt may come in between
        pending, totals = self._pending, self.totals
        for _ in range(len(pending)):
            update, arguments = pending.popleft()
            update(totals, *arguments)

    def _store(self) -> None:
        # SLOT_HEADER word by word, which takes half the time of packing it; the CRC covers the header with its own field zero
        generation, size = self._generation + 1, self.used * 8
        head, slot = self._head, self._raw[: SLOT_HEADER.size + size]
        head[0], head[1] = generation, size
        head[1] = crc32(slot, self._seed) << 32 | size
        self._memory.store(self._offset + (generation & 1) * SLOT_SIZE, slot)
        self._generation = generation
        self._unstored = False


def _nothing(_: Totals) -> None:
    """The change that a forced publication queues."""


def add_int(totals: Totals, word: int, amount: int) -> None:
    """Add to an i64 word."""
    present = totals.ints[word]
    total = present + amount
    if present > _TOP or not 0 <= total <= _TOP:  # absent, negative, or out of range
        present = 0 if present == INT_ABSENT else present - ((present >> 63) << 64)
        total = min(max(present + amount, -_TOP), _TOP) & _MASK
    totals.ints[word] = total


def add_float(totals: Totals, word: int, amount: float) -> None:
    """Add a finite number to an f64 word."""
    total = totals.floats[word] + amount
    if total != total:  # noqa: PLR0124  # the NaN test: absent until now
        total = float(amount)
    totals.floats[word] = min(max(total, -_MAX), _MAX)


def set_value(totals: Totals, word: int, value_type: int, value: float) -> None:
    """Set a gauge, or a total observed elsewhere. A non-finite value makes it absent."""
    whole = isinstance(value, int)
    if whole:
        value = min(max(value, -_TOP), _TOP)
    if value_type == ValueType.EITHER:
        totals.ints[word] = int(value) & _MASK if whole else INT_ABSENT
        word += 1
        if whole:
            totals.ints[word] = ABSENT_BITS
            return
    if value_type == ValueType.INT:
        totals.ints[word] = int(value) & _MASK
    elif isfinite(value):
        totals.floats[word] = value
    else:
        totals.ints[word] = ABSENT_BITS


def observe(totals: Totals, word: int, bounds: tuple[float, ...], value: float) -> None:
    """Add a finite value to a histogram whose first bucket is ``word``."""
    totals.ints[word + bisect_left(bounds, value)] += 1
    total = word + len(bounds) + 1
    floats = totals.floats
    floats[total] = min(max(floats[total] + value, -_MAX), _MAX)
    floats[total + 1] = min(floats[total + 1], value)
    floats[total + 2] = max(floats[total + 2], value)
