"""Connections that take too long are closed, and no others."""

import asyncio
from dataclasses import dataclass, field

from torchobs.exporter.listener import HEAD_S, MOST_CONNECTIONS, RESPONSE_S, Connections


class Transport(asyncio.Transport):
    """A socket that can be aborted."""

    aborted = False

    def abort(self) -> None:
        """See :class:`asyncio.Transport`."""
        self.aborted = True


@dataclass
class Cycle:
    """A request and its response."""

    response_complete: bool = False


@dataclass(eq=False)
class Connection:
    """What uvicorn's h11 protocol shows of a connection."""

    cycle: Cycle | None = None
    timeout_keep_alive_task: object = None
    transport: Transport = field(default_factory=Transport)


def alive_after(connection: Connection, *times_s: float) -> bool:
    """Whether the connection outlives sweeps at these times."""
    connections = Connections()
    for time_s in times_s:
        connections.sweep([connection], time_s)
    return not connection.transport.aborted


def test_a_request_s_head_has_ten_seconds() -> None:
    """Slow-loris sends a byte now and then; Prometheus sends all of it in one packet."""
    assert alive_after(Connection(), 0, HEAD_S)
    assert not alive_after(Connection(), 0, HEAD_S + 0.1)


def test_a_response_has_a_minute() -> None:
    """Who reads nothing of it holds its memory."""
    assert alive_after(Connection(Cycle()), 0, HEAD_S + 1, RESPONSE_S)
    assert not alive_after(Connection(Cycle()), 0, RESPONSE_S + 0.1)


def test_a_scraper_keeps_its_connection_between_scrapes() -> None:
    """The server itself closes it when it is idle for too long."""
    assert alive_after(Connection(Cycle(response_complete=True), timeout_keep_alive_task=object()), 0, 70)


def test_a_second_request_has_the_same_ten_seconds() -> None:
    """A connection that was good once can still be used for a slow head."""
    connection = Connection(Cycle(response_complete=True))
    assert not alive_after(connection, 0, HEAD_S + 0.1)


def test_each_request_starts_the_clock_again() -> None:
    """A connection that is used for an hour is no slow one."""
    connections, connection = Connections(), Connection()
    for time_s in range(100):
        connection.cycle = Cycle()
        connections.sweep([connection], float(time_s * 60))
    assert not connection.transport.aborted


def test_above_the_limit_those_without_a_request_go_first() -> None:
    """The longest waiting first, then scrapers between scrapes; never one whose page is on its way."""
    busy = [Connection(Cycle()) for _ in range(10)]
    idle = [Connection(Cycle(response_complete=True), timeout_keep_alive_task=object()) for _ in range(10)]
    old, new = [Connection() for _ in range(MOST_CONNECTIONS - 10)], [Connection() for _ in range(20)]
    connections = Connections()
    connections.sweep([*idle, *busy], 0.0)
    connections.sweep([*idle, *busy, *old], 1.0)
    assert sum(connection.transport.aborted for connection in old) == 10
    left = [connection for connection in old if not connection.transport.aborted]
    connections.sweep([*idle, *busy, *left, *new], 2.0)
    assert sum(connection.transport.aborted for connection in left) == 20
    assert not any(connection.transport.aborted for connection in (*busy, *idle, *new))
