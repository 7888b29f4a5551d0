"""Cache of the rendered metrics page: rendered once per snapshot, format and compression, however many scrapers there are."""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.prometheus import text_format
from torchobs.exporter.prometheus.exposition import Exposition
from torchobs.exporter.prometheus.rank_series import SeriesLimits
from torchobs.ranks.memory_budget import MOST
from torchobs.ranks.snapshot import EMPTY

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from torchobs.exporter.config import ExporterConfig

# zlib takes a third of a page's time; ISA-L needs a quarter of zlib's, and has wheels for x86-64 and ARM
compressor: ModuleType
try:
    from isal import isal_zlib as compressor
except ImportError:  # no wheel for this processor
    compressor = zlib

_LEVEL = 1
"""Level 1 makes a page 8 times smaller; zlib's level 6 takes 2.3 times as long to make it 9 times smaller."""
_GZIP = 31
"""``wbits`` of the gzip format with the largest window (zlib's manual, ``deflateInit2``)"""


class Page(NamedTuple):
    """A rendered page. ``number``: that of its snapshot."""

    body: bytes
    content_type: str
    number: int
    final: bool = True
    """whether it shows every value of the snapshot: no counter is held at 0 (``QuietSeries``)"""


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
        self._scrape = ScrapeInput(EMPTY)
        self._pages: dict[tuple[str, bool], asyncio.Future[Page]] = {}

    async def get(self, scrape: ScrapeInput, accept: str, *, compressed: bool, acknowledged: int = 0) -> Page:
        """Return the page in the format that the ``Accept`` header asks for.

        ``acknowledged``: number of a snapshot; every expected scraper has received its page or a newer one.
        """
        if scrape != self._scrape:
            self._scrape, self._pages = scrape, {}
        chosen = text_format.negotiate(accept)
        pages, key = self._pages, (chosen.content_type, compressed)
        if key not in pages:
            render = partial(self._render, scrape, chosen, compressed=compressed, acknowledged=acknowledged)
            pages[key] = asyncio.get_running_loop().run_in_executor(self._thread, render)
        return await asyncio.shield(pages[key])

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False)

    def _render(self, scrape: ScrapeInput, chosen: text_format.Format, *, compressed: bool, acknowledged: int) -> Page:
        families = self._exposition.families(scrape, chosen.style, acknowledged)
        pieces = text_format.pieces(chosen.style, chosen.foreign(self._registry), families)
        body = gzipped(pieces) if compressed else b"".join(pieces)
        return Page(body, chosen.content_type, scrape.snapshot.number, not self._exposition.is_holding)


def gzipped(page: Iterable[bytes]) -> bytes:
    """Return a page, given in pieces, as one gzip member, because some readers stop after the first member.

    The pieces are rendered and compressed in turn, while each is in the processor's cache; joining them first would take 0.8 ms
    more for 10,000 series, and as much memory as the page.
    """
    made = compressor.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    return b"".join([*map(made.compress, page), made.flush()])
