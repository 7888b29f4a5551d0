"""The metrics page without a server: what may be asked, and who is remembered to have asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.prometheus.handler import MetricsPage
from torchobs.exporter.prometheus.page_cache import Page
from torchobs.exporter.prometheus.scrape_tracker import ScrapeTracker
from torchobs.ranks.snapshot import EMPTY

TIMEOUT = b"x-prometheus-scrape-timeout-seconds"


class Pages:
    """One page, whatever is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.acknowledged = list[int]()

    async def get(self, _: ScrapeInput, accept: str, *, compressed: bool, acknowledged: int) -> Page:
        """See :class:`torchobs.exporter.prometheus.page_cache.PageCache`."""
        self.asked.append((accept, compressed))
        self.acknowledged.append(acknowledged)
        return Page(b"page\n", "text/plain", 7)


class Asked:
    """What came of a request."""

    def __init__(
        self, method: str = "GET", *headers: tuple[bytes, bytes], query: bytes = b"", pod_uid: str | None = None
    ) -> None:
        self.pages, self.scrapers, self.deadlines_s = Pages(), ScrapeTracker(), list[float]()
        self.sent: list[Any] = []
        page = MetricsPage(self._fresh, self.pages, self.scrapers, pod_uid)  # type: ignore[arg-type]  # as far as it is used
        scope = {"type": "http", "method": method, "path": "/metrics", "client": ("10.0.0.1", 1), "headers": [*headers]}
        scope["query_string"] = query
        asyncio.run(page(scope, self._receive, self._send))
        self.scrapes = page.scrapes
        self.status, self.headers = self.sent[0]["status"], dict(self.sent[0]["headers"])

    async def _fresh(self, deadline_s: float) -> ScrapeInput:
        self.deadlines_s.append(deadline_s)
        return ScrapeInput(EMPTY)

    async def _receive(self) -> Any:
        return {"type": "http.request"}

    async def _send(self, message: Any) -> None:
        assert not self.scrapers.got(7), "noted before it was sent"
        self.sent.append(message)


def test_a_scraper_that_got_its_page_is_remembered() -> None:
    """By its address and name, and only then: an exporter that leaves waits for pages that arrived."""
    asked = Asked("GET", (b"user-agent", b"Prometheus/3"), (TIMEOUT, b"10"))
    assert asked.scrapers.got(7)
    assert asked.scrapers.waiting(8, asked.scrapers.last_s or 0.0) == ["10.0.0.1 Prometheus/3"]
    assert asked.sent[1]["body"] == b"page\n"
    assert asked.headers[b"content-length"] == b"5"
    assert asked.scrapes.served == 1
    assert asked.scrapes.seconds >= 0


def test_who_asks_for_the_head_has_got_no_page() -> None:
    """The same headers; nobody is noted."""
    asked = Asked("HEAD")
    assert (asked.status, asked.headers[b"content-length"]) == (200, b"5")
    assert not asked.scrapers.got(7)
    assert asked.scrapes.served == 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_else_can_be_done_with_it(method: str) -> None:
    """Refused, with what is possible, before anything is looked at."""
    asked = Asked(method)
    assert (asked.status, asked.headers[b"allow"]) == (405, b"GET, HEAD")
    assert (asked.deadlines_s, asked.pages.asked) == ([], [])


@pytest.mark.parametrize(
    ("query", "pod_uid", "status"),
    [
        (b"pod=b", "a", 421),
        (b"pod=%ff&&=", "a", 421),
        (b"pod=\xff", "a", 421),
        (b"pod=a", "a", 200),
        (b"pod=a&pod=b", "a", 200),
        (b"pod=", "a", 200),
        (b"x=1", "a", 200),
        (b"", "a", 200),
        (b"pod=b", None, 200),
    ],
)
def test_who_asks_for_another_pod_gets_no_page(query: bytes, pod_uid: str | None, status: int) -> None:
    """Two pods with the node's network have one address: the page of one is not that of the other, and nobody is noted."""
    asked = Asked("GET", (TIMEOUT, b"10"), query=query, pod_uid=pod_uid)
    assert (asked.status, asked.scrapers.got(7)) == (status, status == 200)


def test_the_first_of_two_headers_counts() -> None:
    """As everywhere else in the exporter; and what is no text is no error."""
    asked = Asked("GET", (b"accept", b"text/plain"), (b"accept", b"\xff"), (b"accept-encoding", b"gzip"))
    assert asked.pages.asked == [("text/plain", True)]
    assert asked.headers[b"content-encoding"] == b"gzip"
