"""Sockets passed by systemd (socket activation), sd_listen_fds(3)."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_FD = 3
"""SD_LISTEN_FDS_START"""


def inherited(environ: Mapping[str, str], pid: int) -> tuple[socket.socket, ...]:
    """Return the sockets passed to this process. Raises ``OSError``: there is none, or one is not listening."""
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
