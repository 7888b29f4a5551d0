"""Unix sockets that the exporter listens on: made under their name at once with the right mode, taken over, given up.

Whoever begins to listen takes a name only when nobody listens there any more, and whoever ends takes only its own away, before
it stops listening: so that of an exporter that leaves and one that comes after it (the next of a node, a pod's restarted
sidecar) the one never takes the other's name, in whatever order they do it. The second of two tries again, and has it then.
"""

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
    from collections.abc import Iterator

MODE = 0o660
"""Its owner and its group may ask; that is all the guard it has, and needs."""

PREFIX = "unix:"
TEMPORARY = ".torchobs-"
"""Beginning of the name under which a socket is made."""

_BACKLOG = 512
_ADDRESS_BYTES = 107
"""What ``sockaddr_un`` holds, unix(7); a longer path goes by way of a descriptor."""


class UnixAddress(NamedTuple):
    """Where a Unix socket is."""

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
        """Listen under a name that appears when its mode is right and somebody listens. Raises ``OSError``."""
        temporary = f"{TEMPORARY}{token_hex(8)}"
        try:
            self._bind_to(path.with_name(temporary), directory_fd)
            os.chmod(temporary, MODE, dir_fd=directory_fd)
            self.listen(_BACKLOG)
            self._path, self._inode = path, _identity(os.stat(temporary, dir_fd=directory_fd, follow_symlinks=False))
            _take(temporary, path, directory_fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory_fd)

    def _bind_to(self, path: Path, directory_fd: int) -> None:
        # the name itself is short, its directory need not be
        self.bind(os.fspath(path) if _fits(path) else f"/proc/self/fd/{directory_fd}/{path.name}")

    @property
    def is_named(self) -> bool:
        """Whether its name still leads to it: the directory may be another by now, or somebody tidy was there."""
        try:
            return _identity(self._path.lstat()) == self._inode
        except OSError as problem:
            return problem.errno not in {errno.ENOENT, errno.ENOTDIR}  # else nobody can tell at present

    def remove(self) -> None:
        """Take the name away, unless it is another's by now. Idempotent; to be called while it still listens."""
        with contextlib.suppress(OSError):
            if _identity(self._path.lstat()) == self._inode:
                self._path.unlink()


def bind_unix(path: Path) -> UnixSocket:
    """Return a socket that listens on that path, in the place of one that nobody listens on any more.

    Raises ``OSError``: somebody listens there, the name belongs to something else, or it cannot be made.
    """
    made = UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _directory_of(path) as directory_fd:
            made.listen_at(path, directory_fd)
    except OSError:
        made.close()
        raise
    return made


def connect(path: Path) -> socket.socket:
    """Connect to the socket with that path, however long it is. Raises ``OSError``."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(connected, path)
    except OSError:
        connected.close()
        raise
    return connected


def _take(temporary: str, path: Path, directory_fd: int) -> None:
    """Give a listening socket its name. A link and no rename: that would replace whatever came there meanwhile."""
    with contextlib.suppress(FileExistsError):
        _link(temporary, path.name, directory_fd)
        return
    stale = _require_stale(path, directory_fd)
    with contextlib.suppress(FileNotFoundError):
        if _identity(os.stat(path.name, dir_fd=directory_fd, follow_symlinks=False)) == stale:
            os.unlink(path.name, dir_fd=directory_fd)
    try:
        _link(temporary, path.name, directory_fd)
    except FileExistsError:
        raise _in_use() from None  # another exporter was faster


def _link(temporary: str, name: str, directory_fd: int) -> None:
    os.link(temporary, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=False)


def _require_stale(path: Path, directory_fd: int) -> tuple[int, int]:
    """Return which socket it is that nobody listens on. Raises ``OSError`` for one that somebody does, and for other things."""
    try:
        status = os.stat(path.name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return 0, 0  # gone since
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(errno.EEXIST, "there is something that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # noqa: FBT003  # one that is stopped, with a full backlog, is EAGAIN and not a wait
        try:
            _connect(asking, path)
        except (ConnectionRefusedError, FileNotFoundError):
            return _identity(status)  # nobody listens: what a killed exporter left behind
        except PermissionError:
            raise
        except OSError as problem:
            raise _in_use() from problem
    raise _in_use()


def _in_use() -> OSError:
    return OSError(errno.EADDRINUSE, "another process listens there")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _directory_of(path: Path) -> Iterator[int]:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


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
