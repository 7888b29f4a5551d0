"""Storage of a flight file: direct stores into the map, or private memory that the sampler thread writes to the file.

On tmpfs a store into a mapped page costs nothing, so the training thread does it. On any other file system it can block on
writeback, and with it the whole interpreter, because a slice assignment holds the GIL: on a frozen ext4 no step ended until it
was thawed. There the sampler thread writes by ``pwrite``, which releases the GIL (the slowest of 2,600 steps took 13 ms during
a freeze of 2 s); a record is then in the file within 100 ms.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

from torchobs.flight.files import CreatedFile, open_again
from torchobs.flight.layout import ALIGN, HEADER_SIZE, LIVE_WORDS, Region
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.support.descriptors import Descriptor

_WORD = 8
_LIVE_END = HEADER_SIZE + LIVE_WORDS * _WORD


class Storage:
    """Stores into the map at once, by the two kinds of store that the format allows (see ``layout``)."""

    __slots__ = ("_words", "address", "anchor", "view")

    def __init__(self, view: memoryview) -> None:
        self.anchor: object = None
        self.address = 0
        """Address of ``view``, for code that stores records into it; 0 for storages that do more than store"""
        self._attach(view)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Store ``data`` by one slice assignment."""
        end = offset + len(data)  # no call between the view and the store: another thread may move it
        self.view[offset:end] = data

    def word(self, index: int, value: int) -> None:
        """Store the 8-byte word with this index by one aligned item store."""
        self._words[index] = value

    def flush(self) -> None:
        """Write all pending stores: none here. Raises ``OSError``; those that failed stay pending."""

    def snapshot(self) -> bytes:
        """Return the contents that the file has, or will have after :meth:`flush`."""
        return bytes(self.view)

    def restore(self) -> None:
        """Open the file again if the program has closed it: nothing is open here. Raises ``OSError`` if it is gone."""

    def move(self, created: CreatedFile, copied: bytes) -> None:
        """Switch to another file, which was filled with the snapshot ``copied``. Raises ``OSError``.

        Stores of other threads between copy and switch are carried over.
        """
        old, new = self.view, created.map
        self._attach(new)
        _carry_over(old, new, copied, range(HEADER_SIZE, _LIVE_END, _WORD))
        _carry_over(old, new, copied, range(_LIVE_END, len(copied), ALIGN))

    def detach(self) -> None:
        """Store into private memory only from now on: the file is closed, or belongs to the parent process."""
        self._attach(memoryview(bytearray(len(self.view))))

    def _attach(self, view: memoryview) -> None:
        if type(self) is Storage:
            anchor = ctypes.c_char.from_buffer(view)  # the limited API of Python 3.10 has no buffers
            self.address = ctypes.addressof(anchor)
            self.anchor = anchor  # keeps the view where it is; the one before goes last
        self._words = view.cast("Q")
        self.view = view
        """The map, or private memory; another one after :meth:`move` and :meth:`detach`"""


def _carry_over(old: memoryview, new: memoryview, copied: bytes, offsets: range) -> None:
    """Copy stores into ``old`` made after the snapshot, unless ``new`` has a later one in the same place.

    Entries of the series table are as long as they are: the end of one and the begin of the next may share 64 bytes.
    """
    for at in offsets:
        end = at + offsets.step
        if old[at:end] != copied[at:end]:
            if new[at:end] == copied[at:end]:
                new[at:end] = old[at:end]
            elif offsets.step > _WORD:
                _carry_over(old, new, copied, range(at, end, _WORD))


def _joined(stores: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge stores (offset, length) that are adjacent in the file and in time.

    Every write releases the GIL, and a busy thread then keeps it for 5 ms: a hundred single records took half a second.
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


class DeferredStorage(Storage):
    """Stores into private memory and marks the offsets; :meth:`flush` writes the marked parts to the file.

    Pending data is bounded by the file's size however long a flush blocks (a bounded queue would drop stores, and one lost
    entry of the series table hides all later ones), and a slot stored ten times meanwhile is written once.
    """

    __slots__ = ("__weakref__", "_dirty", "_file", "_flushing", "_steps_at")

    def __init__(self, created: CreatedFile) -> None:
        super().__init__(memoryview(bytearray(created.map)))
        self._steps_at = created.header.regions[Region.STEPS].offset
        self._dirty: dict[int, int] = {}
        self._flushing = Lock()
        renew_in_child(self, _flushing=Lock)
        self._file: Descriptor | None = open_again(created)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """See :class:`Storage`."""
        self.view[offset : offset + len(data)] = data
        self._dirty[offset] = len(data)

    def word(self, index: int, value: int) -> None:
        """See :class:`Storage`."""
        self._words[index] = value
        self._dirty[index * _WORD] = _WORD

    def flush(self) -> None:
        """See :class:`Storage`. Does nothing while another thread flushes. Stores made meanwhile wait for the next call."""
        if not self._flushing.acquire(blocking=False):
            return
        try:
            if self._file is not None:
                self._write_out(self._file)
        finally:
            self._flushing.release()

    def restore(self) -> None:
        """See :class:`Storage`."""
        if (file := self._file) is not None:
            file.restore()

    def _write_out(self, file: Descriptor) -> None:
        # unmarked before the write: a concurrent store marks its offset again
        waiting = deque(_joined((offset, self._dirty.pop(offset)) for offset in self._in_order()))
        try:
            while waiting:
                offset, length = waiting[0]
                # a copy: another thread could change the data while pwrite has released the GIL
                os.pwrite(file.number(), bytes(self.view[offset : offset + length]), offset)
                waiting.popleft()
        finally:
            for offset, length in waiting:
                for at in range(offset, offset + length, ALIGN):
                    self._dirty.setdefault(at, min(ALIGN, offset + length - at))

    def _in_order(self) -> list[int]:
        """Return the marked offsets in the order of their marking, so that of two slots the older one is overwritten first.

        Step records come last: one may overwrite a record that only the new core has folded.
        """
        return sorted(self._dirty, key=lambda offset: offset >= self._steps_at)

    def move(self, created: CreatedFile, copied: bytes) -> None:
        """See :class:`Storage`."""
        file = open_again(created)
        self._close()
        self._file = file
        for at in range(HEADER_SIZE, len(copied), ALIGN):
            if self.view[at : at + ALIGN] != copied[at : at + ALIGN]:
                self._dirty.setdefault(at, ALIGN)

    def detach(self) -> None:
        """See :class:`Storage`. Pending stores are discarded."""
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is None or not self._flushing.acquire(blocking=False):
            return  # a thread stuck in a flush still uses the descriptor: its number must not be reused
        file.close()
        self._flushing.release()
