"""HTTP/1.1 protocol of one connection: uvicorn's, with limits against hostile clients that uvicorn has no option for.

uvicorn's ``limit_concurrency`` answers 503 to the newest client, which would be the scraper among a thousand silent
connections; here others are closed for it (``connection_limits``). TLS is started in the protocol, not in asyncio's server,
which does not expose connections whose handshake never ends. Input is parsed in small pieces, and a request's body is limited:
h11 takes 10 µs for each chunk of a body, however short, so that one packet of 256 KiB would block the event loop for half a
second, and an endless body would occupy a core for ever.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchobs.exporter.http.connection_limits import HEAD_S

if TYPE_CHECKING:
    import asyncio
    import ssl

    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from torchobs.exporter.http.connection_limits import Connections

MOST_HEAD = 16 * 1024
"""Most bytes of a request's head."""

MOST_BODY = 128 * 1024
"""Most bytes of a request's body as sent: twice what the API accepts."""

MOST_CHUNKS = 1_000
"""Most chunks of a request's body."""

_PIECE = 4 * 1024
_WRITTEN_AT_ONCE = 64 * 1024


class BoundedConnection(h11.Connection):
    """Fails a request whose body has too many chunks."""

    chunks = 0

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        """See :class:`h11.Connection`."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.chunks += 1
            if self.chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError("a body in too many pieces")
        elif isinstance(event, h11.Request):
            self.chunks = 0
        return event


class HttpProtocol(H11Protocol):
    """One connection."""

    def __init__(self, server: uvicorn.Server, connections: Connections, context: ssl.SSLContext | None = None) -> None:
        """``context``: for TLS; ``None``: no TLS."""
        super().__init__(server.config, server.server_state, {})
        self._server, self._context = server, context
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""
        self.conn = BoundedConnection(h11.SERVER, MOST_HEAD)
        self.closes_next = False
        """whether the connection is closed after the next response"""
        self._connections = connections
        self._body_of: object = None
        self._body = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept the connection if there is room for it, before the TLS handshake. See :class:`asyncio.Protocol`."""
        self.transport = transport
        if not self._connections.make_room(time.monotonic()):
            self._connections.dropped["crowd"] += 1
            transport.abort()
            return
        self._connections.add(self)
        accepted: socket.socket = transport.get_extra_info("socket")
        if accepted.family != socket.AF_UNIX:
            # asyncio sets it only if the protocol number is known; without it the end of a page can wait 40 ms for an ACK
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            super().connection_made(transport)
        else:
            self._handshake = self.loop.create_task(self._secure(transport, self._context))

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            # the sweep covers handshakes, too; this timeout is for servers without one
            secured = await self.loop.start_tls(transport, self, context, server_side=True, ssl_handshake_timeout=2 * HEAD_S)
        except OSError:  # ssl.SSLError included: no TLS, or a client certificate that is not accepted
            if self in self._connections:
                self._connections.dropped["tls"] += 1
                self._connections.discard(self)
            return
        if secured is None or self not in self._connections:  # closed meanwhile
            self._connections.discard(self)
            return
        # a connection with a handshake during a change of certificates gets one response, so that no scrape fails
        self.closes_next = not all(one.is_serving() for one in self._server.servers)
        super().connection_made(secured)
        early, self._early = self._early, b""
        self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the input up to the limits. See :class:`asyncio.Protocol`."""
        if cast("object", self.flow) is None:  # data right behind the handshake, before ``_secure`` resumes
            self._early += data
            return
        for at in range(0, len(data), _PIECE):
            if self.transport.is_closing():
                return
            piece = data[at : at + _PIECE]
            super().data_received(piece)
            if self._is_too_much(len(piece)):
                self._connections.drop(self, "flood")

    def finish(self) -> None:
        """Close the connection: at once if idle, else after its current or first response, so that no scrape fails."""
        if cast("RequestResponseCycle | None", self.cycle) is None:
            self.closes_next = True
        else:
            self.shutdown()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if self.closes_next:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP; just close the connection if a response has begun."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # uvicorn then discards what the application sends
            cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _is_too_much(self, received: int) -> bool:
        """Count the received bytes of a request's body; return True if they exceed the limit."""
        if self._body_of is not self.cycle:
            self._body_of, self._body = self.cycle, 0
        if self.conn.their_state is not h11.SEND_BODY:
            return False
        self._body += received
        return self._body > MOST_BODY


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
