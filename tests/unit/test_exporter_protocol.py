"""What goes over one connection: bodies with an end, and long pages piece by piece."""

import asyncio

import h11
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from torchobs.exporter.http.protocol import MOST_CHUNKS, BoundedConnection, chunked_writes

AT_ONCE = 64 * 1024


def sent_of(body: bytes) -> list[Message]:
    """The messages by which a response with that body is sent."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(body)(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        await chunked_writes(app)({"type": "http"}, receive, send)

    asyncio.run(ask())
    return sent


@pytest.mark.parametrize("size", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE, 1_000_000])
def test_a_page_is_written_as_it_is_read(size: int) -> None:
    """Whole, in pieces of 64 KiB at most, so that of a reader that fetches nothing one is in memory."""
    body = bytes(index % 251 for index in range(size))
    start, *pieces = sent_of(body)
    assert dict(start["headers"])[b"content-length"] == str(size).encode()
    assert b"".join(piece["body"] for piece in pieces) == body
    assert all(len(piece["body"]) <= AT_ONCE for piece in pieces)
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_a_body_has_so_many_pieces_and_no_more() -> None:
    """Each takes 10 µs, however short it is; the next request has its own."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection = BoundedConnection(h11.SERVER)
    for _ in range(2):
        connection.receive_data(head + b"1\r\nx\r\n" * MOST_CHUNKS + b"0\r\n\r\n")
        events = [connection.next_event() for _ in range(MOST_CHUNKS + 2)]
        assert sum(isinstance(event, h11.Data) for event in events) == MOST_CHUNKS
        assert isinstance(events[-1], h11.EndOfMessage)
        connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
    connection.receive_data(head + b"1\r\nx\r\n" * (MOST_CHUNKS + 1))
    with pytest.raises(h11.RemoteProtocolError):
        [connection.next_event() for _ in range(MOST_CHUNKS + 2)]
