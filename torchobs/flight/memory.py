"""Where the writer's stores go: straight into the map, or through a queue that the sampler thread empties.

On tmpfs a store into a mapped page costs nothing, so the training thread does it. On any other file system it can block
behind writeback (2 s on a frozen ext4), so there the sampler thread does all the storing: acknowledged within 100 ms.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Memory(Protocol):
    """The two kinds of store that the format allows (``layout``)."""

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Store ``data`` by one slice assignment."""

    def word(self, index: int, value: int) -> None:
        """Store the 8-byte word with this index by one aligned item store."""

    def flush(self) -> None:
        """Do all stores that are still queued."""

    def replace(self, view: memoryview) -> None:
        """Store into ``view`` from now on (after a fork: private memory; after the file was deleted: a new file)."""

    def snapshot(self) -> bytes:
        """Return what the map holds."""


class DirectMemory:
    """Stores at once."""

    __slots__ = ("_view", "_words")

    def __init__(self, view: memoryview) -> None:
        self.replace(view)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """See :class:`Memory`."""
        self._view[offset : offset + len(data)] = data

    def word(self, index: int, value: int) -> None:
        """See :class:`Memory`."""
        self._words[index] = value

    def flush(self) -> None:
        """See :class:`Memory`: nothing is ever queued."""

    def replace(self, view: memoryview) -> None:
        """See :class:`Memory`."""
        self._view, self._words = view, view.cast("Q")

    def snapshot(self) -> bytes:
        """See :class:`Memory`."""
        return bytes(self._view)


class DeferredMemory:
    """Queues the stores, in order, for :meth:`flush`; the queue holds at most ``limit`` stores, the oldest fall out."""

    __slots__ = ("_map", "_queue")

    def __init__(self, view: memoryview, limit: int = 65_536) -> None:
        self._map = DirectMemory(view)
        self._queue: deque[tuple[int, bytes | int]] = deque(maxlen=limit)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """See :class:`Memory`."""
        self._queue.append((offset, bytes(data)))

    def word(self, index: int, value: int) -> None:
        """See :class:`Memory`."""
        self._queue.append((index, value))

    def flush(self) -> None:
        """See :class:`Memory`. Stores queued meanwhile wait for the next round, so that it ends."""
        for _ in range(len(self._queue)):
            at, data = self._queue.popleft()
            if isinstance(data, int):
                self._map.word(at, data)
            else:
                self._map.store(at, data)

    def replace(self, view: memoryview) -> None:
        """See :class:`Memory`."""
        self._map.replace(view)

    def snapshot(self) -> bytes:
        """See :class:`Memory`."""
        return self._map.snapshot()
