"""Where the writer's stores go: straight into the map, or into private memory that the sampler thread writes out.

On tmpfs a store into a mapped page costs nothing, so the training thread does it. On any other file system it can block
behind writeback, and the whole interpreter with it, whichever thread it is in, for a slice assignment holds the GIL: on a
frozen ext4 no step ended until it was thawed. So there the sampler thread does all the storing, by ``pwrite``, which lets the
GIL go (the slowest of 2,600 steps took 13 ms while it was frozen for 2 s): acknowledged within 100 ms.
"""

from __future__ import annotations

import os
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from torchobs.flight.files.create import open_again
from torchobs.flight.format.layout import ALIGN, HEADER_SIZE, LIVE_WORDS, Region
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.flight.files.create import CreatedFile

_WORD = 8
_LIVE_END = HEADER_SIZE + LIVE_WORDS * _WORD


class Storage(Protocol):
    """The two kinds of store that the format allows (``layout``)."""

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Store ``data`` by one slice assignment."""

    def word(self, index: int, value: int) -> None:
        """Store the 8-byte word with this index by one aligned item store."""

    def flush(self) -> None:
        """Do all stores that still wait. Raises ``OSError``; what could not be stored waits on."""

    def snapshot(self) -> bytes:
        """Return what the file holds, or will hold after :meth:`flush`."""

    def move(self, born: CreatedFile, copied: bytes) -> None:
        """Store into another file from now on, which was filled with the snapshot ``copied``. Raises ``OSError``."""

    def detach(self) -> None:
        """Store into private memory from now on: the file is closed, or the parent's."""


class DirectStorage:
    """Stores at once."""

    __slots__ = ("_view", "_words")

    def __init__(self, view: memoryview) -> None:
        self._attach(view)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """See :class:`Memory`."""
        self._view[offset : offset + len(data)] = data

    def word(self, index: int, value: int) -> None:
        """See :class:`Memory`."""
        self._words[index] = value

    def flush(self) -> None:
        """See :class:`Memory`: nothing ever waits."""

    def snapshot(self) -> bytes:
        """See :class:`Memory`."""
        return bytes(self._view)

    def move(self, born: CreatedFile, copied: bytes) -> None:
        """See :class:`Memory`. What other threads stored between the copy and the switch is carried over."""
        old, new = self._view, memoryview(born.map)
        self._attach(new)
        _carry_over(old, new, copied, range(HEADER_SIZE, _LIVE_END, _WORD))
        _carry_over(old, new, copied, range(_LIVE_END, len(copied), ALIGN))

    def detach(self) -> None:
        """See :class:`Memory`."""
        self._attach(memoryview(bytearray(len(self._view))))

    def _attach(self, view: memoryview) -> None:
        self._view, self._words = view, view.cast("Q")


def _carry_over(old: memoryview, new: memoryview, copied: bytes, offsets: range) -> None:
    """Copy what was stored into ``old`` after the copy, unless it was stored into ``new`` once more."""
    for at in offsets:
        end = at + offsets.step
        if old[at:end] != copied[at:end] and new[at:end] == copied[at:end]:
            new[at:end] = old[at:end]


def _joined(stores: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join each store (offset, length) with those that follow it in the file and in time.

    Every write lets the GIL go, and a busy thread keeps it for 5 ms then: a hundred records one by one took half a second.
    """
    begun = end = 0
    for offset, length in stores:
        if offset == end:
            end += length
            continue
        if end:
            yield begun, end - begun
        begun, end = offset, offset + length
    if end:
        yield begun, end - begun


class DeferredStorage:
    """Stores into private memory and notes where; :meth:`flush` writes that out.

    So what waits is bounded by the file's size however long a flush is held up (a queue of stores had to drop some, and one
    lost entry of the series table hides all after it), and a slot that was stored ten times meanwhile is written once.
    """

    __slots__ = ("__weakref__", "_dirty", "_fd", "_flushing", "_private", "_shadow", "_steps_at")

    def __init__(self, born: CreatedFile) -> None:
        self._private = memoryview(bytearray(born.map))
        self._shadow = DirectStorage(self._private)
        self._steps_at = born.header.regions[Region.STEPS].offset
        self._dirty: dict[int, int] = {}
        self._flushing = Lock()
        renew_in_child(self, _flushing=Lock)
        self._fd = open_again(born)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """See :class:`Memory`."""
        self._shadow.store(offset, data)
        self._dirty[offset] = len(data)

    def word(self, index: int, value: int) -> None:
        """See :class:`Memory`."""
        self._shadow.word(index, value)
        self._dirty[index * _WORD] = _WORD

    def flush(self) -> None:
        """See :class:`Memory`. Nothing while another thread is flushing. Stores made meanwhile wait for the next round."""
        if not self._flushing.acquire(blocking=False):
            return
        try:
            if self._fd >= 0:
                self._write_out(self._fd)
        finally:
            self._flushing.release()

    def _write_out(self, fd: int) -> None:
        # taken out before it is written: a store that comes in between marks its place again
        waiting = deque(_joined((offset, self._dirty.pop(offset)) for offset in self._in_order()))
        try:
            while waiting:
                offset, length = waiting[0]
                # a copy: without the GIL another thread could change what is just being written
                os.pwrite(fd, bytes(self._private[offset : offset + length]), offset)
                waiting.popleft()
        finally:
            for offset, length in waiting:
                for at in range(offset, offset + length, ALIGN):
                    self._dirty.setdefault(at, min(ALIGN, offset + length - at))

    def _in_order(self) -> list[int]:
        """Return the marked offsets as they were first marked, so that of two slots the older is written over first.

        Step records come last: one may replace a record that only the new core has folded.
        """
        return sorted(self._dirty, key=lambda offset: offset >= self._steps_at)

    def snapshot(self) -> bytes:
        """See :class:`Memory`."""
        return bytes(self._private)

    def move(self, born: CreatedFile, copied: bytes) -> None:
        """See :class:`Memory`."""
        fd = open_again(born)
        self._close()
        self._fd = fd
        for at in range(HEADER_SIZE, len(copied), ALIGN):
            if self._private[at : at + ALIGN] != copied[at : at + ALIGN]:
                self._dirty.setdefault(at, ALIGN)

    def detach(self) -> None:
        """See :class:`Memory`. What still waits is given up."""
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0 or not self._flushing.acquire(blocking=False):
            return  # a thread that is stuck in a flush has the descriptor's number: it must not become another file's
        os.close(fd)
        self._flushing.release()
