"""Create and remove listening Unix sockets; their file appears with the right mode from the start.

A socket's file that nobody listens behind, as a killed exporter leaves it, is replaced. A stopping exporter removes only its
own file, before it stops listening, so that it never removes that of its successor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from torchobs.flight.files.location import opened

MODE = 0o660
"""Access for the owner and the group; these permissions are the socket's only access control."""

PREFIX = "unix:"
TEMPORARY = ".torchobs-"
"""Prefix of the temporary name under which a socket is created."""

_BACKLOG = 512
_ADDRESS_BYTES = 107
"""Longest path in ``sockaddr_un``, unix(7); a longer one is reached by a descriptor of its directory."""


class UnixAddress(NamedTuple):
    """The path of a Unix socket."""

    path: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.path}"


def unix_address_of(text: str) -> UnixAddress:
    """Return the address for ``unix:/path``. Raises ``ValueError``."""
    path = text.removeprefix(PREFIX)
    if path == text or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError(text)
    return UnixAddress(path)


class UnixSocket(socket.socket):
    """A listening Unix socket that knows its name. Use :func:`bind_unix`."""

    __slots__ = ("_inode", "_path")

    def listen_at(self, path: Path, directory_fd: int) -> None:
        """Listen at ``path``; its file appears once the mode is set and the socket listens. Raises ``OSError``."""
        temporary = f"{TEMPORARY}{token_hex(8)}"
        beside = path.with_name(temporary)
        try:
            self.bind(os.fspath(beside) if _fits(beside) else f"/proc/self/fd/{directory_fd}/{temporary}")
            os.chmod(temporary, MODE, dir_fd=directory_fd)
            self.listen(_BACKLOG)
            self._path, self._inode = path, _identity(os.stat(temporary, dir_fd=directory_fd, follow_symlinks=False))
            _require_free(path)
            os.rename(temporary, path.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory_fd)

    @property
    def is_named(self) -> bool:
        """True if its path still leads to this socket: the file or its directory may have been removed or replaced."""
        try:
            return _identity(self._path.lstat()) == self._inode
        except OSError as problem:
            return problem.errno not in {errno.ENOENT, errno.ENOTDIR}  # other errors: unknown at present

    def remove(self) -> None:
        """Remove the file, unless it is another socket's by now. Idempotent; call it while the socket still listens."""
        with contextlib.suppress(OSError):
            if _identity(self._path.lstat()) == self._inode:
                self._path.unlink()


def bind_unix(path: Path) -> UnixSocket:
    """Return a socket listening on ``path``; a stale socket file there is replaced.

    Raises ``OSError``: another process listens there, the path is no socket, or it cannot be created.
    """
    made = UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with opened(path.parent, link=True) as directory_fd:
            made.listen_at(path, directory_fd)
    except OSError:
        made.close()
        raise
    return made


def connect(path: Path) -> socket.socket:
    """Connect to a Unix socket with a path of any length. Raises ``OSError``."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(connected, path)
    except OSError:
        connected.close()
        raise
    return connected


def _require_free(path: Path) -> None:
    """Raise ``OSError`` if something listens at ``path``, or if there is something that is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is something that is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)  # noqa: FBT003  # a stopped process with a full backlog gives EAGAIN instead of blocking
            _connect(asking, path)
    except BlockingIOError:
        pass
    except (ConnectionRefusedError, FileNotFoundError):
        return  # nobody listens: left by a killed exporter
    raise OSError(errno.EADDRINUSE, "another process listens there")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _connect(connecting: socket.socket, path: Path) -> None:
    if _fits(path):
        connecting.connect(os.fspath(path))
        return
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        connecting.connect(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _ADDRESS_BYTES
