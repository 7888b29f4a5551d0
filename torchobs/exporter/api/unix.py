"""The Unix socket over which commands are taken: its file's mode, 0660, says who comes in."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.place import find_existing

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig

OFF = "off"
NAME = "exporter.sock"
"""In the flight directory of a node, where the other programs look for it."""

_MODE = 0o660
_BACKLOG = 64


class Bound(NamedTuple):
    """A listening socket and its file."""

    socket: socket.socket
    path: Path
    inode: int


class SocketFile:
    """The socket that an exporter is to have: as set, none for ``off``; of itself a node's has one beside the flight files."""

    def __init__(self, config: ExporterConfig) -> None:
        self._config = config
        self._bound: Bound | None = None
        self.wanted = config.api_socket != OFF and (config.api_socket is not None or config.mode == "node")
        """Whether there is to be one, and is none yet"""

    def bind(self) -> socket.socket | None:
        """Return the listening socket; ``None`` while there is no place for it. Raises ``OSError``."""
        path = self._path()
        if path is None:
            return None
        self._bound, self.wanted = bind(path), False
        return self._bound.socket

    def close(self) -> None:
        """Remove the file. Idempotent."""
        bound, self._bound = self._bound, None
        if bound is not None:
            unbind(bound)

    def _path(self) -> Path | None:
        if self._config.api_socket is not None:
            return Path(self._config.api_socket)
        directory = find_existing(self._config.flight_dir, self._config.runtime_dir)
        return None if directory is None else Path(directory) / NAME


def bind(path: Path) -> Bound:
    """Listen on that path, in the place of a socket that somebody has left there. Raises ``OSError``.

    Bound under another name and then renamed: at no moment can anybody come in whom the mode keeps out. By way of the
    directory's descriptor: the kernel takes no path of more than 107 bytes.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is there, and is no socket")
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = f".{NAME}-{token_hex(8)}"
    try:
        listening.bind(f"/proc/self/fd/{directory_fd}/{temporary}")
        os.chmod(temporary, _MODE, dir_fd=directory_fd)
        inode = os.stat(temporary, dir_fd=directory_fd, follow_symlinks=False).st_ino
        listening.listen(_BACKLOG)
        os.rename(temporary, path.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        return Bound(listening, path, inode)
    except OSError:
        listening.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory_fd)
        raise
    finally:
        os.close(directory_fd)


def unbind(bound: Bound) -> None:
    """Remove the file, unless it is another's by now."""
    with contextlib.suppress(OSError):
        if bound.path.lstat().st_ino == bound.inode:
            bound.path.unlink()


def connect(path: Path) -> socket.socket:
    """Connect to the socket with that path, however long it is. Raises ``OSError``."""
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(f"/proc/self/fd/{directory_fd}/{path.name}")
        return connected
    except OSError:
        connected.close()
        raise
    finally:
        os.close(directory_fd)
