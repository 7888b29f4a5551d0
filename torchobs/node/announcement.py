"""``exporter.json`` in the flight directory: the exporter's address, for people and other programs.

A killed exporter leaves the file behind, so readers must check the lock as well: :func:`read` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from secrets import token_hex
from typing import NamedTuple

from torchobs._version import __version__
from torchobs.node.election import is_decided

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
    temporary = f".{NAME}-{token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(announced._asdict()) + "\n")
        os.rename(temporary, NAME, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except OSError:
        os.unlink(temporary, dir_fd=directory_fd)
        raise
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
            found = Announcement(**json.loads(file.read(_MAX_SIZE)))
        return found if is_decided(directory_fd) else None
    except (OSError, TypeError, ValueError):
        return None


def url(address: str, *, tls: bool = False) -> str:
    """Return the URL under which this machine reaches ``address``."""
    host, _, port = address.rpartition(":")
    return f"http{'s' if tls else ''}://{_LOOPBACK.get(host, host)}:{port}/"
