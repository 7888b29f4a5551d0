"""Open files that torchobs keeps, safe from a program that closes descriptors which it has not opened.

After ``os.closerange`` (a daemon's habit), a ``close_fds`` helper or ``os.dup2`` a number of ours may be a file of the program,
which must be neither written, read, locked nor closed. So whoever keeps a file asks for its number each time it is needed.

Between such a check and the call that it was for, another thread can close a file, and open another one, if it gets the GIL. So
the check keeps the GIL. And as the kernel gives a file the lowest free number, ours are moved above those that a program uses.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import stat
import struct
import sys
from collections import deque
from copy import copy
from itertools import compress
from operator import eq
from threading import RLock
from typing import NamedTuple

from torchobs.support.after_fork import renew_in_child

_TABLE = 1024
"""Numbers that the kernel has a table for at little cost (8 KiB), and the usual limit of a process"""
_CHUNK = 16 * 1024
_AT_EMPTY_PATH, _STATX_TYPE_INO_BTIME = 0x1000, 0x1 | 0x100 | 0x800
_Buffer = ctypes.c_char * 256
_STATX = struct.Struct("=28xH2xQ40xqI44xII")
"""Of ``struct statx`` (statx(2)): mode, inode, birth in s and ns, device"""

_STATX_FILE = struct.Struct("=32xQ96xII")
"""Inode and device alone"""

_libc = ctypes.PyDLL(None, use_errno=True)
"""The C library, called with the GIL held: for calls that do not block"""
_statx = getattr(_libc, "statx", None)  # Linux alone has it
if _statx is not None:
    _statx.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
_mutex = RLock()
renew_in_child(sys.modules[__name__], _mutex=RLock)
_lost: deque[tuple[str, str]] = deque(maxlen=100)


class Identity(NamedTuple):
    """A file, whatever its names.

    ``born_ns``: an inode is used again when its file is gone; 0 if unknown, and of directories, which have another birth once
    a container's layer is written to (overlayfs).
    """

    device: int
    inode: int
    born_ns: int


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
        self._fd, self.identity = self._open(flags, mode)

    def is_intact(self) -> bool:
        """Return True if the number still is this file."""
        return self._fd >= 0 and _identity(self._fd) == self.identity

    def number(self) -> int:
        """Return the number, right before its use. Raises ``OSError`` where the file is lost."""
        self.restore()
        return self._fd

    def restore(self) -> bool:
        """Open the file again if its number was lost; return True if so.

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
            fd, self._fd = self._fd, -1
            try:
                again, identity = self._open(self._flags)
                if identity != self.identity:
                    _close(again, identity)
                    raise _error(errno.ENOENT)
                self._fd = again
            except OSError as problem:
                if fd >= 0:
                    self._report(problem.strerror or str(problem))
                raise
            self._report("")
        return True

    def copy(self) -> Descriptor:
        """Return another descriptor of the open file. Raises ``OSError``."""
        again = copy(self)
        again._fd = _duplicate(self.number())  # noqa: SLF001  # of this class
        if again._fd < 0:  # noqa: SLF001  # as above
            raise _error(errno.EMFILE)
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

    def _open(self, flags: int, mode: int = 0o600) -> tuple[int, Identity]:
        directory = self._directory.number() if isinstance(self._directory, Descriptor) else self._directory
        fd = os.open(self._path, flags | os.O_CLOEXEC, mode, dir_fd=directory)
        identity = _identity(fd)
        try:
            status = os.stat(self._path, dir_fd=directory, follow_symlinks=not flags & os.O_NOFOLLOW)
        except OSError:  # its name was removed meanwhile
            _close(fd, identity)
            raise
        if identity is None or identity[:2] != (status.st_dev, status.st_ino):
            raise _error(errno.EBADF)  # closed by another thread: the number may be that of its file by now
        moved = _duplicate(fd)
        if moved < 0:
            return fd, identity
        _close(fd, identity)
        if (now := _identity(moved)) != identity:
            _close(moved, now)
            raise _error(errno.EBADF)
        return moved, identity


def take_lost() -> list[tuple[str, str]]:
    """Return the names of the files that were lost since the last call, and why one could not be opened again."""
    return [_lost.popleft() for _ in range(len(_lost))]


def content(path: str) -> bytes:
    """Return what a file of ``/proc`` or ``/sys`` has, whose opening does not block. Raises ``OSError``."""
    device = os.stat(path).st_dev  # noqa: PTH116  # 20 times a second
    fd = _libc.open(os.fsencode(path), os.O_RDONLY | os.O_CLOEXEC)
    if fd < 0:
        raise _error(ctypes.get_errno())
    identity, text = _identity(fd), b""
    if identity is None or identity.device != device:
        raise _error(errno.EBADF)  # closed by now, and the number is that of a file on a disk
    try:
        while chunk := os.pread(fd, _CHUNK, len(text)):  # moves no position, whatever file it is by now
            text += chunk  # the kernel returns lists of records, such as mountinfo, a page at a time
            if _identity(fd) != identity:
                raise _error(errno.EBADF)
    finally:
        _close(fd, identity)
    return text


def _duplicate(fd: int) -> int:
    """Return another number for the file, above those that a program uses; -1 where none is free."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = (_TABLE if limit == resource.RLIM_INFINITY else min(limit, _TABLE)) * 15 // 16
    return int(_libc.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ctypes.c_long(least)))


def _close(fd: int, identity: Identity | None) -> None:
    """Close a descriptor, if it is this file: of the kernel's files, and of a file that stays open.

    It is checked and closed by functions written in C that call each other: between two calls of Python another thread may get
    the GIL, and close the number and open a file with it.
    """
    if identity is None or _statx is None:
        if identity is not None and _identity(fd) == identity:
            _libc.close(fd)
        return
    buffer = _Buffer()
    status = map(_statx, (fd,), (b"",), (_AT_EMPTY_PATH,), (_STATX_TYPE_INO_BTIME,), (buffer,))
    expected = identity.inode, os.major(identity.device), os.minor(identity.device)
    is_same = map(eq, zip(status, map(_STATX_FILE.unpack_from, (buffer,)), strict=False), ((0, expected),))
    deque(map(_libc.close, compress((fd,), is_same)), maxlen=0)


def _identity(fd: int) -> Identity | None:
    """Return which file has this number, with the GIL held where the system allows; ``None`` for none."""
    buffer = _Buffer()
    if _statx is not None and not _statx(fd, b"", _AT_EMPTY_PATH, _STATX_TYPE_INO_BTIME, buffer):
        mode, inode, born_s, born_ns, major, minor = _STATX.unpack_from(buffer)
        born_ns = 0 if stat.S_ISDIR(mode) else born_s * 1_000_000_000 + born_ns
        return Identity(os.makedev(major, minor), inode, born_ns)
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return Identity(status.st_dev, status.st_ino, 0)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
