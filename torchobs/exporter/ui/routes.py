"""HTTP routes of the live page: the document, its script and style sheet, and the stream of updates."""

from __future__ import annotations

from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from torchobs.exporter import access
from torchobs.exporter.ui.page import HEADERS, SCRIPT_PATH, STYLE_PATH, page
from torchobs.exporter.ui.sse import Feed
from torchobs.exporter.ui.urls import STREAM_PATH, choice_of
from torchobs.report.style import style_sheet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request

    from torchobs.exporter.access import Problem
    from torchobs.exporter.snapshot_cache import SnapshotCache

_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Accel-Buffering": "no"}


class LivePage:
    """The handlers. ``problems`` returns the exporter's problems, ``links`` are its other pages as (path, name)."""

    def __init__(
        self, watch: SnapshotCache, problems: Callable[[], Sequence[str]], links: Sequence[tuple[str, str]],
        evidence: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
    ) -> None:  # fmt: skip
        """``evidence`` returns the ranks' artifacts, as in the API."""
        self._watch, self._problems, self._links = watch, problems, links
        self.feed = Feed(watch, evidence)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", _guarded(self._page)),
            Route(STREAM_PATH, _guarded(self._stream)),
            Route(STYLE_PATH, _guarded(partial(_asset, partial(style_sheet, __package__, "static", "live.css"), "text/css"))),
            Route(SCRIPT_PATH, _guarded(partial(_asset, _script, "text/javascript"))),
        ]

    async def _page(self, request: Request) -> Response:
        model = await self.feed.model(choice_of(request.url.query))
        problems = (*self._watch.latest.problems, *self._problems())
        return HTMLResponse(page(model, problems, self._links), headers=HEADERS)

    async def _stream(self, request: Request) -> Response:
        messages = self.feed.messages(choice_of(request.url.query))
        return StreamingResponse(messages, headers=_STREAM_HEADERS, media_type="text/event-stream")


def _refusal_of(request: Request) -> Problem | None:
    """Return the reason to refuse a request: the API's rules for reading apply, because the page shows the same data."""
    channel = "socket" if access.is_unix(request.scope) else access.access_channel(request.scope)
    authenticated = bool(request.scope.get(access.LET_IN))
    # tokens are for the API: a client that sends one with every request sees the same as without
    headers = {name: value for name, value in request.headers.items() if name not in access.TOKEN_HEADERS}
    return access.refusal("GET", headers, channel, access.Token(None), authenticated=authenticated)


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        problem = _refusal_of(request)
        return await handler(request) if problem is None else PlainTextResponse(f"{problem.detail}\n", problem.status)

    return guarded


async def _asset(content: Callable[[], str], media_type: str, _: Request) -> Response:
    return Response(content(), media_type=media_type, headers=HEADERS)


@cache
def _script() -> str:
    return resources.files(__package__).joinpath("static").joinpath("live.js").read_text(encoding="utf-8")
