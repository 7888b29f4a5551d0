"""Elects the exporter of a flight directory, which announces its address there.

Two orders make sure that no rank is left without an exporter: a rank publishes its flight file, THEN checks the lock; a
leaving exporter releases the lock, THEN checks for living ranks once more. So either the rank finds a free lock and starts an
exporter, or the leaving exporter sees the rank and stays. A record lock rather than ``flock``, which can only be probed by
taking it, so that a candidate would take the probe for a winner.

A killed exporter leaves its announcement, ``exporter.json``, behind, so readers must check the lock as well: :func:`read` does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from typing import NamedTuple

from torchobs._version import __version__
from torchobs.flight import files
from torchobs.support.descriptors import Descriptor

LOCK = "exporter.lock"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


def is_decided(directory_fd: int) -> bool:
    """Return whether the directory has an exporter. Raises ``OSError`` if its lock belongs to another user."""
    return files.is_locked(directory_fd, LOCK)


def anyone_alive(directory_fd: int) -> bool:
    """Return whether a rank with a flight file in the directory is alive. Raises ``OSError`` if the directory is gone."""
    from torchobs.flight import reader
    from torchobs.flight.files import lock_name  # none is needed by a process that loses the election
    from torchobs.flight.layout import BadFlightFileError

    for name in reader.names(directory_fd):
        with contextlib.suppress(OSError):  # the lock file was cleaned up, so nobody holds it
            if files.is_locked(directory_fd, lock_name(name)):
                return True
        # a program that closes descriptors which are not its own drops the lock, but its heartbeat goes on
        with contextlib.suppress(OSError, BadFlightFileError), contextlib.closing(reader.open_file(directory_fd, name)) as file:
            if file.is_beating(time.monotonic_ns()):
                return True
    return False


class Election:
    """This process's candidacy for a directory; at most one per directory and process (:mod:`torchobs.flight.files`)."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._file: Descriptor | None = None

    def win(self) -> bool:
        """Try to become the exporter; return True on success. Raises ``OSError`` if the lock file cannot be opened."""
        while not self.holds():
            self.release()  # the name was removed or now belongs to another file
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = Descriptor("election", LOCK, flags, directory=self._directory_fd)
            try:
                files.lock(file)
            except OSError as problem:
                file.close()
                if problem.errno in _HELD_BY_ANOTHER:
                    return False
                raise
            self._file = file
        return True

    def holds(self) -> bool:
        """Return whether this process is still the exporter: the directory or the lock's name may have been removed."""
        if self._file is None or not self._file.is_intact():
            return False
        try:
            return files.inode(self._directory_fd, LOCK) == self._file.identity.inode
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            files.unlock(file)


NAME = "exporter.json"
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # addresses to connect to, not to bind
_MAX_SIZE = 4096


class Announcement(NamedTuple):
    """An exporter and its address, ``host:port``; ``started``: Unix time in seconds."""

    pid: int
    address: str
    url: str
    started: float
    version: str


def announce(directory_fd: int, address: str, *, tls: bool = False) -> Announcement:
    """Atomically publish that this process listens on ``address``. Raises ``OSError``."""
    announced = Announcement(os.getpid(), address, url(address, tls=tls), time.time(), __version__)
    files.replace(directory_fd, NAME, json.dumps(announced._asdict()).encode() + b"\n", 0o600)
    return announced


def withdraw(directory_fd: int) -> None:
    """Remove the announcement. Only for the exporter while it holds the lock: afterwards the file is its successor's."""
    with contextlib.suppress(OSError):
        os.unlink(NAME, dir_fd=directory_fd)


def read(directory_fd: int) -> Announcement | None:
    """Return the announcement of the directory's exporter; ``None`` if there is none, or none that listens yet."""
    try:
        fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
        with open(fd, encoding="utf-8") as file:
            announcement = Announcement(**json.loads(file.read(_MAX_SIZE)))
        return announcement if is_decided(directory_fd) else None
    except (OSError, TypeError, ValueError):
        return None


def url(address: str, *, tls: bool = False) -> str:
    """Return the URL under which this machine reaches ``address``."""
    host, _, port = address.rpartition(":")
    return f"http{'s' if tls else ''}://{_LOOPBACK.get(host, host)}:{port}/"
