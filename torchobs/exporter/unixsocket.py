"""Sockets that are not a port: a Unix socket of our own, and those that systemd has opened for us."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MODE = 0o660
"""Its owner and its group may ask; that is all the guard it has, and needs."""

PREFIX = "unix:"
_BACKLOG = 512
_LONGEST = 107 - 10
"""Linux's limit of 107 bytes, less what the temporary name has more."""
_FIRST_FD = 3
"""SD_LISTEN_FDS_START, sd_listen_fds(3)."""


class UnixAddress(NamedTuple):
    """Where a Unix socket is."""

    path: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.path}"


def unix_address_of(text: str) -> UnixAddress:
    """Return the address for ``unix:/path``. Raises ``ValueError``."""
    path = text.removeprefix(PREFIX)
    if path == text or not path.startswith("/") or path.endswith("/") or "\0" in path or len(os.fsencode(path)) > _LONGEST:
        raise ValueError(text)
    return UnixAddress(path)


class UnixSocket(socket.socket):
    """A listening Unix socket that knows its name."""

    __slots__ = ("_inode", "_path")

    def listen_at(self, path: Path) -> None:
        """Listen under a name that appears when its mode is right, in the place of one that nobody listens on any more."""
        temporary = path.with_name(f".{token_hex(4)}-")
        try:
            self.bind(os.fspath(temporary))
            temporary.chmod(MODE)
            self.listen(_BACKLOG)
            status = temporary.lstat()
            self._path, self._inode = path, (status.st_dev, status.st_ino)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Take the name away, unless it is another's by now. Idempotent."""
        with contextlib.suppress(OSError):
            status = self._path.lstat()
            if (status.st_dev, status.st_ino) == self._inode:
                self._path.unlink()


def bind_unix(address: UnixAddress) -> UnixSocket:
    """Return a listening Unix socket. Raises ``OSError``: someone listens there, or the name is no socket's."""
    path = Path(address.path)
    _require_stale(path)
    made = UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.listen_at(path)
    except OSError:
        made.close()
        raise
    return made


def inherited(environ: Mapping[str, str], pid: int) -> tuple[socket.socket, ...]:
    """Return the sockets that systemd has opened for this process. Raises ``OSError``: there is none, or one is no listener."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(pid) or not count.isdecimal() or not 0 < int(count) < os.sysconf("SC_OPEN_MAX"):
        raise OSError(errno.ENOENT, "systemd has given no socket: it does so to a service with a .socket unit")
    return tuple(_listener(fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count)))


def _listener(fd: int) -> socket.socket:
    made = socket.socket(fileno=fd)
    made.set_inheritable(False)
    if made.type != socket.SOCK_STREAM or not made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError(errno.EINVAL, f"the file descriptor {fd} is no socket that listens for streams")
    return made


def _require_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(errno.EEXIST, "there is something that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(os.fspath(path))
        except ConnectionRefusedError:
            return  # nobody listens: what a killed exporter left behind
    raise OSError(errno.EADDRINUSE, "another process listens there")
