"""Who is the exporter of a flight directory: whoever holds the record lock on ``exporter.lock`` in it.

Nobody is left without one because of two orders. A rank publishes its flight file, THEN looks at the lock. An exporter that
leaves releases the lock, THEN looks for living ranks once more. So either the rank sees a free lock and starts an exporter,
or the leaving exporter sees the rank and stays. A record lock and no ``flock``: that could only be probed by taking it, and
a process that stands for election at that moment would take the probe for a winner.
"""

from __future__ import annotations

import errno
import os

from torchobs.flight.files import lock

LOCK = "exporter.lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)


def open_directory(flight_dir: str) -> int:
    """Open a flight directory; a symbolic link is refused. Raises ``OSError``."""
    return os.open(flight_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def is_decided(directory_fd: int) -> bool:
    """Return True if the directory has an exporter. Raises ``OSError`` if its lock belongs to another user."""
    try:
        return lock.is_held(directory_fd, LOCK)
    except FileNotFoundError:
        return False


def anyone_alive(directory_fd: int) -> bool:
    """Return True if a rank that has published a flight file in the directory lives. Raises ``OSError`` if it is gone."""
    from torchobs.flight.reader import reader  # which whoever loses does not need

    return any(_alive(directory_fd, name) for name in reader.names(directory_fd))


class Election:
    """This process's candidacy for a directory: one per directory and process at most (:mod:`torchobs.flight.files.lock`)."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._fd = -1

    def win(self) -> bool:
        """Stand for election; tell whether this process is the exporter now. Raises ``OSError`` if it cannot stand."""
        while not self.holds():
            self.release()  # the name is gone since, or is another file's
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(LOCK, flags, 0o600, dir_fd=self._directory_fd)
            try:
                lock.take(fd)
            except OSError as problem:
                os.close(fd)
                if problem.errno in _TAKEN:
                    return False
                raise
            self._fd = fd
        return True

    def holds(self) -> bool:
        """Return True if this process is the exporter still: somebody may have removed the directory or the lock's name."""
        if self._fd < 0:
            return False
        try:
            named = os.stat(LOCK, dir_fd=self._directory_fd, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def release(self) -> None:
        """Be the exporter no longer. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            lock.release(fd)


def _alive(directory_fd: int, name: str) -> bool:
    from torchobs.flight.reader import reader

    try:
        return lock.is_held(directory_fd, reader.lock_of(name))
    except OSError:
        return False  # its lock was cleaned away: nobody holds it
