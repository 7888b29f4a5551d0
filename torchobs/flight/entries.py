"""Entries of a directory by its descriptor: listed, created, replaced, checked and removed.

No symbolic link is followed and no FIFO or lease blocks, for others may be able to write to the directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from secrets import token_hex
from typing import TYPE_CHECKING

from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for reading a file that another process wrote."""
TEMPORARY = ".tmp-"
"""Begin of a name that a file has until it is complete; the rest is of :func:`temporary_name`"""


def names(directory_fd: int) -> Iterator[str]:
    """Yield the names in the directory. Raises ``OSError``."""
    # a descriptor of its own: concurrent scrapes would share the read position of one
    directory = Descriptor("", ".", os.O_RDONLY | os.O_DIRECTORY, directory=directory_fd)
    try:
        with os.scandir(directory.number()) as found:
            for entry in found:
                yield entry.name
    finally:
        directory.close()


def create(directory: Descriptor | int, name: str, mode: int, what: str = "", flags: int = os.O_RDWR) -> Descriptor:
    """Create a file with that mode and open it; ``what``: for the log. Raises ``OSError``; nothing is left behind then."""
    file = Descriptor(what, name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode=mode, directory=directory)
    try:
        os.fchmod(file.number(), mode)  # regardless of the umask: its reader may be another user, or read by group
    except OSError:
        file.close()
        remove(directory if isinstance(directory, int) else directory.number(), name)
        raise
    return file


def temporary_name() -> str:
    """Return a name that no other file has."""
    return TEMPORARY + token_hex(8)


def replace(directory_fd: int, name: str, content: bytes, mode: int) -> None:
    """Write a small file that has its name once it is complete. Raises ``OSError``; nothing is left behind then."""
    temporary = temporary_name()
    with contextlib.ExitStack() as undo:
        file = create(directory_fd, temporary, mode)
        undo.callback(remove, directory_fd, temporary)
        try:
            os.write(file.number(), content)
        finally:
            file.close()
        os.rename(temporary, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        undo.pop_all()


def remove(directory_fd: int, name: str) -> None:
    """Remove a file if it is there and may be removed."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory_fd)


def inode(directory_fd: int, name: str) -> int:
    """Return the inode that has this name; 0 if there is none. Raises ``OSError``."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0


def is_plain(status: os.stat_result, owner: int | None) -> bool:
    """Return True for a regular file with one name. ``owner``: the only uid to accept."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and (owner is None or status.st_uid == owner)
