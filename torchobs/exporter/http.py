"""The exporter's listeners: on its addresses, and on the API's own Unix socket, with a uvicorn server for each.

What cannot be opened is tried again, a Unix socket whose file is gone is opened anew, and new certificates are used at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchobs.config.options import Address
from torchobs.exporter.unix_socket import UnixAddress, UnixSocket, bind_unix

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.web_config import WebConfigMiddleware

HEAD_S = 10.0
"""Time limit of a TLS handshake, and of a request's head, which Prometheus sends in one packet."""

RESPONSE_S = 60.0
"""Time limit of a response: no scrape timeout is longer in practice."""

MOST_CONNECTIONS = 512
"""Of each listener: more than any number of scrapers and people."""

MOST_HEAD = 16 * 1024
"""Most bytes of a request's head."""

MOST_BODY = 128 * 1024
"""Most bytes of a request's body as sent: twice what the API accepts."""

KEEP_ALIVE_S = 75
"""Keep-alive timeout; longer than the usual scrape intervals, so that scrapers reuse their connections."""

RETRY_S = 5.0
"""Pause before listening is tried again."""

NEXT_PORTS = 100
_BACKLOG = 512
_FILES = 65_536
_SHARE_OF_DESCRIPTORS = 4
_WRITTEN_AT_ONCE = 64 * 1024
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


class Server(uvicorn.Server):
    """A server on one socket, with a cap on its connections, and TLS by the context that is in force when they come."""

    def __init__(self, config: uvicorn.Config, context: Callable[[], ssl.SSLContext | None]) -> None:
        super().__init__(config)
        self.context = context
        self.waiting: dict[HttpProtocol, None] = {}
        """connections without a request, the oldest first"""

    def renew(self) -> None:
        """Close idle connections, because TLS has changed; the others get one more response, so that no scrape fails."""
        for connection in list(self.server_state.connections):
            cast("HttpProtocol", connection).finish()


class HttpProtocol(H11Protocol):
    """One connection: uvicorn's, with deadlines for handshake, head and response, and a cap on connections.

    uvicorn waits for ever for both, and its ``limit_concurrency`` answers 503 to the newest client, which would be the scraper
    among a thousand silent connections. Here the connection makes room that has waited longest for its first request, or else
    the one that has been idle longest after a response. The handshake is made here, because asyncio's own TLS servers show a
    connection after it, so that silent ones could take all descriptors.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server.config, server.server_state, {})
        self._waiting, self._context = server.waiting, server.context()
        self._closes_next = False
        """whether the connection is closed after the next response"""
        self._deadline: asyncio.TimerHandle | None = None
        self._received = 0
        """bytes of the present request"""
        self._early: bytearray | None = None
        """what came right behind a handshake; ``None``: there is none, or it is done"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See :class:`asyncio.Protocol`."""
        # not at the listening socket, which clients may reach before it is set: a page's end would wait 40 ms for an ACK
        accepted = transport.get_extra_info("socket")
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport = transport
        self.connections.add(self)
        self._waiting[self] = None
        self._make_room()
        if self._context is None:
            self._begin(transport)
        elif not transport.is_closing():
            self._early = bytearray()
            self._handshake = asyncio.ensure_future(self._shake_hands(self._context))

    async def _shake_hands(self, context: ssl.SSLContext) -> None:
        secured: asyncio.Transport | None = None
        with contextlib.suppress(OSError):  # refused, out of time, or gone
            secured = await self.loop.start_tls(self.transport, self, context, server_side=True, ssl_handshake_timeout=HEAD_S)
        early, self._early = self._early, None
        if secured is None or secured.is_closing():
            self.connection_lost(None)
            return
        self._begin(secured)
        if early:
            self.data_received(bytes(early))

    def _begin(self, transport: asyncio.Transport) -> None:
        """Await the first request."""
        super().connection_made(transport)
        self._close_after(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._early is not None:
            self._early += data
            return
        self._received += len(data)
        if (
            self._received > MOST_HEAD + MOST_BODY
        ):  # before it is parsed: h11 takes 10 µs for each chunk of a body, however short
            self.transport.abort()
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self._deadline is None:
                self._close_after(HEAD_S)
        elif self in self._waiting or self._deadline is None:
            self._waiting.pop(self, None)
            self._close_after(RESPONSE_S)

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._received = 0
        super().on_response_complete()
        if not self.cycle.response_complete:  # of a request that came right behind
            self._close_after(RESPONSE_S)
        else:
            self._waiting[self] = None
            if not self.transport.get_write_buffer_size():
                self._close_after(None)
        if self._closes_next:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._waiting.pop(self, None)
        self._close_after(None)
        super().connection_lost(exc)

    def finish(self) -> None:
        """Close the connection: at once if idle, else after its current or first response, so that no scrape fails."""
        if self.has_asked:
            self.shutdown()
        else:
            self._closes_next = True

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

    @property
    def has_asked(self) -> bool:
        """Return whether it has sent a request."""
        return cast("object", self.cycle) is not None

    def _make_room(self) -> None:
        """Close the connection that has waited longest, if there are too many of them, but rather not this one."""
        if len(self.connections) > _most_connections():
            others = [other for other in self._waiting if other is not self]
            oldest = next((other for other in others if not other.has_asked), others[0] if others else self)
            self._waiting.pop(oldest)
            oldest.transport.abort()

    def _close_after(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._expire, seconds == RESPONSE_S)

    def _expire(self, of_response: bool) -> None:  # noqa: FBT001  # called by a timer
        self._deadline = None
        is_idle = self in self._waiting and not self.transport.get_write_buffer_size() and not self.conn.trailing_data[0]
        if not (of_response and is_idle):  # a response whose end the client took late
            self.transport.abort()


def _no_tls() -> None:
    return None


async def serve_on(bound: socket.socket, app: ASGIApp, context: Callable[[], ssl.SSLContext | None] = _no_tls) -> Server:
    """Start a server on a socket; ``context`` returns that of TLS, or ``None`` for a connection without.

    The caller calls its ``on_tick`` every second, and its ``shutdown`` at the end.
    """
    config = uvicorn.Config(
        chunked_writes(app),
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
    config.load()
    server = Server(config, context)
    server.lifespan = config.lifespan_class(config)
    await server.on_tick(0)  # sets the Date header
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_handle)
    server.servers = [await loop.create_server(partial(HttpProtocol, server), sock=bound, backlog=_BACKLOG)]
    server.started = True
    return server


def _most_connections() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, max(8, most // _SHARE_OF_DESCRIPTORS))


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log that connections cannot be accepted in one line; asyncio reports it for each one in the kernel's queue."""
    problem = context.get("exception")
    if isinstance(problem, OSError) and problem.errno in _EXHAUSTED and "socket" in context:
        _log.error("cannot accept connections: %s", problem.strerror, extra={"cause": "accept"})
    else:
        loop.default_exception_handler(context)


def chunked_writes(app: ASGIApp) -> ASGIApp:
    """Return the application with long responses sent in chunks, as fast as the client reads them.

    Otherwise each connection would hold its own copy of everything that its client has not read yet.
    """

    async def pacing(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            body = cast("bytes", message.get("body", b""))
            goes_on = message.get("more_body", False)
            if message["type"] != "http.response.body" or len(body) <= _WRITTEN_AT_ONCE:
                await send(message)
                return
            view = memoryview(body)
            for at in range(0, len(body), _WRITTEN_AT_ONCE):
                more = goes_on or at + _WRITTEN_AT_ONCE < len(body)
                await send({"type": "http.response.body", "body": view[at : at + _WRITTEN_AT_ONCE], "more_body": more})

        await app(scope, receive, sending)

    return pacing


class Endpoint(NamedTuple):
    """Something to listen on. ``address``: as configured; ``None`` for the API's own socket."""

    failure: str
    """what is said if it fails"""
    bind: Callable[[], socket.socket | None]
    """returns ``None`` while the directory does not exist; raises ``OSError``"""
    app: ASGIApp
    address: Address | UnixAddress | None = None


class _Listener(NamedTuple):
    """A server on a socket."""

    server: Server
    bound: socket.socket
    endpoint: Endpoint


class Listeners:
    """Listens as configured. To be used in one event loop.

    ``announce`` is called with the first address, ``host:port``, and whether it has TLS; again when that changes.
    """

    def __init__(
        self,
        config: ExporterConfig,
        web_config: WebConfigMiddleware,
        app: ASGIApp,
        api: Endpoint | None,
        announce: Callable[[str, bool], None] | None,
    ) -> None:
        """``app``: the application without authentication, which ``web_config`` adds where it is reached by the network."""
        self.unannounced = 0
        self._config, self._web_config, self._announce = config, web_config, announce
        self._listeners: list[_Listener] = []
        # no TLS and no passwords for a Unix socket: its file's mode controls access
        apps = {UnixAddress: app, Address: web_config.guard(app)}
        self._unbound = [
            Endpoint(f"cannot listen on {address}", partial(self._bound_to, address), apps[type(address)], address)
            for address in config.addresses
        ]
        self._unbound += [api] if api is not None else []
        self.problems: tuple[str, ...] = ()
        """why it does not listen as configured"""
        self._context: ssl.SSLContext | None = None
        self._looking: asyncio.Future[list[UnixSocket]] | None = None
        self._address, self._next_bind_s = "", 0.0
        self._announced: tuple[str, bool] | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        return [listener.bound for listener in self._listeners]

    def has_connection(self, client: tuple[str, int]) -> bool:
        """Return whether there is a connection with this other end."""
        connections = (one for listener in self._listeners for one in listener.server.server_state.connections)
        return any(cast("HttpProtocol", connection).client == client for connection in connections)

    async def open(self) -> None:
        """Listen as far as possible, by the web configuration that was loaded meanwhile."""
        self._context = self._web_config.context
        await self._bind()

    async def tick(self) -> None:
        """Do the periodic work, once a second."""
        self._renew()
        await self._reopen_unnamed()
        if self._unbound and time.monotonic() >= self._next_bind_s:
            await self._bind()
        self._announce_address()
        for listener in self._listeners:
            await listener.server.on_tick(0)

    async def close(self) -> None:
        """Remove the sockets' files, and stop."""
        for listener in self._listeners:
            if isinstance(listener.bound, UnixSocket):
                listener.bound.remove()  # while it still listens
            await listener.server.shutdown(sockets=[listener.bound])

    def _renew(self) -> None:
        """Let go of the connections that were made before a change of TLS; new ones are by the new context."""
        if self._web_config.context is not self._context:
            self._context = self._web_config.context
            for listener in self._listeners:
                if not isinstance(listener.bound, UnixSocket):
                    listener.server.renew()

    async def _reopen_unnamed(self) -> None:
        """Listen again where a Unix socket's file was removed or replaced."""
        lost = self._unnamed()
        for listener in [listener for listener in self._listeners if listener.bound in lost]:
            self._listeners.remove(listener)
            self._unbound.append(listener.endpoint)
            await listener.server.shutdown(sockets=[listener.bound])

    def _unnamed(self) -> list[UnixSocket]:
        """Return the sockets without a path as of the last check, and start the next one.

        Checks run in a thread, so that a hanging file system blocks nothing else.
        """
        if self._looking is not None and not self._looking.done():
            return []
        lost = self._looking.result() if self._looking is not None else []
        bound = [listening for listening in self.sockets if isinstance(listening, UnixSocket)]
        look = asyncio.to_thread(lambda: [listening for listening in bound if not listening.is_named])
        self._looking = asyncio.ensure_future(look)
        return lost

    async def _bind(self) -> None:
        self._next_bind_s = time.monotonic() + RETRY_S
        self.problems = ()
        for endpoint in list(self._unbound):
            if endpoint.address is None and self._config.mode == "node" and not self._listeners:
                continue  # a node's exporter without a port gives up
            try:
                bound = endpoint.bind()
            except OSError as problem:
                words = f"{endpoint.failure}: {problem.strerror or problem}"
                self.problems = (*self.problems, words)
                _log.error("%s", words)
                continue
            if bound is not None:
                self._unbound.remove(endpoint)
                context = _no_tls if isinstance(bound, UnixSocket) else lambda: self._web_config.context
                self._listeners.append(_Listener(await serve_on(bound, endpoint.app, context), bound, endpoint))
                self._log_address(bound, endpoint.address)

    def _bound_to(self, address: Address | UnixAddress) -> socket.socket:
        if isinstance(address, UnixAddress):
            return bind_unix(Path(address.path))
        return bind(address) if self._config.mode == "sidecar" or self._config.listen else bind_near(address)

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
