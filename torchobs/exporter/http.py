"""The exporter's listeners: on its addresses, and on the API's own Unix socket, with a uvicorn server for each.

What cannot be opened is tried again, a Unix socket whose file is gone is opened anew, and new certificates get new servers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchobs.config.option_types import Address
from torchobs.exporter.unix_socket import UnixAddress, UnixSocket, bind_unix

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable

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
_PIECE = 4 * 1024
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


class HttpProtocol(H11Protocol):
    """One connection: uvicorn's, with deadlines for a request's head and its response, and a cap on connections.

    uvicorn waits for ever for both, and its ``limit_concurrency`` answers 503 to the newest client, which would be the scraper
    among a thousand silent connections. Here the connection makes room that has waited longest for its first request, or else
    the one that has been idle longest after a response.
    """

    def __init__(self, server: uvicorn.Server, waiting: dict[Connection, None], most: int) -> None:
        """``waiting``: the server's connections without a request, the oldest first; ``most``: cap on its connections."""
        super().__init__(server.config, server.server_state, {})
        self.conn = h11.Connection(h11.SERVER, MOST_HEAD)
        self.closes_next = False
        """whether the connection is closed after the next response"""
        self._server, self._waiting, self._most = server, waiting, most
        self._deadline: asyncio.TimerHandle | None = None
        self._body = 0
        """bytes received of a request's body"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        # a handshake during a change of certificates gets one response, so that no scrape fails
        self.closes_next = not all(one.is_serving() for one in self._server.servers)
        self._await_head()
        _make_room(self, self._waiting, self._most)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        for at in range(0, len(data), _PIECE):  # h11 takes 10 µs for each chunk of a body, however short
            if self.transport.is_closing():
                return
            piece = data[at : at + _PIECE]
            super().data_received(piece)
            self._body = self._body + len(piece) if self.conn.their_state is h11.SEND_BODY else 0
            if self._body > MOST_BODY:
                self.transport.abort()
        if self.conn.their_state is h11.IDLE:
            if self._deadline is None:
                self._await_head()
        elif self in self._waiting or self._deadline is None:
            self._waiting.pop(self, None)
            self._close_after(RESPONSE_S)

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if not self.cycle.response_complete:  # of a request that came right behind
            self._close_after(RESPONSE_S)
        else:
            self._waiting[self] = None
            if not self.transport.get_write_buffer_size():
                self._close_after(None)
        if self.closes_next:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._waiting.pop(self, None)
        self._close_after(None)
        super().connection_lost(exc)

    def finish(self) -> None:
        """Close the connection: at once if idle, else after its current or first response, so that no scrape fails."""
        if cast("object", self.cycle) is None:
            self.closes_next = True
        else:
            self.shutdown()

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

    def _await_head(self) -> None:
        self._waiting[self] = None
        self._close_after(HEAD_S)

    def _close_after(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._expire, seconds == RESPONSE_S)

    def _expire(self, of_response: bool) -> None:  # noqa: FBT001  # called by a timer
        self._deadline = None
        is_idle = self in self._waiting and not self.transport.get_write_buffer_size() and not self.conn.trailing_data[0]
        if not (of_response and is_idle):  # a response whose end the client took late
            self.transport.abort()


class TlsHandshake(asyncio.Protocol):
    """A connection before its TLS handshake is done, of which the cap and the time limit hold as of :class:`HttpProtocol`.

    asyncio's own TLS servers show a connection after its handshake, so that silent ones could take all descriptors.
    """

    has_asked = False

    def __init__(self, http: HttpProtocol, context: ssl.SSLContext, waiting: dict[Connection, None], most: int) -> None:
        """``http``: what follows the handshake; for the others see :class:`HttpProtocol`."""
        self.connections = cast("set[Any]", http.connections)
        self._http, self._context, self._waiting, self._most = http, context, waiting, most
        self._early = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as HttpProtocol has it
        """See :class:`asyncio.Protocol`."""
        self.transport = transport
        self.connections.add(self)
        self._waiting[self] = None
        _make_room(self, self._waiting, self._most)
        self._task = asyncio.ensure_future(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        """Keep what came right behind the handshake."""
        self._early += data

    def shutdown(self) -> None:
        """Close the connection at the server's end."""
        self.transport.abort()

    def finish(self) -> None:
        """Let the handshake end, and a request be answered."""

    async def _shake_hands(self) -> None:
        secured: asyncio.Transport | None = None
        try:
            if not self.transport.is_closing():
                secured = await asyncio.get_running_loop().start_tls(
                    self.transport, self, self._context, server_side=True, ssl_handshake_timeout=HEAD_S
                )
        except OSError:
            return  # refused, out of time, or gone
        finally:
            self.connections.discard(self)
            self._waiting.pop(self, None)
        if secured is not None and not secured.is_closing():
            secured.set_protocol(self._http)
            self._http.connection_made(secured)
            self._http.data_received(bytes(self._early))


Connection: TypeAlias = HttpProtocol | TlsHandshake


def _make_room(newest: Connection, waiting: dict[Connection, None], most: int) -> None:
    """Close the connection that has waited longest, if there are too many of them, but rather not the newest."""
    if len(newest.connections) > most:
        others = [other for other in waiting if other is not newest]
        oldest = next((other for other in others if not other.has_asked), others[0] if others else newest)
        waiting.pop(oldest)
        oldest.transport.abort()


async def serve_on(bound: socket.socket, app: ASGIApp, context: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Start a server on a socket. The caller calls its ``on_tick`` every second, and its ``shutdown`` at the end."""
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
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.on_tick(0)  # sets the Date header
    waiting: dict[Connection, None] = {}

    def accepted() -> Connection:
        most = _most_connections()
        http = HttpProtocol(server, waiting, most)
        return http if context is None else TlsHandshake(http, context, waiting, most)

    if bound.family != socket.AF_UNIX:  # accepted sockets inherit it; without it the end of a page can wait 40 ms for an ACK
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_handle)
    server.servers = [await loop.create_server(accepted, sock=bound, backlog=_BACKLOG)]
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
        cast("Connection", connection).finish()


class ApiSocket(NamedTuple):
    """The API's own Unix socket, over which commands are allowed."""

    app: ASGIApp
    address: Callable[[], UnixAddress | None]
    """returns ``None`` while its directory does not exist; raises ``OSError``"""


class _Listener(NamedTuple):
    """A server on a socket. ``address``: as configured; ``None`` for the API's own socket."""

    server: uvicorn.Server
    bound: socket.socket
    address: Address | UnixAddress | None
    is_api: bool
    context: ssl.SSLContext | None


class Listeners:
    """Listens as configured. To be used in one event loop.

    ``announce`` is called with the first address, ``host:port``, and whether it has TLS; again when that changes.
    """

    def __init__(
        self,
        config: ExporterConfig,
        web_config: WebConfigMiddleware,
        app: ASGIApp,
        api: ApiSocket | None,
        announce: Callable[[str, bool], None] | None,
    ) -> None:
        """``app``: the application without authentication, which ``web_config`` adds where it is reached by the network."""
        self.unannounced = 0
        self._config, self._web_config = config, web_config
        self._app, self._guarded, self._api, self._announce = app, web_config.guard(app), api, announce
        self._listeners: list[_Listener] = []
        self._unbound, self._wants_api = list(config.addresses), api is not None
        self._bind_problems: list[str] = []
        self._renewal_problems: list[str] = []
        self._unix_sockets = UnixSocketWatch()
        self._address, self._next_bind_s = "", 0.0
        self._announced: tuple[str, bool] | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        return [listener.bound for listener in self._listeners]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not listen as configured."""
        return (*self._bind_problems, *self._renewal_problems)

    async def open(self) -> None:
        """Listen as far as possible, by the web configuration that was loaded meanwhile."""
        await self._bind()

    async def tick(self) -> None:
        """Do the periodic work, once a second."""
        await self._renew()
        await self._reopen_unnamed()
        if (self._unbound or self._wants_api) and time.monotonic() >= self._next_bind_s:
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

    async def _renew(self) -> None:
        """Start new servers if the TLS context has changed; their sockets stay open, so that no connection is refused.

        What cannot be renewed serves as before, and is tried again.
        """
        self._renewal_problems = []
        reached = [listener for listener in self._listeners if not isinstance(listener.bound, UnixSocket)]
        for listener in [listener for listener in reached if listener.context is not self._web_config.context]:
            bound = self._open("no other TLS settings yet", listener.bound.dup, self._renewal_problems)
            if bound is None:
                continue
            await self._serve(bound, listener.address)
            self._listeners.remove(listener)
            await retire(listener.server)
            listener.bound.close()

    async def _reopen_unnamed(self) -> None:
        """Listen again where a Unix socket's file was removed or replaced."""
        lost = self._unix_sockets.lost(bound for bound in self.sockets if isinstance(bound, UnixSocket))
        for listener in [listener for listener in self._listeners if listener.bound in lost]:
            self._listeners.remove(listener)
            self._wants_api = self._wants_api or listener.is_api
            if listener.address is not None:
                self._unbound.append(listener.address)
            await listener.server.shutdown(sockets=[listener.bound])

    async def _bind(self) -> None:
        self._next_bind_s = time.monotonic() + RETRY_S
        self._bind_problems = []
        for address in list(self._unbound):
            bound = self._open(f"cannot listen on {address}", partial(self._bound_to, address), self._bind_problems)
            if bound is not None:
                self._unbound.remove(address)
                await self._serve(bound, address)
                self._log_address(bound, address)
        if self._wants_api and (self._listeners or self._config.mode == "sidecar"):  # a node's exporter without a port gives up
            bound = self._open("no Unix socket for the API", self._api_bound, self._bind_problems)
            if bound is not None:
                self._wants_api = False
                await self._serve(bound, is_api=True)

    def _open(self, failure: str, bind: Callable[[], socket.socket | None], problems: list[str]) -> socket.socket | None:
        """Return a listening socket, or ``None`` after reporting why there is none."""
        try:
            return bind()
        except OSError as problem:
            problems.append(f"{failure}: {problem.strerror or problem}")
            _log.error("%s: %s", failure, problem.strerror or problem)
            return None

    def _bound_to(self, address: Address | UnixAddress) -> socket.socket:
        if isinstance(address, UnixAddress):
            return bind_unix(Path(address.path))
        return bind(address) if self._config.mode == "sidecar" or self._config.listen else bind_near(address)

    def _api_bound(self) -> socket.socket | None:
        address = self._api.address() if self._api is not None else None
        return bind_unix(Path(address.path)) if address is not None else None

    async def _serve(self, bound: socket.socket, address: Address | UnixAddress | None = None, *, is_api: bool = False) -> None:
        app, context = self._guarded, self._web_config.context
        if isinstance(bound, UnixSocket):  # no TLS and no passwords: the file's mode controls access
            app, context = self._api.app if is_api and self._api is not None else self._app, None
        self._listeners.append(_Listener(await serve_on(bound, app, context), bound, address, is_api, context))

    def _log_address(self, bound: socket.socket, address: Address | UnixAddress) -> None:
        if isinstance(address, UnixAddress):
            _log.info("listening on %s", address, extra=_GOOD_NEWS)
            return
        actual = Address(address.host, bound.getsockname()[1])
        if address.port not in {0, actual.port}:
            _log.warning("%s is taken by another program: listening on %s", address, actual)
        _log.info("listening on %s", actual, extra=_GOOD_NEWS)
        self._address = self._address or str(actual)
        self._announce_address()

    def _announce_address(self) -> None:
        """Announce the first address; retried until that succeeds."""
        announced = self._address, any(listener.context is not None for listener in self._listeners)
        if self._announce is None or not self._address or announced == self._announced:
            return
        try:
            self._announce(*announced)
            self._announced = announced
        except OSError as problem:
            self.unannounced += 1
            _log.error("the address could not be announced: %s", problem.strerror or problem)
