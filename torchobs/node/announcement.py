"""``exporter.json`` in the flight directory: where its exporter listens, for people and for the other programs.

A killed exporter leaves the file behind, so that whoever reads it asks the lock as well: :func:`read` does.
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
_EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # what to dial, not to bind
_LONGEST = 4096


class Announcement(NamedTuple):
    """An exporter and its address, ``host:port``; ``started`` is Unix time in seconds."""

    pid: int
    address: str
    url: str
    started: float
    version: str


def announce(directory_fd: int, address: str) -> Announcement:
    """Write that this process listens on ``address``, at once and as a whole. Raises ``OSError``."""
    made = Announcement(os.getpid(), address, url(address), time.time(), __version__)
    temporary = f".{NAME}-{token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(made._asdict()) + "\n")
        os.rename(temporary, NAME, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except OSError:
        os.unlink(temporary, dir_fd=directory_fd)
        raise
    return made


def withdraw(directory_fd: int) -> None:
    """Remove the announcement. Only the exporter may, while it holds the lock: afterwards the file is its successor's."""
    with contextlib.suppress(OSError):
        os.unlink(NAME, dir_fd=directory_fd)


def read(directory_fd: int) -> Announcement | None:
    """Return what the directory's exporter announced; ``None`` if there is none, or none that listens yet."""
    try:
        fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
        with open(fd, encoding="utf-8") as file:
            found = Announcement(**json.loads(file.read(_LONGEST)))
        return found if is_decided(directory_fd) else None
    except (OSError, TypeError, ValueError):
        return None


def url(address: str) -> str:
    """Return what a person on this machine types to see what is served on ``address``."""
    host, _, port = address.rpartition(":")
    return f"http://{_EVERYWHERE.get(host, host)}:{port}/"
