"""The exporter's ASGI application: health checks, and the routes to the metrics page, the web page (``ui``) and the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from torchobs.exporter.exporter_metrics import NO_FAILED_WRITES, PushCounts, ScrapeInput, Scrapes
from torchobs.exporter.metrics_page import MetricsPage
from torchobs.exporter.page import LivePage
from torchobs.ranks.snapshot import EMPTY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.host import HostMetrics
    from torchobs.exporter.metrics_page import PageCache, ScrapeTracker
    from torchobs.exporter.snapshot_cache import SnapshotCache
    from torchobs.ranks.snapshot import Snapshot


class Site:
    """The handlers.

    ``problems`` returns the present errors of the configuration, ``advice`` what the page says besides, ``evidence`` the ranks'
    artifacts.
    """

    def __init__(
        self, config: ExporterConfig, snapshots: SnapshotCache, pages: PageCache, scrapers: ScrapeTracker,
        problems: Callable[[], tuple[str, ...]], advice: Callable[[], tuple[str, ...]],
        evidence: Callable[[], Awaitable[Sequence[Any]]],
    ) -> None:  # fmt: skip
        self._snapshots, self._problems, self._telemetry_path = snapshots, problems, config.telemetry_path
        self._metrics = MetricsPage(self._fresh, pages, scrapers, config.pod_uid)
        self.pushed: Mapping[str, PushCounts] | None = None
        self.failed_writes: Mapping[str, int] = NO_FAILED_WRITES
        self.scrapes = Scrapes()
        self.host: HostMetrics | None = None
        links = (
            (config.telemetry_path, "Metrics"),
            ("/api/v1/openapi.json", "API"),
            ("/-/healthy", "healthy"),
            ("/-/ready", "ready"),
        )
        self.live = LivePage(snapshots, lambda: (*problems(), *advice()), links, evidence)

    def scrape_input(self, snapshot: Snapshot) -> ScrapeInput:
        """Return the input of a metrics page of that snapshot."""
        host = self.host.latest if self.host is not None else None
        return ScrapeInput(
            snapshot, self._snapshots.timeouts, self._problems(), self.pushed, self.failed_writes, self.scrapes, host
        )

    def count_scrapes(self) -> None:
        """Take over the number of pages served so far: once a second, so that scrapes of one second share a page."""
        self.scrapes = self._metrics.scrapes

    def app(self, more: Iterable[BaseRoute] = ()) -> ASGIApp:
        """Return the application; ``more``: additional routes of a listener."""
        others = Starlette(
            routes=[
                Route(self._telemetry_path, self._metrics),
                Route("/-/healthy", self._healthy),
                Route("/-/ready", self._ready),
                *self.live.routes(),
                *more,
            ]
        )

        async def front(scope: Scope, receive: Receive, send: Send) -> None:
            # bypasses the router, for speed: see ``metrics_page``
            is_metrics = scope["type"] == "http" and scope["path"] == self._telemetry_path
            await (self._metrics if is_metrics else others)(scope, receive, send)

        return front

    async def _fresh(self, deadline_s: float) -> ScrapeInput:
        snapshot = await self._snapshots.fresh(deadline_s=deadline_s)
        if self.host is not None:
            await self.host.look()
        return self.scrape_input(snapshot)

    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("torchobs exporter is healthy.\n")

    async def _ready(self, _: Request) -> Response:
        # a missing directory or a taken port do not count: Kubernetes' reaction would hold up the training
        if self._snapshots.latest is EMPTY:
            return PlainTextResponse("torchobs exporter has not looked at the flight files yet.\n", 503)
        return PlainTextResponse("torchobs exporter is ready.\n")
