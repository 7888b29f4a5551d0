"""The live page: its routes, and the stream of server-sent events that keeps it up to date."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from torchobs.document import html
from torchobs.document.live import WAITING, Choice, chosen_run, model, page_document
from torchobs.document.markup import EMPTY, Html, asset, joined, named, tag
from torchobs.exporter import access
from torchobs.exporter.snapshot_cache import DEADLINE_S, FRESH_S
from torchobs.ranks.live import DetailsReader, RunsReader, key_of
from torchobs.ranks.snapshot import grouped

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from starlette.requests import Request

    from torchobs.document.blocks import Document
    from torchobs.document.live import Model
    from torchobs.exporter.snapshot_cache import SnapshotCache
    from torchobs.ranks.live import Details
    from torchobs.ranks.snapshot import Rank, Snapshot


TICK_S = 1.0
RELAXATION = 4.0
"""An update is followed by a pause of at least this many times its duration: at most a fifth of a core is used."""

MOST_VIEWERS = 16
LIFE_S = 50.0
"""Length of a stream, after which its viewer reconnects: the server closes responses that take 60 s."""

REST_S = 60.0
"""How long data is kept after the last viewer has gone."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Response headers: forbid inline script and style, and framing."""

T = TypeVar("T")


Parts = dict[str, str]
"""Content by element id; also ``title``, and ``stream``, the URL to reconnect to"""

STREAM_PATH, STYLE_PATH, SCRIPT_PATH = "/live/stream", "/live/live.css", "/live/live.js"
PARTS = {
    "health": "Health", "runs": "Runs", "figures": "Key figures", "curves": "Curves", "ranks": "Ranks", "details": "Details",
    "events": "Events", "evidence": "Evidence", "layers": "Layers",
}  # fmt: skip
"""The sections' ids, with names for screen readers"""
_MOST_QUERY = 16_000
"""Longest query: a run's name comes from a header of 4 KiB, and each byte may take three in a query"""
_MOST_PAGE = 1000


def choice_of(query: str) -> Choice:
    """Return the choice in a query string. Invalid parts are ignored, never an error."""
    try:
        fields = parse_qs(query[:_MOST_QUERY], max_num_fields=16)
    except ValueError:
        return Choice()
    parts = {name: fields[name][0] for name in ("run", "rank", "sort", "layers") if name in fields}
    page = fields.get("page", ["1"])[0]
    return Choice(**parts, page=min(int(page), _MOST_PAGE) if page.isdecimal() and page.isascii() else 1)


def focused(ranks: Iterable[Rank], choice: Choice) -> str | None:
    """Return the incarnation of the chosen rank, which is shown with curves and details."""
    members = chosen_run({key_of(run): run for run in grouped(ranks)}, choice) or []
    return next((rank.incarnation for rank in members if rank.rank == choice.rank), members[0].incarnation if members else None)


def stream_of(choice: Choice) -> str:
    """Return the URL of the event stream for a choice."""
    return f".{STREAM_PATH}{choice.query}"


def rendered(document: Document) -> Parts:
    """Return every section's content by its element's ``id``, and the heading."""
    sections = {section.name: html.content(section) for section in document.sections}
    run = [" ", tag("span", named(document.subtitle), class_="run")] if document.subtitle else []
    parts = {"health": html.verdict(document), "heading": joined([named(document.title), *run])}
    title = "torchobs exporter" if document.badge[0] == WAITING else html.title(document)
    return {**dict.fromkeys(PARTS, EMPTY), **sections, **parts, "title": title}


def page(shown: Model, problems: Sequence[str], links: Sequence[tuple[str, str]]) -> str:
    """Return the page. ``links``: the exporter's other pages, as (path, name)."""
    document = page_document(shown)
    parts = rendered(document)
    sections = [
        tag("section", Html(parts[name]), id=name, aria_label=label, tabindex="-1" if name == "ranks" else None)
        for name, label in PARTS.items()
    ]
    status = tag("p", "As of when it was loaded", id="link", class_="link", data_state="still")
    pause = tag("button", "Pause", type="button", id="pause", hidden=True)
    others = tag("nav", *(tag("a", words, href=f".{path}") for path, words in links), aria_label="Elsewhere")
    heading = tag("h1", Html(parts["heading"]), id="heading")
    body = tag(
        "body",
        tag("a", "Skip to the ranks", href="#ranks", class_="skip"),
        tag("header", heading, tag("div", status, pause, class_="controls"), others),
        tag("main", *(tag("p", tag("strong", problem), role="alert", class_="problem") for problem in problems), *sections),
        html.footer(document),
        data_stream=stream_of(shown.choice),
    )
    links_of_head = [tag("link", rel="stylesheet", href=f".{STYLE_PATH}"), tag("script", src=f".{SCRIPT_PATH}", defer=True)]
    return html.whole(parts["title"], links_of_head, body)


class Feed:
    """Renders updates for all viewers. One per exporter; to be used in one event loop."""

    def __init__(self, watch: SnapshotCache, evidence: Callable[[], Awaitable[Sequence[Any]]]) -> None:
        """``evidence`` returns the ranks' artifacts."""
        self._watch, self._evidence = watch, evidence
        self._details, self._runs = DetailsReader(), RunsReader()
        self._thread = ThreadPoolExecutor(1, "page")
        self._reading = asyncio.Lock()
        self._parts: Mapping[Choice, Parts] = {}
        """the last update, rendered for every choice that has viewers"""
        self._changed = asyncio.Event()
        self._viewers: dict[object, Choice] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._closed = self._done = False

    async def model(self, choice: Choice) -> Model:
        """Return the current view model; without the files' details if reading them takes too long."""
        models = await self._models([choice], FRESH_S)
        self._expire()
        return models[choice]

    async def messages(self, choice: Choice) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: first everything, then the changes once a second, up to the stream's time limit.

        Nothing is queued: a slow viewer gets fewer events, not late ones.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            yield _event("end", {"full": True})
            return
        viewer, sent = object(), dict[str, str]()
        self._viewers[viewer] = choice
        until = asyncio.get_running_loop().time() + LIFE_S
        try:
            if self._ticker is None or self._ticker.done():
                self._ticker = asyncio.get_running_loop().create_task(self._tick())
            while not self._closed and asyncio.get_running_loop().time() < until:
                update, changed = self._parts, self._changed
                parts = update.get(choice, {})
                if new := {name: part for name, part in parts.items() if sent.get(name) != part}:
                    sent |= new
                    yield _event("parts", new)
                elif parts:
                    yield _event("same", {})
                if self._parts is update:
                    await changed.wait()
            yield _event("end", {"gone": self._closed} | ({"done": True} if self._done else {}))
        finally:
            del self._viewers[viewer]

    @property
    def viewers(self) -> int:
        """Number of viewers."""
        return len(self._viewers)

    def close(self, *, done: bool = False) -> None:
        """End all streams, so that the server need not wait. ``done``: all ranks have ended, as viewers are to read."""
        self._closed, self._done = True, done
        self._wake()
        if self._ticker is not None:
            self._ticker.cancel()  # it would want the thread that ends here
        self._thread.shutdown(wait=False)

    async def _tick(self) -> None:
        while self._viewers and not self._closed:
            began = time.perf_counter()
            models = await self._models(set(self._viewers.values()), TICK_S / 2)
            self._parts = await self._in_thread(partial(_parts, models))
            self._wake()
            await asyncio.sleep(max(TICK_S, RELAXATION * (time.perf_counter() - began)))
        self._expire()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _models(self, choices: Collection[Choice], max_age_s: float) -> dict[Choice, Model]:
        snapshot = await self._watch.fresh(max_age_s)
        details = await _in_time(self._read(snapshot, choices), {})
        evidence = await _in_time(self._evidence(), ())

        def models() -> dict[Choice, Model]:
            runs = self._runs.runs(snapshot, details, {choice.run for choice in choices})
            return {choice: model(runs, choice, evidence, time.time()) for choice in choices}

        return await self._in_thread(models)

    async def _read(self, snapshot: Snapshot, choices: Collection[Choice]) -> Details:
        focus = [incarnation for choice in choices if (incarnation := focused(snapshot.ranks, choice))]
        async with self._reading:
            return await self._watch.ask(lambda scan: self._details.gather(scan, snapshot, focus))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _expire(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._rest = asyncio.get_running_loop().call_later(REST_S, self._forget)

    def _forget(self) -> None:
        if not self._viewers:
            self._details, self._runs, self._parts = DetailsReader(), RunsReader(), {}


async def _in_time(answer: Awaitable[T], otherwise: T) -> T:
    """Return the awaited result, or ``otherwise`` if it takes too long, as on a hanging file system."""
    try:
        return await asyncio.wait_for(answer, DEADLINE_S)
    except asyncio.TimeoutError:
        return otherwise


def _parts(models: Mapping[Choice, Model]) -> dict[Choice, Parts]:
    parts: dict[Choice, Parts] = {}
    for choice, view in models.items():
        parts[choice] = rendered(page_document(view))
        if view.run and not choice.run:  # a page opened before any run: from now on it shows this one
            parts[choice]["stream"] = stream_of(choice._replace(run=view.run.key))
    return parts


def _event(kind: str, fields: Mapping[str, object]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()


_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Accel-Buffering": "no"}


class LivePage:
    """The handlers. ``problems`` returns the exporter's problems, ``links`` are its other pages as (path, name)."""

    def __init__(
        self, watch: SnapshotCache, problems: Callable[[], Sequence[str]], links: Sequence[tuple[str, str]],
        evidence: Callable[[], Awaitable[Sequence[Any]]],
    ) -> None:  # fmt: skip
        """``evidence`` returns the ranks' artifacts, as in the API."""
        self._watch, self._problems, self._links = watch, problems, links
        self.feed = Feed(watch, evidence)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", guarded(self._page)),
            Route(STREAM_PATH, guarded(self._stream)),
            Route(STYLE_PATH, guarded(partial(served_asset, ("shared.css", "live.css"), "text/css"))),
            Route(SCRIPT_PATH, guarded(partial(served_asset, ("live.js",), "text/javascript"))),
        ]

    async def _page(self, request: Request) -> Response:
        model = await self.feed.model(choice_of(request.url.query))
        problems = (*self._watch.latest.problems, *self._problems())
        return HTMLResponse(page(model, problems, self._links), headers=HEADERS)

    async def _stream(self, request: Request) -> Response:
        messages = self.feed.messages(choice_of(request.url.query))
        return StreamingResponse(messages, headers=_STREAM_HEADERS, media_type="text/event-stream")


def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler behind the API's rules for reading: the page shows the same data."""

    async def guarded(request: Request) -> Response:
        channel = "socket" if access.is_unix(request.scope) else access.access_channel(request.scope)
        let_in = bool(request.scope.get(access.LET_IN))
        # tokens are for the API: a client that sends one with every request sees the same as without
        headers = {name: value for name, value in request.headers.items() if name not in access.TOKEN_HEADERS}
        problem = access.refusal("GET", headers, channel, access.Token(None), authenticated=let_in)
        return await handler(request) if problem is None else PlainTextResponse(f"{problem.detail}\n", problem.status)

    return guarded


async def served_asset(names: Sequence[str], media_type: str, _: Request) -> Response:
    """Return files of ``document`` as one response."""
    return Response(asset(*names), media_type=media_type, headers=HEADERS)
