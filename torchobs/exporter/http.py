"""The exporter's listeners: on its addresses, and on the API's own Unix socket, with one uvicorn server for all of them.

What cannot be opened is tried again, and new certificates are used at once. A stopping exporter removes the file of its own
Unix socket only, before it stops listening, so that it never removes that of its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import stat
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchobs.config.options import Address
from torchobs.exporter import access
from torchobs.exporter.config import UnixAddress

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from starlette.types import ASGIApp
    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.web_config import WebConfigMiddleware

HEAD_S = 10.0
"""Time limit of a TLS handshake, and of the first request's head, which Prometheus sends in one packet."""

MOST_CONNECTIONS = 512
"""Most connections by the network, and as many by Unix sockets: more than any number of scrapers and people"""

MOST_HEAD = 16 * 1024
"""Most bytes of a request's head."""

MOST_REQUEST = 128 * 1024
"""Most bytes of a request as sent: twice the body that the API accepts, chunked."""

KEEP_ALIVE_S = 75
"""Keep-alive timeout; longer than the usual scrape intervals, so that scrapers reuse their connections."""

RETRY_S = 5.0
"""Pause before listening is tried again."""

MODE = 0o660
"""Access to a Unix socket for the owner and the group; these permissions are its only access control."""

NEXT_PORTS = 100
_BACKLOG = 512
_FILES = 65_536
_SHARE_OF_DESCRIPTORS = 4
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_GOOD_NEWS = {"good_news": True}
_log = logging.getLogger(__name__)


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


class UnixSocket(socket.socket):
    """A listening Unix socket. Use :func:`bind_unix`."""

    __slots__ = ("inode",)
    inode: tuple[int, int]

    def remove(self) -> None:
        """Remove the file, unless it is another socket's by now. Idempotent; call it while the socket still listens."""
        path = Path(self.getsockname())
        with contextlib.suppress(OSError):
            if _inode(path) == self.inode:
                path.unlink()


def bind_unix(path: Path) -> UnixSocket:
    """Return a socket listening on ``path``, for the owner and the group from the start.

    The file that a killed exporter has left there is replaced. Raises ``OSError``: another process listens there, the path is
    no socket, or it cannot be created.
    """
    _make_free(path)
    listening, before = UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM), os.umask(0o777 - MODE)
    try:
        listening.bind(os.fspath(path))
        listening.inode = _inode(path)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _make_free(path: Path) -> None:
    """Remove the file of a socket without a listener. Raises ``OSError`` if it has one, or is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is something that is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)  # noqa: FBT003  # a stopped process with a full backlog gives EAGAIN instead of blocking
            asking.connect(os.fspath(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink()
        return
    except BlockingIOError:
        pass
    raise OSError(errno.EADDRINUSE, "another process listens there")


def _inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


class HttpProtocol(H11Protocol):
    """One connection: uvicorn's, with a time limit for the first request's head, and a cap on connections.

    uvicorn waits for ever, and its ``limit_concurrency`` answers 503 to the newest client, which would be the scraper among a
    thousand silent connections. Here the oldest connection without a request makes room, else the one that has been idle
    longest after a response, and only then one with a response under way, which the live page's streams always have.
    """

    def __init__(self, server: Listeners, app: ASGIApp) -> None:
        super().__init__(server.config, server.server_state, {})
        self.app = cast("ASGI3Application", app)
        self._recent = server.recent
        self._received = 0
        """bytes of the present request"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        # not at the listening socket, which clients may reach before it is set: a page's end would wait 40 ms for an ACK
        accepted = transport.get_extra_info("socket")
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._recent[self] = None
        rivals = [other for other in self._recent if other.app is self.app]
        if len(rivals) > _most_connections():
            oldest = min(rivals[:-1], key=HttpProtocol._progress)
            del self._recent[oldest]
            oldest.transport.abort()
        self.loop.call_later(HEAD_S, self._expire)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._received += len(data)
        if self._received > MOST_REQUEST:  # before it is parsed: h11 takes 10 µs for each chunk of a body, however short
            self.transport.abort()
        else:
            super().data_received(data)

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._received = 0
        super().on_response_complete()
        self._recent.pop(self, None)
        self._recent[self] = None

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP; just close the connection if a response has begun, where uvicorn would raise."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # uvicorn then discards what the application sends
            cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._recent.pop(self, None)
        super().connection_lost(exc)

    def _expire(self) -> None:
        if not self._progress():
            self.transport.abort()

    def _progress(self) -> int:
        """Return 0 before the first request, 1 between two requests, 2 while a response is under way."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return 0 if cycle is None else 1 if cycle.response_complete else 2


def _most_connections() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, max(8, most // _SHARE_OF_DESCRIPTORS))


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log that connections cannot be accepted in one line; asyncio reports it for each one in the kernel's queue."""
    problem = context.get("exception")
    if isinstance(problem, OSError) and problem.errno in _EXHAUSTED and "socket" in context:
        _log.error("cannot accept connections: %s", problem.strerror)
    else:
        loop.default_exception_handler(context)


class Listeners(uvicorn.Server):
    """Listens as configured. To be used in one event loop.

    ``announce`` is called with the first address, ``host:port``, and whether it has TLS; again when that changes.
    """

    def __init__(
        self,
        config: ExporterConfig,
        web_config: WebConfigMiddleware,
        app: ASGIApp,
        commanded: ASGIApp | None,
        announce: Callable[[str, bool], None] | None,
    ) -> None:
        """``app``: the application without authentication, which ``web_config`` adds where it is reached by the network.

        ``commanded``: that of the API's own Unix socket; ``None``: there is no such socket.
        """
        settings = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=MOST_HEAD,
        )
        settings.load()
        super().__init__(settings)
        self.lifespan = settings.lifespan_class(settings)
        self.recent: dict[HttpProtocol, None] = {}
        """the connections; first the one that came, or got its last response, the longest ago"""
        self.problems: tuple[str, ...] = ()
        """problems: why it does not listen as configured"""
        self.unannounced = 0
        self._config, self._web_config, self._announce = config, web_config, announce
        # no TLS and no passwords for a Unix socket: its file's mode controls access
        self._apps = {UnixAddress: app, Address: web_config.guard(app), type(None): commanded or app}
        self._unbound: list[Address | UnixAddress | None] = [*config.addresses, *([None] if commanded is not None else [])]
        """where to listen; ``None``: on the API's own socket"""
        self._accepting: dict[socket.socket, asyncio.Server] = {}
        self._context: ssl.SSLContext | None = None
        self._address, self._next_bind_s = "", 0.0
        self._announced: tuple[str, bool] | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        return [*self._accepting]

    def has_connection(self, client: tuple[str, int]) -> bool:
        """Return whether there is a connection with this other end."""
        return any(connection.client == client for connection in self.recent)

    async def open(self) -> None:
        """Listen as far as possible, by the web configuration that was loaded meanwhile."""
        self._context = self._web_config.context
        asyncio.get_running_loop().set_exception_handler(_handle)
        await self.on_tick(0)  # sets the Date header
        await self._bind()

    async def tick(self) -> None:
        """Do the periodic work, once a second."""
        if self._web_config.context is not self._context:
            await self._renew()
        if self._unbound and time.monotonic() >= self._next_bind_s:
            await self._bind()
        self._announce_address()
        await self.on_tick(0)

    async def close(self) -> None:
        """Remove the sockets' files, and stop."""
        for bound in self._accepting:
            if isinstance(bound, UnixSocket):
                bound.remove()  # while it still listens
        self.servers = [*self._accepting.values()]
        await self.shutdown(sockets=self.sockets)

    async def _renew(self) -> None:
        """Accept connections with the new TLS context; older ones end, after a response that is under way."""
        self._context = self._web_config.context
        loop, renewed = asyncio.get_running_loop(), [bound for bound in self._accepting if not isinstance(bound, UnixSocket)]
        for listening in (listener for bound in renewed for listener in self._accepting[bound].sockets):
            loop.remove_reader(listening)
        await asyncio.sleep(0)  # a server that is closed drops what it has accepted in this turn of the loop
        for bound in renewed:
            self._accepting[bound].close()  # it has a duplicate of the socket: who is in its queue waits
            await self._accept(bound, Address)
        for connection in list(self.recent):
            if connection.app is self._apps[Address]:
                connection.shutdown()

    async def _accept(self, bound: socket.socket, kind: type) -> None:
        """Accept connections, with TLS where that is configured. ``kind``: of the address that the socket is bound to."""
        context = self._context if kind is Address else None
        limit_s, app = None if context is None else HEAD_S, self._apps[kind]
        self._accepting[bound] = await asyncio.get_running_loop().create_server(
            partial(HttpProtocol, self, app), sock=bound.dup(), backlog=_BACKLOG, ssl=context, ssl_handshake_timeout=limit_s
        )

    async def _bind(self) -> None:
        self._next_bind_s = time.monotonic() + RETRY_S
        self.problems = ()
        for address in list(self._unbound):
            if address is None and self._config.mode == "node" and not self._accepting:
                continue  # a node's exporter without a port gives up
            try:
                bound = self._bound_to(address)
            except OSError as problem:
                failure = "no Unix socket for the API" if address is None else f"cannot listen on {address}"
                words = f"{failure}: {problem.strerror or problem}"
                self.problems = (*self.problems, words)
                _log.error("%s", words)
                continue
            if bound is not None:
                self._unbound.remove(address)
                await self._accept(bound, type(address))
                self._log_address(bound, address)

    def _bound_to(self, address: Address | UnixAddress | None) -> socket.socket | None:
        """Return the listening socket; ``None`` while the directory of the API's socket does not exist. Raises ``OSError``."""
        if isinstance(address, Address):
            return bind(address) if self._config.mode == "sidecar" or self._config.listen else bind_near(address)
        named = address or access.socket_address(self._config)
        return bind_unix(Path(named.path)) if named is not None else None

    def _log_address(self, bound: socket.socket, address: Address | UnixAddress | None) -> None:
        actual = Address(address.host, bound.getsockname()[1]) if isinstance(address, Address) else address
        if isinstance(address, Address) and address.port != 0 and actual != address:
            _log.warning("%s is taken by another program: listening on %s", address, actual)
        if actual is not None:
            _log.info("listening on %s", actual, extra=_GOOD_NEWS)
        if isinstance(actual, Address):
            self._address = self._address or str(actual)
            self._announce_address()

    def _announce_address(self) -> None:
        """Announce the first address; retried until that succeeds."""
        announced = self._address, self._web_config.context is not None
        if self._announce is None or not self._address or announced == self._announced:
            return
        try:
            self._announce(*announced)
            self._announced = announced
        except OSError as problem:
            self.unannounced += 1
            _log.error("the address could not be announced: %s", problem.strerror or problem)
