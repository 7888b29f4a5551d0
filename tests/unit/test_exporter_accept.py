"""Accepting connections: what they are like, and what becomes of them when nothing more is accepted."""

import asyncio
import socket
from typing import cast

from torchobs.exporter.http.acceptor import Acceptor
from torchobs.exporter.http.connection_limits import Connections
from torchobs.exporter.http.protocol import HttpProtocol


class Protocol(asyncio.Protocol):
    """Notes its connection."""

    once = False

    def __init__(self) -> None:
        self.made = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self.made.set_result(transport.get_extra_info("socket"))


def test_the_end_of_a_page_waits_for_no_acknowledgement() -> None:
    """A page goes out in pieces: with Nagle's algorithm the last of them waits 40 ms, at every scrape."""

    async def accept() -> int:
        protocol = Protocol()
        with socket.create_server(("127.0.0.1", 0)) as bound:
            acceptor = Acceptor(bound, lambda: cast("HttpProtocol", protocol), None, Connections())
            with socket.create_connection(bound.getsockname()):
                accepted = await asyncio.wait_for(protocol.made, 10)
                no_delay = int(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            acceptor.close()
            await acceptor.wait_closed()
        return no_delay

    assert asyncio.run(accept()) != 0


def test_a_closed_one_accepts_nobody() -> None:
    """And may be closed twice."""

    async def accept() -> int:
        connections = Connections()
        with socket.create_server(("127.0.0.1", 0)) as bound:
            acceptor = Acceptor(bound, lambda: cast("HttpProtocol", Protocol()), None, connections)
            acceptor.close()
            acceptor.close()
            with socket.create_connection(bound.getsockname()):
                await asyncio.sleep(0.05)
            await acceptor.wait_closed()
        return len(connections)

    assert asyncio.run(accept()) == 0
