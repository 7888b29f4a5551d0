"""Elects the exporter of a flight directory: the process that holds the record lock on its ``exporter.lock``.

Two orders make sure that no rank is left without an exporter: a rank publishes its flight file, THEN checks the lock; a
leaving exporter releases the lock, THEN checks for living ranks once more. So either the rank finds a free lock and starts an
exporter, or the leaving exporter sees the rank and stays. A record lock rather than ``flock``, which can only be probed by
taking it, so that a candidate would take the probe for a winner.
"""

from __future__ import annotations

import contextlib
import errno
import os

from torchobs.flight.files import lock

LOCK = "exporter.lock"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


def is_decided(directory_fd: int) -> bool:
    """Return True if the directory has an exporter. Raises ``OSError`` if its lock belongs to another user."""
    try:
        return lock.is_held(directory_fd, LOCK)
    except FileNotFoundError:
        return False


def anyone_alive(directory_fd: int) -> bool:
    """Return True if a rank with a flight file in the directory is alive. Raises ``OSError`` if the directory is gone."""
    from torchobs.flight.files.create import lock_name  # neither is needed by a process that loses the election
    from torchobs.flight.reader import reader

    for name in reader.names(directory_fd):
        with contextlib.suppress(OSError):  # the lock file was cleaned up, so nobody holds it
            if lock.is_held(directory_fd, lock_name(name)):
                return True
    return False


class Election:
    """This process's candidacy for a directory; at most one per directory and process (:mod:`torchobs.flight.files.lock`)."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._fd = -1

    def win(self) -> bool:
        """Try to become the exporter; return True on success. Raises ``OSError`` if the lock file cannot be opened."""
        while not self.holds():
            self.release()  # the name was removed or now belongs to another file
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(LOCK, flags, 0o600, dir_fd=self._directory_fd)
            try:
                lock.take(fd)
            except OSError as problem:
                os.close(fd)
                if problem.errno in _HELD_BY_ANOTHER:
                    return False
                raise
            self._fd = fd
        return True

    def holds(self) -> bool:
        """Return True if this process is still the exporter: the directory or the lock's name may have been removed."""
        if self._fd < 0:
            return False
        try:
            named = os.stat(LOCK, dir_fd=self._directory_fd, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def release(self) -> None:
        """Release the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            lock.release(fd)
