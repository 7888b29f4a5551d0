"""What goes over one connection: long pages piece by piece."""

import asyncio

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from torchobs.exporter.http.server import chunked_writes

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
