"""The metrics page as bytes: once per snapshot and format, however many scrapers ask."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from torchobs.exporter import encoder
from torchobs.exporter.compression import gzipped
from torchobs.exporter.described import Facts
from torchobs.exporter.exposition import Exposition
from torchobs.exporter.limits import Limits
from torchobs.exporter.memory import MOST
from torchobs.exporter.scan import EMPTY

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig


class Page(NamedTuple):
    """A rendered page. ``number`` is its snapshot's."""

    body: bytes
    content_type: str
    number: int


class Pages:
    """Renders pages, and keeps those of the newest facts. To be used in one event loop."""

    def __init__(self, config: ExporterConfig, series_limit: int = MOST) -> None:
        """``series_limit``: lines of all ranks."""
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        others = [sample.name for family in self._registry.collect() for sample in family.samples]
        limits = Limits(config.series_limit, series_limit, config.drop_metrics)
        self._exposition = Exposition(others, limits=limits, created=config.created_samples, host=bool(config.collect_host))
        self._thread = ThreadPoolExecutor(1, "render")
        self._facts = Facts(EMPTY)
        self._pages: dict[tuple[str, bool], asyncio.Future[bytes]] = {}

    async def get(self, facts: Facts, accept: str, *, compressed: bool) -> Page:
        """Return the page of ``facts`` in the format that an ``Accept`` header asks for."""
        if facts != self._facts:
            self._facts, self._pages = facts, {}
        chosen = encoder.negotiate(accept)
        pages, key = self._pages, (chosen.content_type, compressed)
        if key not in pages:
            loop = asyncio.get_running_loop()
            pages[key] = loop.run_in_executor(self._thread, self._render, facts, chosen, compressed)
        return Page(await asyncio.shield(pages[key]), chosen.content_type, facts.snapshot.number)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _render(self, facts: Facts, chosen: encoder.Format, compressed: bool) -> bytes:  # noqa: FBT001  # run_in_executor takes no keywords
        families = self._exposition.families(facts, chosen.style)
        page = encoder.pieces(chosen.style, chosen.foreign(self._registry), families)
        return gzipped(page) if compressed else b"".join(page)
