"""The metrics page: one render for each snapshot, format and compression, and the scrapers that have received it.

Simultaneous scrapes share one page, so that all but the first are served from the cache.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from starlette.responses import PlainTextResponse

from torchobs.exporter import text_format
from torchobs.exporter.exporter_metrics import ScrapeInput, Scrapes
from torchobs.exporter.exposition import Exposition, SeriesLimits
from torchobs.exporter.snapshot_cache import DEADLINE_S
from torchobs.ranks.snapshot import EMPTY, MOST_SERIES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import ModuleType

    from starlette.types import Receive, Scope, Send

    from torchobs.exporter.config import ExporterConfig


PATIENCE_S = 30.0
"""Least time after its last scrape for which a scraper is expected: twice Prometheus' usual interval"""
_LATE_S = 5.0
"""How much later than by its longest interval a scrape may come"""
_REMEMBERED_S = 300.0
"""How long a scraper that has come once is expected, and any scraper at most"""
_MOST_SCRAPERS = 64

Client = tuple[str, int]
"""The address and the port of a connection's other end"""


class _Scraper(NamedTuple):
    name: str
    """address and user agent"""
    last_s: float
    shortest_s: float | None
    """shortest time between two scrapes; ``None``: it has come once"""
    longest_s: float | None
    declared: bool
    number: int
    """newest snapshot that it has received"""
    final: int
    """newest snapshot that it has received with every value shown"""


class ScrapeTracker:
    """The recent scrapers. Times are CLOCK_MONOTONIC in seconds.

    A scraper is a connection, for two Prometheus servers of one pair can have one address (a node's, or a gateway's). A new
    connection continues a closed one of the same address and user agent.
    """

    def __init__(self, is_open: Callable[[Client], bool] = lambda _: False) -> None:
        """``is_open`` returns whether there is still a connection with this other end."""
        self._is_open = is_open
        self._scrapers: dict[Client, _Scraper] = {}
        self.last_s: float | None = None
        self.timeout_s = 0.0
        """the longest scrape timeout that was declared"""

    def record(
        self, client: Client, agent: str, number: int, now_s: float, *, timeout_s: float | None, final: bool = True
    ) -> None:
        """Record that a client has received the page of a snapshot.

        ``timeout_s``: the scrape timeout that it declared, as scrapers do; ``final``: the page showed every value.
        """
        name = f"{client[0]} {agent}"
        before = self._scrapers.pop(client, None) or self._closed(name)
        shortest_s = longest_s = gap_s = now_s - before.last_s if before else None
        if before and gap_s is not None and before.shortest_s is not None and before.longest_s is not None:
            shortest_s, longest_s = min(gap_s, before.shortest_s), max(gap_s, before.longest_s)
        whole = number if final else before.final if before else 0
        self._scrapers[client] = _Scraper(name, now_s, shortest_s, longest_s, timeout_s is not None, number, whole)
        self.last_s, self.timeout_s = now_s, max(self.timeout_s, timeout_s or 0.0)
        while len(self._scrapers) > _MOST_SCRAPERS:
            del self._scrapers[next(iter(self._scrapers))]

    def waiting(self, number: int, now_s: float) -> list[str]:
        """Return the expected scrapers that have not received a final page as new as ``number``."""
        return [scraper.name for scraper in self._expected(now_s) if scraper.final < number]

    def got(self, number: int) -> bool:
        """Return whether any scraper has received a final page as new as ``number``."""
        return any(scraper.final >= number for scraper in self._scrapers.values())

    def acknowledged(self, now_s: float) -> int:
        """Return the newest snapshot number such that all expected scrapers have its page or a newer one."""
        expected = [scraper.number for scraper in self._expected(now_s)]
        return min(expected or [scraper.number for scraper in self._scrapers.values()], default=0)

    def interval_s(self, now_s: float) -> float | None:
        """Return the scrape interval of the slowest expected scraper; ``None``: none has come twice."""
        intervals = [scraper.shortest_s for scraper in self._expected(now_s) if scraper.shortest_s is not None]
        return max(intervals, default=None)

    def _expected(self, now_s: float) -> list[_Scraper]:
        return [scraper for scraper in self._scrapers.values() if now_s - scraper.last_s <= _patience_s(scraper)]

    def _closed(self, name: str) -> _Scraper | None:
        """Take out the scraper of that name that has waited longest for a new connection."""
        closed = [client for client, scraper in self._scrapers.items() if scraper.name == name and not self._is_open(client)]
        return self._scrapers.pop(closed[0]) if closed else None


def _patience_s(scraper: _Scraper) -> float:
    if scraper.longest_s is None:
        return _REMEMBERED_S if scraper.declared else -1.0  # a person with curl
    return min(max(PATIENCE_S, scraper.longest_s + _LATE_S), _REMEMBERED_S)


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

    def __init__(self, config: ExporterConfig, series_limit: int = MOST_SERIES) -> None:
        """``series_limit``: most lines of all ranks together."""
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        others = [sample.name for family in self._registry.collect() for sample in family.samples]
        limits = SeriesLimits(series_limit, config.drop_metrics)
        self._exposition = Exposition(others, limits=limits, host=bool(config.collect_host))
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
        families = self._exposition.families(scrape, chosen, acknowledged)
        pieces = text_format.pieces(chosen, chosen.foreign(self._registry), families)
        body = gzipped(pieces) if compressed else b"".join(pieces)
        return Page(body, chosen.content_type, scrape.snapshot.number, not self._exposition.is_holding)


def gzipped(page: Iterable[bytes]) -> bytes:
    """Return a page, given in pieces, as one gzip member, because some readers stop after the first member.

    The pieces are rendered and compressed in turn, while each is in the processor's cache; joining them first would take 0.8 ms
    more for 10,000 series, and as much memory as the page.
    """
    stream = compressor.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    return b"".join([*map(stream.compress, page), stream.flush()])


_REFUSED = re.compile(r"q=0(\.0*)?")


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether the header has gzip, unless with a weight of 0, which refuses it (RFC 9110, 12.4.2)."""
    codings = ("".join(coding.lower().split()).partition(";") for coding in accept_encoding.split(","))
    return any(name == "gzip" and not _REFUSED.fullmatch(weight) for name, _, weight in codings)


_SCRAPE_TIMEOUT = b"x-prometheus-scrape-timeout-seconds"
_METHODS = ("GET", "HEAD")
_misdirected = PlainTextResponse(
    "Misdirected Request: the exporter of another pod listens here. Give one of the two a port of its own.\n", 421
)
_not_allowed = PlainTextResponse("Method Not Allowed", 405, {"Allow": ", ".join(_METHODS)})


class MetricsPage:
    """Plain ASGI application: a framework would take a fifth of the scrape of a cached page (0.13 of 0.66 ms)."""

    def __init__(
        self,
        fresh: Callable[[float], Awaitable[ScrapeInput]],
        pages: PageCache,
        scrapers: ScrapeTracker,
        pod_uid: str | None = None,
    ) -> None:
        """``fresh`` returns the input of a page within the given number of seconds; ``pod_uid``: the exporter's own pod."""
        self._fresh, self._pages, self._scrapers, self._pod_uid = fresh, pages, scrapers, pod_uid
        self.scrapes = Scrapes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["method"] not in _METHODS:
            await _not_allowed(scope, receive, send)
            return
        begun_s = time.monotonic()
        if self._is_meant_for_another(scope):
            await _misdirected(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}  # the first of duplicates wins
        timeout_s = _timeout_s(headers.get(_SCRAPE_TIMEOUT))
        scrape = await self._fresh(DEADLINE_S if timeout_s is None else min(DEADLINE_S, max(0.1, timeout_s / 2)))
        compressed = accepts_gzip(headers.get(b"accept-encoding", ""))
        acknowledged = self._scrapers.acknowledged(time.monotonic())
        page = await self._pages.get(scrape, headers.get(b"accept", ""), compressed=compressed, acknowledged=acknowledged)
        sent = [
            (b"content-type", page.content_type.encode()),
            (b"content-length", str(len(page.body)).encode()),
            (b"vary", b"Accept, Accept-Encoding"),
            *([(b"content-encoding", b"gzip")] if compressed else []),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": sent})
        await send({"type": "http.response.body", "body": page.body})
        # noted only after it was sent: during shutdown the exporter waits until scrapers have received the page
        if scope["method"] == "GET":
            client, agent, now_s = tuple(scope["client"] or ("", 0)), headers.get(b"user-agent", "")[:200], time.monotonic()
            self._scrapers.record(client, agent, page.number, now_s, timeout_s=timeout_s, final=page.final)
            self.scrapes = Scrapes(self.scrapes.served + 1, self.scrapes.seconds + now_s - begun_s)

    def _is_meant_for_another(self, scope: Scope) -> bool:
        """Return whether the query names a pod, and another one: on the node's network two pods have one address."""
        query: bytes = scope.get("query_string", b"")
        asked = parse_qs(query.decode("latin-1")).get("pod") if query and self._pod_uid else None
        return asked is not None and asked[0] != self._pod_uid


def _timeout_s(declared: str | None) -> float | None:
    """Return the scraper's own timeout, in seconds; ``None`` if it declared none."""
    try:
        timeout_s = float(declared or "")
    except ValueError:
        return None
    return timeout_s if isfinite(timeout_s) else None
