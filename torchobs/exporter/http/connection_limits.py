"""Connection limits: close connections that take too long, and the longest idle ones when there are too many.

uvicorn waits for ever for a request's head, and for a client that does not read its response; asyncio accepts connections until
there are no descriptors left; neither has an option for it. A thousand silent connections must not keep a scraper out.
"""

from __future__ import annotations

import logging
import resource
from collections import Counter
from typing import Any, NamedTuple, Protocol

from torchobs import catalog

HEAD_S = 10.0
"""Time limit of a TLS handshake, and of a request's head, which Prometheus sends in one packet."""

RESPONSE_S = 60.0
"""Time limit of a response: no scrape timeout is longer in practice."""

MOST_CONNECTIONS = 512
"""More than any number of scrapers and people."""

REASONS = catalog.EXPORTER_CONNECTIONS_DROPPED.attributes[0].values
RETRY_S = 1.0
"""asyncio's ``ACCEPT_RETRY_DELAY``: pause after accepting failed for want of a descriptor or of memory"""

_SHARE_OF_DESCRIPTORS = 4
_PART = 8
"""At the limit an eighth of the connections is closed at once, so that not every new one has to inspect all others."""

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """Interface of a connection, as uvicorn's h11 protocol has it."""

    transport: Any
    """an :class:`asyncio.Transport`"""
    cycle: Any
    """the current or last request; ``None`` before the first"""
    timeout_keep_alive_task: Any
    """set while the connection is idle after a response, when uvicorn applies its own timeout"""


class _Mark(NamedTuple):
    """What a connection was seen to do, and since when; holds the request, for another could get its ``id``."""

    cycle: object
    busy: bool
    since_s: float


class Connections:
    """All connections of all listeners. ``dropped``: numbers of those closed, or never accepted, by reason."""

    def __init__(self, most: int | None = None) -> None:
        """``most``: maximum number; ``None``: 512, or a quarter of this process's descriptors if that is less."""
        self.dropped = Counter(dict.fromkeys(REASONS, 0))
        self._most = most if most is not None else _room()
        self._all: dict[Connection, _Mark | None] = {}
        self._exhausted_s = -RETRY_S

    def add(self, connection: Connection) -> None:
        """Register a connection."""
        self._all[connection] = None

    def discard(self, connection: Connection) -> None:
        """Unregister a closed connection. Idempotent."""
        self._all.pop(connection, None)

    def drop(self, connection: Connection, reason: str) -> None:
        """Close a connection. ``reason``: one of :data:`REASONS`."""
        self.discard(connection)
        self.dropped[reason] += 1
        connection.transport.abort()
        _log.info("a connection was closed: %s", reason)

    def sweep(self, now_s: float) -> None:
        """Close connections that take too long. ``now_s``: CLOCK_MONOTONIC in seconds; to be called every second."""
        for connection in list(self._all):
            busy, idle, age_s = self._look(connection, now_s)
            if not idle and age_s > (RESPONSE_S if busy else HEAD_S):
                self.drop(connection, "slow")

    def make_room(self, now_s: float) -> bool:
        """Close connections if the maximum is reached; return True if there is room for another one."""
        if len(self._all) < self._most:
            return True
        self.thin_out(now_s, len(self._all) - self._most + 1)
        return len(self._all) < self._most

    def exhausted(self, problem: OSError, now_s: float) -> None:
        """Close some connections because accepting failed; the new one waits in the kernel's queue meanwhile.

        asyncio reports one failure hundreds of times in a row (CPython 3.11); it is counted once.
        """
        if now_s - self._exhausted_s >= RETRY_S / 2:
            self._exhausted_s = now_s
            self.dropped["accept"] += 1
            _log.error("cannot accept connections: %s", problem.strerror)
            self.thin_out(now_s, scrapers=False)

    def thin_out(self, now_s: float, least: int = 1, *, scrapers: bool = True) -> None:
        """Close an eighth of the connections, or ``least``, beginning with those that have been silent longest.

        Then, if ``scrapers``, those idle between two scrapes; then those with a response unread for longer than any scrape
        timeout.
        """
        looked = [(self._look(connection, now_s), connection) for connection in self._all]
        ranked = sorted(
            ((busy, idle, -age_s), number, connection)
            for number, ((busy, idle, age_s), connection) in enumerate(looked)
            if (scrapers and age_s > HEAD_S) or (not busy and (scrapers or not idle))
        )
        for _, _, connection in ranked[: max(least, len(self._all) // _PART)]:
            self.drop(connection, "crowd")

    def _look(self, connection: Connection, now_s: float) -> tuple[bool, bool, float]:
        """Return whether a connection is busy with a response, whether it is idle after one, and for how many seconds."""
        cycle = connection.cycle
        busy = cycle is not None and not cycle.response_complete
        known = self._all[connection]
        if known is None or known.cycle is not cycle or known.busy != busy:
            known = self._all[connection] = _Mark(cycle, busy, now_s)
        return busy, not busy and connection.timeout_keep_alive_task is not None, now_s - known.since_s

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._all

    def __len__(self) -> int:
        return len(self._all)


def _room() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, max(8, most // _SHARE_OF_DESCRIPTORS))
