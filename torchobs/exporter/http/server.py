"""Listening sockets of the exporter, and a uvicorn server for each."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from torchobs.config.option_types import Address
from torchobs.exporter.http.protocol import HttpProtocol, chunked_writes

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Mapping

    from starlette.types import ASGIApp

    from torchobs.exporter.http.connection_limits import Connections
    from torchobs.exporter.http.unix_socket import UnixSocket

KEEP_ALIVE_S = 75
"""Keep-alive timeout; longer than the usual scrape intervals, so that scrapers reuse their connections."""

NEXT_PORTS = 100
_BACKLOG = 512
_FILES = 65_536
_FIRST_FD = 3
"""SD_LISTEN_FDS_START"""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def allow_files() -> None:
    """Raise the soft limit of open files: every flight file and every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(address: Address) -> socket.socket:
    """Return a listening socket; an empty host means all interfaces, IPv4 and IPv6. Raises ``OSError``."""
    if address.host:
        try:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        except UnicodeError as problem:  # a host name with an empty or too long label is never looked up
            raise OSError(errno.EINVAL, "that is no host name") from problem
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", address.port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as problem:
            if problem.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise  # otherwise IPv6 is compiled in, but disabled, as in many pods
    return socket.create_server(("0.0.0.0", address.port), backlog=_BACKLOG)  # noqa: S104  # all interfaces were asked for


def bind_near(address: Address) -> socket.socket:
    """Return a listening socket on the address, or on the first free of the next 100 ports. Raises ``OSError``."""
    last = min(address.port + NEXT_PORTS, 65535) if address.port else 0
    for port in range(address.port, last):
        try:
            return bind(Address(address.host, port))
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
    return bind(Address(address.host, last))


def systemd_sockets(environ: Mapping[str, str], pid: int) -> tuple[socket.socket, ...]:
    """Return the sockets that systemd passed to this process, sd_listen_fds(3).

    Raises ``OSError``: there is none, or one is not listening.
    """
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(pid) or not count.isdecimal() or not 0 < int(count) < os.sysconf("SC_OPEN_MAX"):
        raise OSError(errno.ENOENT, "systemd has given no socket: it does so to a service with a .socket unit")
    return tuple(_systemd_socket(fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count)))


def _systemd_socket(fd: int) -> socket.socket:
    made = socket.socket(fileno=fd)
    made.set_inheritable(False)
    if made.type != socket.SOCK_STREAM or not made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError(errno.EINVAL, f"the file descriptor {fd} is no socket that listens for streams")
    return made


class UnixSocketWatch:
    """Detects listening sockets whose file was removed or replaced. To be used in one event loop."""

    def __init__(self) -> None:
        self._looking: asyncio.Future[list[UnixSocket]] | None = None

    def lost(self, bound: Iterable[UnixSocket]) -> list[UnixSocket]:
        """Return the sockets without a path as of the last check, and start the next check. Returns at once.

        Checks run in a thread, so that a hanging file system blocks nothing else.
        """
        if self._looking is not None and not self._looking.done():
            return []
        found = self._looking.result() if self._looking is not None else []
        sockets = list(bound)
        loop = asyncio.get_running_loop()
        self._looking = loop.run_in_executor(None, lambda: [one for one in sockets if not one.is_named])
        return found


async def serve_on(
    bound: socket.socket, app: ASGIApp, connections: Connections, context: ssl.SSLContext | None = None
) -> uvicorn.Server:
    """Start a server on a socket. The caller calls its ``on_tick`` every second, and its ``shutdown`` at the end."""
    config = uvicorn.Config(
        chunked_writes(app),
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        backlog=_BACKLOG,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # no TLS by uvicorn, see ``protocol``; uvicorn passes arguments that the server object has, too
    config.http_protocol_class = cast("Any", lambda **_: HttpProtocol(server, connections, context))
    await server.on_tick(0)  # sets the Date header
    asyncio.get_running_loop().set_exception_handler(_handler(connections))
    await server.startup(sockets=[bound])
    return server


def _handler(connections: Connections) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return an asyncio exception handler that frees connections when accepting one failed for want of resources."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if isinstance(problem, OSError) and problem.errno in _EXHAUSTED and "socket" in context:
            connections.exhausted(problem, time.monotonic())
        else:
            loop.default_exception_handler(context)

    return handle


async def retire(server: uvicorn.Server) -> None:
    """Stop accepting, and close idle connections. Requests that have begun, and first requests, are still answered."""
    loop = asyncio.get_running_loop()
    for bound in (bound for listening in server.servers for bound in listening.sockets):
        loop.remove_reader(bound)
    # asyncio makes the transport of an accepted connection a turn of the loop later, and fails if its server is closed by then
    await asyncio.sleep(0)
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        cast("HttpProtocol", connection).finish()
