"""HTTP routes of the live page: the document, its script and style sheet, and the stream of updates."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from torchobs.exporter.api import authorization
from torchobs.exporter.http import client_scope
from torchobs.exporter.ui.page import HEADERS, SCRIPT_PATH, STYLE_PATH, page
from torchobs.exporter.ui.sse import Feed
from torchobs.exporter.ui.urls import STREAM_PATH, choice_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from torchobs.exporter.api.problems import Problem
    from torchobs.exporter.snapshot_cache import SnapshotCache

_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                   (b"x-content-type-options", b"nosniff"), (b"x-accel-buffering", b"no")]  # fmt: skip
_FULL = b'event: end\ndata: {"full":true}\n\n'


class LivePage:
    """The handlers. ``problems`` returns the exporter's problems, ``links`` are its other pages as (path, name)."""

    def __init__(self, watch: SnapshotCache, problems: Callable[[], Sequence[str]], links: Sequence[tuple[str, str]]) -> None:
        self._watch, self._problems, self._links = watch, problems, links
        self._feed: Feed | None = None
        self.evidence: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]] = _no_evidence
        """returns the ranks' artifacts, as in the API"""

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", _guarded(self._page)),
            Route(STREAM_PATH, _guarded(self._stream)),
            Route(STYLE_PATH, _guarded(_style)),
            Route(SCRIPT_PATH, _guarded(_script)),
        ]

    @property
    def viewers(self) -> int:
        """Number of viewers."""
        return self._feed.viewers if self._feed is not None else 0

    def close(self, *, done: bool = False) -> None:
        """End all streams, so that the server need not wait for them. ``done``: because all ranks have ended."""
        if self._feed is not None:
            self._feed.close(done=done)

    def _feeding(self) -> Feed:
        if self._feed is None:
            self._feed = Feed(self._watch, self.evidence)
        return self._feed

    async def _page(self, request: Request) -> Response:
        model = await self._feeding().model(choice_of(request.url.query))
        problems = (*self._watch.latest.problems, *self._problems())
        return HTMLResponse(page(model, problems, self._links), headers=HEADERS)

    async def _stream(self, request: Request) -> Response:
        return EventStream(self._feeding(), request)


class EventStream(Response):
    """A stream of server-sent events that ends when the viewer disconnects."""

    def __init__(self, feed: Feed, request: Request) -> None:
        self._feed, self._request = feed, request
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # starlette's interface
        """Send events until the viewer disconnects or the stream's time limit is reached."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        messages = _refusal() if self._feed.full else self._feed.messages(choice_of(self._request.url.query))
        sending = asyncio.ensure_future(_send_all(messages, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)


async def _send_all(messages: AsyncIterator[bytes], send: Send) -> None:
    async for message in messages:
        await send({"type": "http.response.body", "body": message, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _no_evidence() -> Sequence[Mapping[str, Any]]:
    return ()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refusal() -> AsyncIterator[bytes]:
    yield _FULL


def _refusal_of(request: Request) -> Problem | None:
    """Return the reason to refuse a request: the API's rules for reading apply, because the page shows the same data."""
    door = "socket" if client_scope.is_unix(request.scope) else authorization.access_channel(request.scope)
    known = bool(request.scope.get(client_scope.LET_IN))
    # tokens are for the API: a client that sends one with every request sees the same as without
    headers = {name: value for name, value in request.headers.items() if name not in authorization.TOKEN_HEADERS}
    return authorization.refusal("GET", headers, door, authorization.Token(None), authenticated=known)


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        problem = _refusal_of(request)
        return await handler(request) if problem is None else PlainTextResponse(f"{problem.detail}\n", problem.status)

    return guarded


async def _style(_: Request) -> Response:
    return Response(_asset("live.css"), media_type="text/css", headers=HEADERS)


async def _script(_: Request) -> Response:
    return Response(_asset("live.js"), media_type="text/javascript", headers=HEADERS)


@cache
def _asset(name: str) -> bytes:
    return resources.files(__package__).joinpath("static").joinpath(name).read_bytes()
