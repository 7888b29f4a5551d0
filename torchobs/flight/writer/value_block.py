"""A value block: words in private memory, published as A/B slots in the map.

Any thread and any signal handler may change the words at any time: changes are queued, and a thread that gets the block's lock
without waiting applies the queue and publishes the block. :meth:`ValueBlock.publish` increments the generation and stores the
whole slot of its parity, so that a reader always finds one complete slot.

Totals saturate instead of wrapping around, because a reader that sees a counter decrease refuses the file from then on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torchobs.flight.format.layout import BLOCK_WORDS, SLOT_HEADER, SLOT_SIZE
from torchobs.flight.format.series import INT_ABSENT, ValueType
from torchobs.flight.metrics.totals import ABSENT_BITS, MAX, TOP, Totals
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.writer.storage import Storage

_MASK = (1 << 64) - 1


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
        """Queue ``update(totals, *arguments)`` for the next :meth:`publish`."""
        self._pending.append((update, arguments))

    @property
    def is_settled(self) -> bool:
        """Whether no change is queued or being applied."""
        return not (self._pending or self._unstored)

    def publish(self, *, force: bool = False) -> None:
        """Apply the queue and store the block, unless another thread is doing so, which will apply our changes too."""
        if force:
            self._pending.append((_nothing, ()))
        while self._pending or self._unstored:
            if self._lock.locked():
                return
            # `with`, because an interrupt between acquire() and `try` would leave the lock taken forever; it waits only for
            # a thread that has just taken it, never for the one that a signal handler has interrupted
            with self._lock:
                self._apply()
                self._store()

    def _apply(self) -> None:
        self._unstored = True  # before applying: an interrupt may come in between
        pending, totals = self._pending, self.totals
        for _ in range(len(pending)):
            update, arguments = pending.popleft()
            update(totals, *arguments)

    def _store(self) -> None:
        # SLOT_HEADER as words, in half the time of packing it; the CRC covers the header with its own field zero
        generation, size = self._generation + 1, self.used * 8
        head, slot = self._head, self._raw[: SLOT_HEADER.size + size]
        head[0], head[1] = generation, size
        head[1] = crc32(slot, self._seed) << 32 | size
        self._memory.store(self._offset + (generation & 1) * SLOT_SIZE, slot)
        self._generation = generation
        self._unstored = False


def _nothing(_: Totals) -> None:
    """The empty change that a forced publication queues."""


def add_int(totals: Totals, word: int, amount: int) -> None:
    """Add to an i64 word."""
    present = totals.ints[word]
    total = present + amount
    if present > TOP or not 0 <= total <= TOP:  # absent, negative, or out of range
        present = 0 if present == INT_ABSENT else present - ((present >> 63) << 64)
        total = min(max(present + amount, -TOP), TOP) & _MASK
    totals.ints[word] = total


def add_float(totals: Totals, word: int, amount: float) -> None:
    """Add a finite number to an f64 word."""
    total = totals.floats[word] + amount
    if total != total:  # noqa: PLR0124  # the NaN test: absent until now
        total = float(amount)
    totals.floats[word] = min(max(total, -MAX), MAX)


def set_value(totals: Totals, word: int, value_type: int, value: float) -> None:
    """Set a gauge, or an observed total. A non-finite value makes it absent."""
    whole = isinstance(value, int)
    if whole:
        value = min(max(value, -TOP), TOP)
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
    floats[total] = min(max(floats[total] + value, -MAX), MAX)
    floats[total + 1] = min(floats[total + 1], value)
    floats[total + 2] = max(floats[total + 2], value)
