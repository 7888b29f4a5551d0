"""Cache of the rendered metrics page: rendered once per snapshot and format, however many scrapers there are."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.prometheus import text_format
from torchobs.exporter.prometheus.compression import gzipped
from torchobs.exporter.prometheus.exposition import Exposition
from torchobs.exporter.prometheus.series_limits import SeriesLimits
from torchobs.ranks.memory_budget import MOST
from torchobs.ranks.snapshot import EMPTY

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig


class Page(NamedTuple):
    """A rendered page. ``number``: that of its snapshot."""

    body: bytes
    content_type: str
    number: int
    final: bool = True
    """whether it shows every value of the snapshot: no counter is held at 0 (``quiet_series``)"""


class PageCache:
    """Renders pages and keeps those of the newest snapshot. To be used in one event loop."""

    def __init__(self, config: ExporterConfig, series_limit: int = MOST) -> None:
        """``series_limit``: most lines of all ranks together."""
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        others = [sample.name for family in self._registry.collect() for sample in family.samples]
        limits = SeriesLimits(config.series_limit, series_limit, config.drop_metrics)
        self._exposition = Exposition(others, limits=limits, created=config.created_samples, host=bool(config.collect_host))
        self._thread = ThreadPoolExecutor(1, "render")
        self._facts = ScrapeInput(EMPTY)
        self._pages: dict[tuple[str, bool], asyncio.Future[tuple[bytes, bool]]] = {}

    async def get(self, facts: ScrapeInput, accept: str, *, compressed: bool, acknowledged: int = 0) -> Page:
        """Return the page in the format that the ``Accept`` header asks for.

        ``acknowledged``: number of a snapshot; every expected scraper has received its page or a newer one.
        """
        if facts != self._facts:
            self._facts, self._pages = facts, {}
        chosen = text_format.negotiate(accept)
        pages, key = self._pages, (chosen.content_type, compressed)
        if key not in pages:
            loop = asyncio.get_running_loop()
            pages[key] = loop.run_in_executor(self._thread, self._render, facts, chosen, compressed, acknowledged)
        body, final = await asyncio.shield(pages[key])
        return Page(body, chosen.content_type, facts.snapshot.number, final)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False)

    def _render(
        self,
        facts: ScrapeInput,
        chosen: text_format.Format,
        compressed: bool,  # noqa: FBT001  # run_in_executor takes no keywords
        acknowledged: int,
    ) -> tuple[bytes, bool]:
        families = self._exposition.families(facts, chosen.style, acknowledged)
        page = text_format.pieces(chosen.style, chosen.foreign(self._registry), families)
        body = gzipped(page) if compressed else b"".join(page)
        return body, not self._exposition.holding
