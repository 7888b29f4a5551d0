"""Connections that take too long are closed, and no others."""

import asyncio
from dataclasses import dataclass, field

from torchobs.exporter.http.connection_limits import HEAD_S, RESPONSE_S, Connections


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


def crowd(*connections: Connection, most: int | None = None) -> Connections:
    """These connections, of which there may be as many."""
    made = Connections(most)
    for connection in connections:
        made.add(connection)
    return made


def alive_after(connection: Connection, *times_s: float) -> bool:
    """Whether the connection outlives sweeps at these times."""
    connections = crowd(connection)
    for time_s in times_s:
        connections.sweep(time_s)
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


def test_a_request_at_the_address_of_the_last_one_is_another() -> None:
    """Python gives a new object the memory of one that is gone; a stream that follows one of 50 s was closed after 10."""
    connection = Connection(Cycle())
    connections = crowd(connection)
    connections.sweep(0)
    connection.cycle = None
    connection.cycle = Cycle()
    connections.sweep(RESPONSE_S + 1)
    assert connection in connections


def test_each_request_starts_the_clock_again() -> None:
    """A connection that is used for an hour is no slow one."""
    connection = Connection()
    connections = crowd(connection)
    for time_s in range(100):
        connection.cycle = Cycle()
        connections.sweep(float(time_s * 60))
    assert not connection.transport.aborted


def test_what_is_closed_is_counted_by_its_reason() -> None:
    """Every reason is there from the start."""
    connections = crowd(Connection())
    assert connections.dropped == {"slow": 0, "crowd": 0, "flood": 0, "tls": 0, "accept": 0}
    connections.sweep(0.0)
    connections.sweep(HEAD_S + 0.1)
    assert (connections.dropped["slow"], len(connections)) == (1, 0)


def test_in_a_crowd_those_without_a_request_go_first() -> None:
    """The longest waiting first, then scrapers between scrapes; whose page is on its way stays, unless it takes very long."""
    busy = [Connection(Cycle()) for _ in range(8)]
    idle = [Connection(Cycle(response_complete=True), timeout_keep_alive_task=object()) for _ in range(8)]
    old, new = [Connection() for _ in range(8)], [Connection() for _ in range(8)]
    kinds = (old, new, idle, busy)
    connections = crowd(*busy, *idle, *old, most=32)
    connections.sweep(0.0)
    for connection in new:
        assert connections.make_room(1.0)
        connections.add(connection)

    def gone() -> list[int]:
        connections.thin_out(now_s)
        return [sum(one.transport.aborted for one in kind) for kind in kinds]

    now_s = 1.0
    assert [gone() for _ in range(4)] == [[4, 0, 0, 0], [7, 0, 0, 0], [8, 2, 0, 0], [8, 4, 0, 0]]
    assert [gone() for _ in range(20)][-1] == [8, 8, 8, 0]
    now_s = HEAD_S + 1
    assert gone() == [8, 8, 8, 1]


def test_where_nobody_can_be_closed_nobody_is_taken() -> None:
    """Scrapers whose pages are on their way fill it up."""
    connections = crowd(*[Connection(Cycle()) for _ in range(8)], most=8)
    assert not connections.make_room(1.0)
    assert (len(connections), connections.dropped["crowd"]) == (8, 0)


def test_a_newcomer_is_taken_where_others_can_be_closed() -> None:
    """As many as there may be, and no more."""
    connections = crowd(*[Connection() for _ in range(8)], most=8)
    assert connections.make_room(1.0)
    assert (len(connections), connections.dropped["crowd"]) == (7, 1)
