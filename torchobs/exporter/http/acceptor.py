"""Accepts connections: as many as there is room for, and on after descriptors or memory have run out.

asyncio's own server takes whatever comes, shows nobody the connections whose TLS handshake never ends, and when descriptors
have run out it tries 512 times in a row, with a traceback each (CPython 3.11).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING

from torchobs.exporter.http.connection_limits import HEAD_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from torchobs.exporter.http.connection_limits import Connections
    from torchobs.exporter.http.protocol import HttpProtocol

RETRY_S = 0.2
"""Until it is tried again when the kernel has no descriptor or no memory for a connection."""

_AT_ONCE = 16
_log = logging.getLogger(__name__)


class Arrival:
    """A connection that is being made; see ``connections.Connection``."""

    cycle = None
    timeout_keep_alive_task = None

    def __init__(self, accepted: socket.socket) -> None:
        self._accepted = accepted

    @property
    def transport(self) -> Arrival:
        """Itself."""
        return self

    def abort(self) -> None:
        """Have its handshake fail, which lets go of everything."""
        with contextlib.suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)


class Acceptor:
    """Accepts on one socket until it is closed. ``close`` and ``wait_closed`` are what uvicorn asks of a server."""

    def __init__(
        self,
        bound: socket.socket,
        protocol: Callable[[], HttpProtocol],
        context: ssl.SSLContext | None,
        connections: Connections,
    ) -> None:
        """``protocol`` makes that of a connection; ``context``: for TLS. To be used in the running event loop."""
        self._bound, self._protocol, self._context, self._connections = bound, protocol, context, connections
        self._loop = asyncio.get_running_loop()
        self._arrivals: set[asyncio.Task[None]] = set()
        self._closed = False
        bound.setblocking(False)  # noqa: FBT003  # the standard library's only way
        self._resume()

    def close(self) -> None:
        """Accept no more. Idempotent. Whose handshake has begun is served once: a new certificate fails no scrape."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._bound)

    async def wait_closed(self) -> None:
        """Give up those that are being made still."""
        for arrival in self._arrivals:
            arrival.cancel()
        if self._arrivals:
            await asyncio.wait(self._arrivals)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                self._pause(problem)
                return
            self._begin(accepted)

    def _pause(self, problem: OSError) -> None:
        """Close some connections, and try again a little later: the one that waits stays in the kernel's queue."""
        self._connections.dropped["accept"] += 1
        _log.error("cannot accept connections: %s", problem.strerror)
        self._connections.thin_out(time.monotonic(), scrapers=False)
        self._loop.remove_reader(self._bound)
        self._loop.call_later(RETRY_S, self._resume)

    def _begin(self, accepted: socket.socket) -> None:
        if not self._connections.make_room(time.monotonic()):
            self._connections.dropped["crowd"] += 1
            accepted.close()
            return
        arrival = Arrival(accepted)
        self._connections.add(arrival)
        task = self._loop.create_task(self._make(accepted, arrival))
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)

    async def _make(self, accepted: socket.socket, arrival: Arrival) -> None:
        # the sweep looks at handshakes as at everything else; this is for when nobody sweeps
        handshake_s = 2 * HEAD_S if self._context is not None else None
        try:
            _prepare(accepted)
            _, protocol = await self._loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._context, ssl_handshake_timeout=handshake_s
            )
            protocol.once = self._closed
        except OSError:  # what OpenSSL refuses is one, too: no TLS, a certificate that is none of ours
            if arrival in self._connections:
                self._connections.dropped["tls" if self._context is not None else "accept"] += 1
            accepted.close()
        finally:
            self._connections.discard(arrival)


def _prepare(accepted: socket.socket) -> None:
    accepted.setblocking(False)  # noqa: FBT003  # the standard library's only way
    if accepted.family != socket.AF_UNIX:
        # asyncio does so only where the protocol's number is known; without it the end of a page can wait 40 ms for an ACK
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
