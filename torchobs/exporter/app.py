"""The exporter's HTTP side: the metrics page and health; the page for people is `live`."""

from __future__ import annotations

import time
from math import isfinite
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from torchobs.exporter.described import NOTHING_LOST, Facts
from torchobs.exporter.live.site import LivePage
from torchobs.exporter.scan import EMPTY
from torchobs.exporter.watch import DEADLINE_S
from torchobs.exporter.wishes import accepts_gzip

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from torchobs.exporter.host.look import Host
    from torchobs.exporter.otlp.ledger import Counts
    from torchobs.exporter.pages import Page, Pages
    from torchobs.exporter.scan import Snapshot
    from torchobs.exporter.scrapers import Scrapers
    from torchobs.exporter.watch import Watch

_SCRAPE_TIMEOUT = "x-prometheus-scrape-timeout-seconds"


class Site:
    """The handlers. ``problems`` is what of the configuration cannot be honoured at present."""

    def __init__(self, watch: Watch, pages: Pages, scrapers: Scrapers, telemetry_path: str) -> None:
        self._watch, self._pages, self._scrapers, self._telemetry_path = watch, pages, scrapers, telemetry_path
        self.problems: tuple[str, ...] = ()
        self.pushed: Mapping[str, Counts] | None = None
        self.lost = NOTHING_LOST
        self.host: Host | None = None
        links = ((telemetry_path, "Metrics"), ("/api/v1/openapi.json", "API"), ("/-/healthy", "healthy"), ("/-/ready", "ready"))
        self.live = LivePage(watch, lambda: self.problems, links)

    def facts(self, snapshot: Snapshot) -> Facts:
        """Return what a page of that snapshot is made of."""
        host = self.host.latest if self.host is not None else None
        return Facts(snapshot, self._watch.timeouts, self.problems, self.pushed, self.lost, host)

    def app(self, more: Iterable[BaseRoute] = ()) -> Starlette:
        """Return the application; ``more`` is what else there is on a listener."""
        return Starlette(
            routes=[
                Route(self._telemetry_path, self._metrics),
                Route("/-/healthy", self._healthy),
                Route("/-/ready", self._ready),
                *self.live.routes(),
                *more,
            ]
        )

    async def _metrics(self, request: Request) -> Response:
        headers = request.headers
        snapshot = await self._watch.fresh(deadline_s=_deadline_s(headers.get(_SCRAPE_TIMEOUT)))
        if self.host is not None:
            await self.host.look()
        facts = self.facts(snapshot)
        compressed = accepts_gzip(headers.get("accept-encoding", ""))
        page = await self._pages.get(facts, headers.get("accept", ""), compressed=compressed)
        # noted when it is sent, not before: an exporter that leaves waits for pages that arrived
        noted = BackgroundTask(self._note, request, page)
        encoding = {"Content-Encoding": "gzip"} if compressed else {}
        sent = {"Content-Type": page.content_type, "Vary": "Accept, Accept-Encoding", **encoding}
        return Response(page.body, headers=sent, background=noted)

    async def _note(self, request: Request, page: Page) -> None:
        host = request.client.host if request.client else ""
        who = f"{host} {request.headers.get('user-agent', '')[:200]}"
        declared = _SCRAPE_TIMEOUT in request.headers
        if request.method == "GET":
            self._scrapers.note(who, page.number, time.monotonic(), declared=declared)

    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("torchobs exporter is healthy.\n")

    async def _ready(self, _: Request) -> Response:
        # a missing directory or a port that is taken do not count: what Kubernetes would do about it holds up the training
        if self._watch.latest is EMPTY:
            return PlainTextResponse("torchobs exporter has not looked at the flight files yet.\n", 503)
        return PlainTextResponse("torchobs exporter is ready.\n")


def _deadline_s(declared: str | None) -> float:
    """Return how long a scrape may wait for the scan: half of the scraper's own timeout, at most the usual."""
    try:
        timeout_s = float(declared or "")
    except ValueError:
        return DEADLINE_S
    return min(DEADLINE_S, max(0.1, timeout_s / 2)) if isfinite(timeout_s) else DEADLINE_S
