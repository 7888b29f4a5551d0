"""Open files that torchobs keeps, safe from a program that closes descriptors which it has not opened.

After ``os.closerange`` (a daemon's habit), a ``close_fds`` helper or ``os.dup2`` a number of ours may be a file of the program,
which must be neither written, read, locked nor closed. So the owner of a file gets its number anew for each use.
``faulthandler`` has numbers of ours and asks for none. As the kernel gives a file the lowest free number, ours are moved above
those that a program uses.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sys
from collections import deque
from copy import copy
from threading import RLock
from typing import NamedTuple

from torchobs.support.after_fork import renew_in_child

_TABLE = 1024
"""Numbers that the kernel has a table for at little cost (8 KiB), and the usual limit of a process"""
_mutex = RLock()
renew_in_child(sys.modules[__name__], _mutex=RLock)
_lost: deque[tuple[str, str]] = deque(maxlen=100)


class Identity(NamedTuple):
    """A file, whatever its names."""

    device: int
    inode: int


class Descriptor:
    """An open file that is kept: its number, for as long as that number is this file.

    A file that the program has closed is opened again by its path, if that still is the same file.
    """

    __slots__ = ("_closed", "_directory", "_fd", "_flags", "_name", "_path", "identity")

    def __init__(
        self, name: str, path: str, flags: int, *, mode: int = 0o600, directory: Descriptor | int | None = None
    ) -> None:
        """Open a file, in a directory or by an absolute path; ``name``: for the log, if any. Raises ``OSError``."""
        self._name, self._path, self._directory = name, path, directory
        self._flags, self._closed = flags & ~(os.O_CREAT | os.O_EXCL), False
        self._fd = self._open(flags, mode)
        self.identity = _identity(self._fd)

    def is_intact(self) -> bool:
        """Return whether the number still is this file."""
        try:
            return _identity(self._fd) == self.identity
        except OSError:
            return False

    def number(self) -> int:
        """Return the number, right before its use. Raises ``OSError`` where the file is lost."""
        self.restore()
        return self._fd

    def restore(self) -> bool:
        """Open the file again if its number was lost; return whether it was.

        Raises:
            OSError: its path has another file, or it was closed by :meth:`close`.
        """
        if self.is_intact():
            return False
        with _mutex:
            if self._closed:
                raise _error(errno.EBADF)
            if self.is_intact():
                return True  # by another thread
            before, self._fd = self._fd, -1
            try:
                again = self._open(self._flags)
                if _identity(again) != self.identity:
                    os.close(again)
                    raise _error(errno.ENOENT)
                self._fd = again
            except OSError as problem:
                if before >= 0:
                    self._report(problem.strerror or str(problem))
                raise
            self._report("")
        return True

    def copy(self) -> Descriptor:
        """Return another descriptor of the open file. Raises ``OSError``."""
        again = copy(self)
        again._fd = _duplicate(self.number())  # noqa: SLF001  # of this class
        return again

    def replace(self, other: Descriptor) -> None:
        """Take over another's file in place of this one."""
        with _mutex:
            self.close()
            self._fd, self.identity, self._closed = other._fd, other.identity, False
            other._fd, other._closed = -1, True

    def close(self) -> None:
        """Close the file, unless the number is another's. Idempotent."""
        with _mutex:
            if self.is_intact():
                os.close(self._fd)
            self._fd, self._closed = -1, True

    def _report(self, problem: str) -> None:
        if self._name:
            _lost.append((self._name, problem))

    def _open(self, flags: int, mode: int = 0o600) -> int:
        directory = self._directory.number() if isinstance(self._directory, Descriptor) else self._directory
        fd = os.open(self._path, flags | os.O_CLOEXEC, mode, dir_fd=directory)
        try:
            return _duplicate(fd)
        finally:
            os.close(fd)


def take_lost() -> list[tuple[str, str]]:
    """Return the names of the files that were lost since the last call, and why one could not be opened again."""
    return [_lost.popleft() for _ in range(len(_lost))]


def _duplicate(fd: int) -> int:
    """Return another number for the file, above those that a program uses. Raises ``OSError`` where none is free."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = (_TABLE if limit == resource.RLIM_INFINITY else min(limit, _TABLE)) * 15 // 16
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)


def _identity(fd: int) -> Identity:
    """Return which file has this number. Raises ``OSError`` if none has."""
    status = os.fstat(fd)
    return Identity(status.st_dev, status.st_ino)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
