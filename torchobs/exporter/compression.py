"""The page as gzip, by two threads.

Compressing is a third of what a page takes, and zlib does it without Python's lock: each of two threads takes one half, and the
halves are one member of two runs of blocks (RFC 1952), as pigz makes them; some readers stop after a first member.
"""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEVEL = 1
"""A page is nine tenths repetition: level 1 makes it 8 times smaller, level 6 takes 2.3 times as long for 9 times."""
_MEMORY = 7
"""Lines repeat the line before them: half of zlib's usual hash table finds as much, and takes 7 % less time."""
_RAW = -15
_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
"""Deflate, no name, no time, the fastest level, of no particular file system."""
_ALONE = 128 * 1024
"""Bytes of a page that are compressed before another thread has woken up."""


class Compressor:
    """Compresses pages, one at a time."""

    def __init__(self) -> None:
        self._other = ThreadPoolExecutor(1, "compress")

    def close(self) -> None:
        """End the thread."""
        self._other.shutdown(wait=False)

    def gzip(self, page: Sequence[bytes]) -> bytes:
        """Return the gzip of a page that is given in pieces."""
        ends = list(accumulate(map(len, page)))
        size = ends[-1] if ends else 0
        middle = sum(end <= size / 2 for end in ends) if size > _ALONE else len(page)
        rest = self._other.submit(_deflated, page[middle:], zlib.Z_FINISH) if middle < len(page) else None
        first, crc = _deflated(page[:middle], zlib.Z_SYNC_FLUSH), 0
        for piece in page:
            crc = zlib.crc32(piece, crc)
        second = rest.result() if rest is not None else _deflated((), zlib.Z_FINISH)
        return b"".join((_HEAD, *first, *second, struct.pack("<II", crc, size & 0xFFFFFFFF)))


def _deflated(pieces: Sequence[bytes], end: int) -> list[bytes]:
    made = zlib.compressobj(_LEVEL, wbits=_RAW, memLevel=_MEMORY)
    return [*map(made.compress, pieces), made.flush(end)]
