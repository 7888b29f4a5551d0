"""Accepting connections: what they are like, and which are closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, cast

import pytest
from starlette.responses import PlainTextResponse

from tests.web_configs import certify
from torchobs.exporter.http import serve_on

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

    from torchobs.exporter.http import HttpProtocol

APP = PlainTextResponse("page")
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_the_end_of_a_page_waits_for_no_acknowledgement() -> None:
    """A page goes out in pieces: with Nagle's algorithm the last of them waits 40 ms, at every scrape."""

    async def no_delay() -> int:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP)
        with socket.create_connection(bound.getsockname()):
            while not server.server_state.connections:  # noqa: ASYNC110  # nothing else shows it
                await asyncio.sleep(0.01)
            (connection,) = server.server_state.connections
            accepted = cast("HttpProtocol", connection).transport.get_extra_info("socket")
            found = int(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            await server.shutdown()
        return found

    assert asyncio.run(no_delay()) != 0


def test_whoever_is_there_when_tls_changes_is_answered_once() -> None:
    """Then the connection is closed. A second change changes nothing."""

    async def answers() -> tuple[bytes, bool]:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP)
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(HEAD[:10])
        await writer.drain()
        await asyncio.sleep(0.05)
        server.renew()
        server.renew()
        writer.write(HEAD[10:])
        answer = await asyncio.wait_for(reader.read(), 10)  # to its end
        writer.close()
        is_left = bool(server.server_state.connections)
        await server.shutdown()
        return answer, is_left

    answer, is_left = asyncio.run(answers())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"page")
    assert not is_left


@pytest.fixture
def certificate(tmp_path: Path, program: Callable[[str], str]) -> Path:
    """A certificate of this machine, beside its key."""
    return certify(program("openssl"), tmp_path, "server")


def contexts(certificate: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a server has with that certificate, and a client that trusts it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return server, ssl.create_default_context(cafile=str(certificate))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_silent_connections_make_room_for_a_scraper(scheme: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: above the cap the connection that has waited longest for a head is closed, and a request is answered.

    With TLS one that does not begin its handshake is such a connection.
    """
    monkeypatch.setattr("torchobs.exporter.http.MOST_CONNECTIONS", 4)
    context, trust = contexts(certificate) if scheme == "https" else (None, None)

    async def outcome() -> tuple[list[bool], bytes]:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP, lambda: context)
        address = bound.getsockname()
        silent = [await asyncio.open_connection(*address) for _ in range(6)]
        reader, writer = await asyncio.open_connection(*address, ssl=trust)
        writer.write(HEAD)
        answer = await asyncio.wait_for(reader.readuntil(b"page"), 10)
        closed = [one.at_eof() for one, _ in silent]
        for _, other in [*silent, (reader, writer)]:
            other.close()
        await server.shutdown()
        return closed, answer

    closed, answer = asyncio.run(outcome())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert closed == [True] * 3 + [False] * 3


@pytest.mark.parametrize("requests", [0, 1])
def test_a_head_that_does_not_come_ends_the_connection(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: of a first request and of a later one; a scraper between two requests is left alone."""
    monkeypatch.setattr("torchobs.exporter.http.HEAD_S", 0.2)

    async def outcome() -> bool:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP)
        idle_reader, idle = await asyncio.open_connection(*bound.getsockname())
        idle.write(HEAD)
        await idle_reader.readuntil(b"page")
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        for _ in range(requests):
            writer.write(HEAD)
            await reader.readuntil(b"page")
        writer.write(HEAD[:10])
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)  # to its end
        idle.write(HEAD)
        answer = await asyncio.wait_for(idle_reader.readuntil(b"page"), 10)
        writer.close()
        idle.close()
        await server.shutdown()
        return answer.startswith(b"HTTP/1.1 200 OK")

    assert asyncio.run(outcome())


def test_a_handshake_that_does_not_come_ends_the_connection(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: nothing of it is left, as of one that a client breaks off, and of garbage."""
    monkeypatch.setattr("torchobs.exporter.http.HEAD_S", 0.2)
    context, trust = contexts(certificate)

    async def ends() -> None:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP, lambda: context)
        address = bound.getsockname()
        for first in (b"", b"\x16\x03\x01\x02\x00\x01", HEAD):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(first)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)  # to its end
            writer.close()
        _, gone = await asyncio.open_connection(*address)
        gone.close()
        reader, writer = await asyncio.open_connection(*address, ssl=trust)
        writer.write(HEAD)
        await asyncio.wait_for(reader.readuntil(b"page"), 10)
        writer.close()
        while server.server_state.connections:  # noqa: ASYNC110  # nothing else shows it
            await asyncio.sleep(0.01)
        await server.shutdown()

    asyncio.run(asyncio.wait_for(ends(), 60))


def test_idle_connections_make_room_for_a_scraper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: where all connections are between two requests, the one that has been so longest is closed."""
    monkeypatch.setattr("torchobs.exporter.http.MOST_CONNECTIONS", 4)

    async def outcome() -> tuple[list[bool], bytes]:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), APP)
        idle = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            writer.write(HEAD)
            await asyncio.wait_for(reader.readuntil(b"page"), 10)
            idle.append((reader, writer))
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(HEAD)
        answer = await asyncio.wait_for(reader.readuntil(b"page"), 10)
        closed = [one.at_eof() for one, _ in idle]
        for _, other in [*idle, (reader, writer)]:
            other.close()
        await server.shutdown()
        return closed, answer

    closed, answer = asyncio.run(outcome())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert closed == [True, False, False, False]


@pytest.mark.parametrize("requests", [0, 1])
def test_a_response_that_is_not_read_ends_the_connection(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: of a first request and of a later one, also where all of it but its end was taken."""
    monkeypatch.setattr("torchobs.exporter.http.RESPONSE_S", 0.3)
    large = PlainTextResponse(b"x" * 20_000_000)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (large if scope["path"] == "/large" else APP)(scope, receive, send)

    async def ends() -> bool:
        server = await serve_on(bound := socket.create_server(("127.0.0.1", 0)), app)
        client = socket.create_connection(bound.getsockname())
        client.setblocking(False)  # noqa: FBT003  # as socket has it
        loop = asyncio.get_running_loop()
        for _ in range(requests):
            await loop.sock_sendall(client, HEAD)
            await asyncio.wait_for(loop.sock_recv(client, 4096), 10)
        await loop.sock_sendall(client, HEAD.replace(b"GET /", b"GET /large"))
        while not server.server_state.connections:  # noqa: ASYNC110  # nothing else shows it
            await asyncio.sleep(0.01)
        while server.server_state.connections:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.05)
        client.close()
        await server.shutdown()
        return True

    assert asyncio.run(ends())
