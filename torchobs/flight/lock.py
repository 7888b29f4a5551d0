"""Liveness of a rank: a POSIX record lock on a sibling ``.lock`` file, which the kernel releases when the process ends.

A record lock is dropped by ANY close of the locked file in its process, so this process must not open that file again
(:func:`held_here` checks that). A program that closes our descriptor drops it, too: it is taken again within a round of the
sampler, and a rank that beats is alive meanwhile. It is not inherited by fork, unlike an OFD lock, which survives in forked
workers. It is probed by ``F_GETLK`` through a read-only descriptor, which works across containers, users and PID namespaces.

A mutex makes check and open atomic: a thread that found the lock not held here, and opened the file after another thread
had taken it, would drop it by closing. It is reentrant, for a signal handler may check too; no training step takes it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from threading import RLock
from typing import TYPE_CHECKING

from torchobs.flight import entries
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from torchobs.support.descriptors import Descriptor

_LINUX = sys.platform == "linux"
# struct flock: Linux 64-bit has type, whence, start, len, pid; macOS has start, len, pid, type, whence.
_FLOCK = struct.Struct("@hhqqi4x" if _LINUX else "@qqihh")
_held: set[tuple[int, int]] = set()
_mutex = RLock()


def _forget() -> None:
    """In a forked child: it holds no lock."""
    _held.clear()


os.register_at_fork(after_in_child=_forget)
renew_in_child(sys.modules[__name__], _mutex=RLock)


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0) if _LINUX else _FLOCK.pack(0, 0, 0, kind, os.SEEK_SET)


def _pid(raw: bytes) -> int:
    return int(_FLOCK.unpack(raw)[4 if _LINUX else 2])


def _kind(raw: bytes) -> int:
    fields = _FLOCK.unpack(raw)
    return int(fields[0] if _LINUX else fields[3])


def take(file: Descriptor) -> None:
    """Lock the writable file until it is closed. Raises ``OSError`` when another process has it.

    A program that closes our descriptor drops the lock: then it is to be taken again (:meth:`Descriptor.restore`).
    """
    with _mutex:
        fcntl.fcntl(file.number(), fcntl.F_SETLK, _flock(fcntl.F_WRLCK))
        _held.add(file.identity[:2])


def release(file: Descriptor) -> None:
    """Close the file and so drop its lock."""
    with _mutex:
        _held.discard(file.identity[:2])
        file.close()


def held_here(directory_fd: int, name: str) -> bool:
    """Return True if this process holds the lock on that name, without opening it. Raises ``OSError`` if it is gone."""
    return _identity(os.stat(name, dir_fd=directory_fd, follow_symlinks=False)) in _held


def is_held(directory_fd: int, name: str) -> bool:
    """Return True if a living process, this one or another, holds the lock on that name.

    Raises ``OSError`` if it cannot be opened.
    """
    with _mutex:
        if held_here(directory_fd, name):
            return True
        return _kind(_probe(directory_fd, name)) != fcntl.F_UNLCK


def content(directory_fd: int, name: str, size: int) -> bytes:
    """Return the first bytes of a lock file, of which this process may not hold the lock; empty if it does.

    Raises ``OSError`` if it cannot be opened.
    """
    with _mutex:
        if held_here(directory_fd, name):
            return b""
        fd = os.open(name, entries.READ, dir_fd=directory_fd)
        try:
            return os.read(fd, size)
        finally:
            os.close(fd)


def _probe(directory_fd: int, name: str) -> bytes:
    """Query the lock of a file that this process has not locked (the close below would drop it). Call with the mutex held."""
    fd = os.open(name, entries.READ, dir_fd=directory_fd)
    try:
        return fcntl.fcntl(fd, fcntl.F_GETLK, _flock(fcntl.F_WRLCK))
    finally:
        os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
