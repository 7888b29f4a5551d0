"""Where the exporter listens: sockets, a server for each, and connections that do not hold it up."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING, Protocol, cast
from weakref import WeakKeyDictionary

import uvicorn

from torchobs.values import Address

if TYPE_CHECKING:
    import ssl
    from collections.abc import Collection

    from starlette.types import ASGIApp
    from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""How long a request's head may take to arrive; Prometheus sends it in one packet."""

RESPONSE_S = 60.0
"""How long a page may take to be fetched: no scrape timeout is longer in practice."""

KEEP_ALIVE_S = 75
"""Longer than the usual scrape intervals, so that a scraper finds its connection open."""

MOST_CONNECTIONS = 512
"""Above it, those that wait the longest without a request are closed: 1,000 idle ones must not keep a scraper out."""

NEXT_PORTS = 100
_BACKLOG = 512
_HEAD_BYTES = 16 * 1024


def bind(address: Address) -> socket.socket:
    """Return a listening socket; an empty host is every interface, IPv4 and IPv6. Raises ``OSError``."""
    if address.host:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", address.port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as problem:
            if problem.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise  # else: IPv6 is compiled in and switched off, as in many pods
    return socket.create_server(("0.0.0.0", address.port), backlog=_BACKLOG)  # noqa: S104  # that is what was asked for


def bind_near(address: Address) -> socket.socket:
    """Return a listening socket on the address, or on the next port that is free, at most 100 on. Raises ``OSError``."""
    last = min(address.port + NEXT_PORTS, 65535) if address.port else 0
    for port in range(address.port, last):
        try:
            return bind(Address(address.host, port))
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
    return bind(Address(address.host, last))


async def serve_on(bound: socket.socket, app: ASGIApp, context: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Start a server on a socket. The caller calls its ``on_tick`` every second, and its ``shutdown`` at the end."""
    config = uvicorn.Config(
        app,
        http="h11",  # whatever else is installed: `Connections` knows this one
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.on_tick(0)  # sets the Date header
    server.servers = [await _accept(server, bound, context)]
    server.started = True
    return server


async def _accept(server: uvicorn.Server, bound: socket.socket, context: ssl.SSLContext | None) -> asyncio.Server:
    config = server.config

    def connection() -> asyncio.Protocol:
        made = cast("type[H11Protocol]", config.http_protocol_class)
        return made(config=config, server_state=server.server_state, app_state={})

    # as uvicorn's own startup does, but for a handshake's time, which there is asyncio's minute
    handshake_s = HEAD_S if context is not None else None
    loop = asyncio.get_running_loop()
    return await loop.create_server(connection, sock=bound, ssl=context, backlog=_BACKLOG, ssl_handshake_timeout=handshake_s)


class Cycle(Protocol):
    """A request and its response."""

    response_complete: bool


class Connection(Protocol):
    """What is asked of a connection of uvicorn's h11 protocol."""

    @property
    def transport(self) -> asyncio.Transport:
        """Its socket."""

    @property
    def cycle(self) -> Cycle | None:
        """The request at hand, or the last one."""

    @property
    def timeout_keep_alive_task(self) -> object:
        """Set while it is idle after a response, when uvicorn itself looks after it."""


class Connections:
    """Closes connections that take too long: uvicorn waits for ever for a request's head, and for whoever reads no response."""

    def __init__(self) -> None:
        self._since: WeakKeyDictionary[Connection, tuple[tuple[int, bool], float]] = WeakKeyDictionary()

    def sweep(self, connections: Collection[Connection], now_s: float) -> None:
        """Look at all connections once. ``now_s`` is CLOCK_MONOTONIC in seconds; to be called every second."""
        waiting = []
        for connection in list(connections):
            busy = connection.cycle is not None and not connection.cycle.response_complete
            age_s = now_s - self._since_when(connection, busy=busy, now_s=now_s)
            idle = not busy and connection.timeout_keep_alive_task is not None
            if age_s > (RESPONSE_S if busy else HEAD_S) and not idle:
                connection.transport.abort()
            elif not busy:
                waiting.append((idle, -age_s, connection))
        excess = max(0, len(connections) - MOST_CONNECTIONS)
        for _, _, connection in sorted(waiting, key=lambda item: item[:2])[:excess]:
            connection.transport.abort()

    def _since_when(self, connection: Connection, *, busy: bool, now_s: float) -> float:
        mark = (id(connection.cycle), busy)
        known = self._since.get(connection)
        if known is None or known[0] != mark:
            known = self._since[connection] = (mark, now_s)
        return known[1]
