"""Accepting connections: what they are like, and what becomes of them when nothing more is, or can be, accepted."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING, cast

import pytest
from starlette.responses import PlainTextResponse

from torchobs.exporter.http.connection_limits import Connections
from torchobs.exporter.http.server import retire, serve_on

if TYPE_CHECKING:
    from torchobs.exporter.http.protocol import HttpProtocol

APP = PlainTextResponse("page")
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_the_end_of_a_page_waits_for_no_acknowledgement() -> None:
    """A page goes out in pieces: with Nagle's algorithm the last of them waits 40 ms, at every scrape."""

    async def no_delay() -> int:
        connections = Connections()
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP, connections)
        with socket.create_connection(bound.getsockname()):
            while not connections:  # noqa: ASYNC110  # nothing else tells
                await asyncio.sleep(0.01)
            (connection,) = connections._all
            accepted = cast("HttpProtocol", connection).transport.get_extra_info("socket")
            found = int(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            await server.shutdown()
        return found

    assert asyncio.run(no_delay()) != 0


def test_a_retired_server_accepts_nobody_and_answers_who_was_there() -> None:
    """Once; then the connection is closed. A second retirement changes nothing."""

    async def answers() -> tuple[bytes, bool]:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP, Connections())
        address = bound.getsockname()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD[:10])
        await writer.drain()
        await asyncio.sleep(0.05)
        await retire(server)
        await retire(server)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        writer.write(HEAD[10:])
        answer = await asyncio.wait_for(reader.read(), 10)  # to its end
        writer.close()
        return answer, bool(server.server_state.connections)

    answer, is_left = asyncio.run(answers())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"page")
    assert not is_left


@pytest.mark.parametrize("turns", range(4))
def test_whoever_comes_while_a_server_is_retired_is_answered(turns: int) -> None:
    """At each turn of the loop between the kernel's queue and the transport: asyncio drops what it has accepted by half."""

    async def answer() -> bytes:
        bound = socket.create_server(("127.0.0.1", 0))
        first, kept = await serve_on(bound, APP, Connections()), bound.dup()
        with socket.create_connection(bound.getsockname()) as client:
            client.setblocking(False)  # noqa: FBT003  # as socket has it
            for _ in range(turns):
                await asyncio.sleep(0)
            await retire(first)
            second = await serve_on(kept, APP, Connections())
            client.sendall(HEAD)
            found = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 4096), 10)
        await second.shutdown()
        return found

    assert asyncio.run(answer()).startswith(b"HTTP/1.1 200 OK")


def test_where_no_descriptor_is_left_is_told_once_and_room_is_made(caplog: pytest.LogCaptureFixture) -> None:
    """Asyncio tells of it for each place in the kernel's queue, all at once; other errors of the loop are shown as ever."""

    async def dropped() -> int:
        connections = Connections()
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP, connections)
        loop = asyncio.get_running_loop()
        problem = OSError(errno.EMFILE, "Too many open files")
        for _ in range(512):
            loop.call_exception_handler({"message": "socket.accept() failed", "exception": problem, "socket": bound})
        loop.call_exception_handler({"message": "something else", "exception": ValueError("x")})
        await server.shutdown()
        return connections.dropped["accept"]

    assert asyncio.run(dropped()) == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [line.splitlines()[0] for line in said] == ["cannot accept connections: Too many open files", "something else"]
