"""Files compressed by gzip or bzip2, archives of tar among them: how large they become, and where they would write.

They are read forwards in small parts, and no further than a bomb's size: nothing of them fills the memory.
"""

from __future__ import annotations

import bz2
import gzip
import tarfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from torchobs.guard.archives import LEAST_BOMB, MOST_RATIO, entry_problems

if TYPE_CHECKING:
    import os

_MAGIC_GZIP, _MAGIC_BZIP2 = b"\x1f\x8b\x08", b"BZh"
_BZIP2_BLOCKS = b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90"
"""What comes after the magic and a digit: a block, or the end. ``BZh`` alone may begin a pickle."""
_LARGEST_READ = 1 << 20
"""Of names and other headers; tarfile reads one at once, as long as it says it is"""


class Compressed(NamedTuple):
    """What is known of a compressed file."""

    problems: list[str]
    is_tar: bool


class _Bomb(Exception):  # noqa: N818  # a finding, and no mistake of the caller's
    pass


class _Bounded:
    """The decompressed file, for ``tarfile``."""

    def __init__(self, file: IO[bytes], packed: int) -> None:
        self._file, self._packed, self._most = file, packed, max(LEAST_BOMB, MOST_RATIO * packed)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LARGEST_READ:
            raise _Bomb(f"a header of it would be {size:,} bytes long")
        self._reach(self._file.tell() + size)
        return self._file.read(size)

    def seek(self, position: int) -> int:
        self._reach(position)
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()

    def _reach(self, position: int) -> None:
        if position > self._most:
            raise _Bomb(f"{self._packed:,} bytes would become more than {self._most:,}")


def is_compressed(head: bytes) -> bool:
    """Return True if a file begins as those of gzip or bzip2 do."""
    return head.startswith(_MAGIC_GZIP) or (head.startswith(_MAGIC_BZIP2) and head[4:10] in _BZIP2_BLOCKS)


def compressed_problems(path: str | os.PathLike[str]) -> Compressed:
    """Return what is wrong with a compressed file; of an archive of tar by its headers. Nothing is written.

    Raises:
        OSError, EOFError, zlib.error, tarfile.TarError: it is damaged.
    """
    packed = max(Path(path).stat().st_size, 1)
    with open(path, "rb") as file:  # noqa: PTH123  # a path-like object
        is_gzip = file.read(len(_MAGIC_GZIP)) == _MAGIC_GZIP
    is_tar = False
    with gzip.open(path) if is_gzip else bz2.open(path) as plain:
        bounded = _Bounded(cast("IO[bytes]", plain), packed)
        try:
            is_tar = _begins_as_tar(bounded)
            if is_tar:
                with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r:") as archive:
                    return Compressed(entry_problems(archive, packed), is_tar=True)
            while bounded.read(_LARGEST_READ):
                pass
        except _Bomb as bomb:
            return Compressed([str(bomb)], is_tar=is_tar)
    return Compressed([], is_tar=False)


def _begins_as_tar(file: _Bounded) -> bool:
    """Return True for a header of tar; the file is at its beginning, before and after."""
    head = file.read(tarfile.BLOCKSIZE)
    file.seek(0)
    return head[257:262] == b"ustar"
