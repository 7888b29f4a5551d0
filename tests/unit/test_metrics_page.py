"""The metrics page without files: formats, numbers, lines, compression, and who has scraped it."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from tests.support import for_each
from torchobs.catalog import Kind
from torchobs.exporter import metrics_page
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.metrics_page import MetricsPage, Page, ScrapeTracker
from torchobs.exporter.snapshot_cache import DEADLINE_S
from torchobs.exporter.text_format import OPENMETRICS, BlockRenderer, QuietSeries, family_of, label, negotiate, numbers
from torchobs.flight.reader import DecodedBlock, Distribution, Value
from torchobs.flight.series import Series, ValueType
from torchobs.ranks.labels import NO_EXEMPLARS
from torchobs.ranks.snapshot import EMPTY

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS_3 = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,"
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
ACCEPTED = {"": PLAIN, "application/json": PLAIN, ";;;,,,=": PLAIN, "application/openmetrics-text": OPENMETRICS_TYPE}
ACCEPTED |= {"text/plain;version=:": PLAIN, "text/plain;q=0.2,application/openmetrics-text;q=0.3": OPENMETRICS_TYPE}
ACCEPTED |= {PROMETHEUS_3: OPENMETRICS_TYPE}


@for_each({accept: (accept, content_type) for accept, content_type in ACCEPTED.items()})
def test_openmetrics_is_sent_to_whoever_takes_it(accept: str, content_type: str) -> None:
    """As prometheus-client decides; the version is the one that is written."""
    negotiated = negotiate(accept)
    assert (negotiated.content_type, negotiated.openmetrics) == (content_type, content_type == OPENMETRICS_TYPE)


@given(st.text(max_size=60) | st.lists(st.sampled_from([*";,=*/", "q", "version", "1.0.0", "text/plain", "nan"])).map("".join))
def test_nonsense_gets_what_everyone_understands(accept: str) -> None:
    """And fails nothing."""
    assert negotiate(accept).content_type.startswith(("text/plain; version=", "application/openmetrics-text; version=1.0.0"))


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE | st.floats(0, 1e6, width=32) | st.floats(1e-22, 1e-3) | st.floats(1e5, 1e17)))
def test_many_numbers_are_written_as_they_are(values: list[float]) -> None:
    """Each is read as the same number again, also beside one that is none."""
    assert [float(text) for text in numbers(values)] == values
    assert [float(text) for text in numbers([*values, inf])] == [*values, inf]
    assert numbers([inf, -inf, nan]) == ["+Inf", "-Inf", "NaN"]


def one(
    name: str, kind: Kind = Kind.GAUGE, value_type: int = ValueType.FLOAT, bounds: tuple[float, ...] = (), **attributes: str
) -> Series:
    """A series."""
    return Series(name, kind, "", "", tuple(attributes.items()), bounds, value_type, 1, 0)


ALL = (
    one("a", layer="0"), one("c", Kind.COUNTER), one("a", layer="1"), one("b"),
    one("h", Kind.HISTOGRAM, ValueType.HISTOGRAM, (1.0,)), one("mixed"), one("mixed", value_type=ValueType.INT, which="whole"),
)  # fmt: skip
FULL: list[Value | None] = [0.5, 3, 0.25, 1e-7, Distribution((1, 2), 4.5, None, None), 1.5, 7]
LINES = {
    "a": ['a{layer="0"} 0.5', 'a{layer="1"} 0.25'],
    "c": ["c_total 3.0"],
    "b": ["b 1e-7"],
    "h": ['h_bucket{le="1.0"} 1.0', 'h_bucket{le="+Inf"} 3.0', "h_count 3.0", "h_sum 4.5"],
    "mixed": ["mixed 1.5", 'mixed{which="whole"} 7.0'],
}


@pytest.fixture
def text() -> BlockRenderer:
    """The text of a block with all of them."""
    entries = [label(series, family_of(series.name, series.kind, ""), {}) for series in ALL]
    return BlockRenderer([*enumerate(entries)], OPENMETRICS, QuietSeries(1))


def lines(text: BlockRenderer, values: list[Value | None]) -> dict[str, list[str]]:
    """What is written of those values, by family."""
    block = DecodedBlock(ALL, values, whole=None not in values)
    return {chunk.heading.family: chunk.lines.split("\n")[1:] for chunk in text.lines(block, NO_EXEMPLARS)}


_SERIES = [0, 2, 1, 3, 4, 4, 4, 4, 5, 6]
"""The series that each of those lines is of"""


def test_what_has_no_value_has_no_line_and_gets_one_again(text: BlockRenderer) -> None:
    """One after the other, and all of them: the others' lines stay what they are."""
    every = [line for family in LINES.values() for line in family]
    for index in (*range(len(ALL)), None):
        values = [None if index in {None, place} else value for place, value in enumerate(FULL)]
        expected = {line for place, line in zip(_SERIES, every, strict=True) if values[place] is not None}
        assert {line for family in lines(text, values).values() for line in family} == expected
        assert lines(text, FULL) == LINES


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), Distribution((1, 2), 1.0, None, None)])
def test_a_counter_is_what_a_page_can_show(value: Value, text: BlockRenderer) -> None:
    """Neither less than zero nor not finite nor something else; it comes back when it is."""
    assert "c" not in lines(text, [FULL[0], value, *FULL[2:]])
    assert lines(text, FULL) == LINES


def page_lines(number: int) -> list[bytes]:
    """Pieces of different length that look like a page."""
    dice = random.Random(number)
    text = [f'torchobs_grad_layer_norm{{layer="{index}",rank="{index % 8}"}} {dice.random()}\n' for index in range(number)]
    return ["".join(text[at : at + 300]).encode() for at in range(0, number, 300)]


@pytest.mark.parametrize("compressor", [isal_zlib, zlib], ids=["isal", "zlib"])
@pytest.mark.parametrize(
    "page",
    [[], [b""], [b"a"], page_lines(10), page_lines(20_000), [random.Random(1).randbytes(1 << 19)], [b"x" * (1 << 22), b"y"]],
)
def test_it_is_one_member_with_a_right_checksum(page: list[bytes], compressor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for readers that stop after the first member, and for pages that do not shrink."""
    monkeypatch.setattr(metrics_page, "compressor", compressor)
    body, compressed = b"".join(page), metrics_page.gzipped(page)
    assert gzip.decompress(compressed) == body
    reader = zlib.decompressobj(wbits=31)
    assert reader.decompress(compressed) + reader.flush() == body
    assert (reader.eof, reader.unused_data) == (True, b"")
    assert len(compressed) < 1.02 * len(zlib.compress(body, 1)) + 100, "faster, and not at the network's cost"


TIMEOUT = b"x-prometheus-scrape-timeout-seconds"


class Asked:
    """What came of a request."""

    def __init__(self, *headers: tuple[bytes, bytes], query: bytes = b"", pod_uid: str | None = None) -> None:
        self.scrapers, self.deadlines_s, self.sent = ScrapeTracker(), list[float](), list[Any]()
        page = MetricsPage(self._fresh, self, self.scrapers, pod_uid)  # type: ignore[arg-type]  # as far as it is used
        scope = {"type": "http", "method": "GET", "path": "/metrics", "client": ("10.0.0.1", 1), "headers": [*headers]}
        asyncio.run(page({**scope, "query_string": query}, self._receive, self._send))
        self.status = self.sent[0]["status"]

    async def get(self, _: ScrapeInput, accept: str, *, compressed: bool, acknowledged: int) -> Page:
        """See :class:`torchobs.exporter.metrics_page.PageCache`: one page, whatever is asked for."""
        del accept, compressed, acknowledged
        return Page(b"page\n", "text/plain", 7)

    async def _fresh(self, deadline_s: float) -> ScrapeInput:
        self.deadlines_s.append(deadline_s)
        return ScrapeInput(EMPTY)

    async def _receive(self) -> Any:
        return {"type": "http.request"}

    async def _send(self, message: Any) -> None:
        assert not self.scrapers.got(7), "noted before it was sent"
        self.sent.append(message)


@pytest.mark.parametrize(
    ("query", "pod_uid", "status"),
    [(b"pod=b", "a", 421), (b"pod=\xff", "a", 421), (b"pod=a", "a", 200), (b"", "a", 200), (b"pod=b", None, 200)],
)
def test_who_asks_for_another_pod_gets_no_page(query: bytes, pod_uid: str | None, status: int) -> None:
    """Two pods with the node's network have one address: the page of one is not that of the other, and nobody is noted."""
    asked = Asked((TIMEOUT, b"10"), query=query, pod_uid=pod_uid)
    assert (asked.status, asked.scrapers.got(7)) == (status, status == 200)


@pytest.mark.parametrize(
    ("declared", "deadline_s"),
    [(b"10", DEADLINE_S), (b"1", 0.5), (b"0", 0.1), (b"-5", 0.1), (b"nan", DEADLINE_S), (b"x", DEADLINE_S)],
)
def test_a_scrape_waits_no_longer_than_its_scraper(declared: bytes, deadline_s: float) -> None:
    """Half of its timeout is for the scan, the rest for the page."""
    assert Asked((TIMEOUT, declared)).deadlines_s == [deadline_s]


ONE, OTHER = ("10.0.0.1", 40_000), ("10.0.0.1", 40_002)
"""Two connections from one address"""


def scraped(*times_s: float, number: int = 1, timeout_s: float | None = 10.0) -> ScrapeTracker:
    """Scrapes of one scraper at these times."""
    scrapers = ScrapeTracker(lambda _: True)
    for time_s in times_s:
        scrapers.record(ONE, "prometheus", number, time_s, timeout_s=timeout_s)
    return scrapers


@pytest.mark.parametrize(
    ("scrapers", "number", "at_s", "is_waited_for"),
    [
        pytest.param(ScrapeTracker(), 1, 0.0, False, id="a Job that ends before its first scrape ends"),
        pytest.param(scraped(0, 15, number=7), 7, 20.0, False, id="it has the final snapshot"),
        pytest.param(scraped(0, 15, number=7), 8, 20.0, True, id="the page that it got is older, by number"),
        pytest.param(scraped(0, 15, 30), 2, 30 + 30, True, id="two scrapes missed"),
        pytest.param(scraped(0, 60, 75, 90), 2, 90 + 65, True, id="as long as between any two scrapes, and 5 s"),
        pytest.param(scraped(0), 2, 300.0, True, id="its interval is not known yet: five minutes"),
        pytest.param(scraped(0, timeout_s=None), 2, 1.0, False, id="a person with curl"),
        pytest.param(scraped(0, 10, timeout_s=None), 2, 11.0, True, id="a second request without a timeout"),
    ],
)
def test_a_scraper_is_waited_for_until_it_has_the_final_snapshot(
    scrapers: ScrapeTracker, number: int, at_s: float, is_waited_for: int
) -> None:
    """By number, not by time; one that is gone holds nobody up."""
    assert scrapers.waiting(number, at_s) == ["10.0.0.1 prometheus"] * is_waited_for


def test_each_of_two_scrapers_behind_one_address_is_waited_for() -> None:
    """A pair of Prometheus is the usual way to have no gap; what is acknowledged is what the slowest expected one has."""
    scrapers = scraped(0, 15, number=8)
    scrapers.record(OTHER, "prometheus", 7, 16.0, timeout_s=10.0)
    assert scrapers.waiting(8, 17.0) == ["10.0.0.1 prometheus"]
    assert (scrapers.got(8), scrapers.got(9)) == (True, False)
    assert scrapers.acknowledged(16.0) == 7
    scrapers.record(OTHER, "prometheus", 9, 31.0, timeout_s=10.0)
    assert [scrapers.acknowledged(at_s) for at_s in (31.0, 15 + 30.1)] == [8, 9]
    assert ScrapeTracker().acknowledged(0.0) == 0


def test_a_new_connection_continues_a_closed_one() -> None:
    """A scraper that connects anew for each scrape is one, with an interval."""
    scrapers = ScrapeTracker(lambda client: client == OTHER)
    for scrape, at_s in enumerate((0.0, 15.0, 30.0)):
        scrapers.record(("10.0.0.1", scrape), "prometheus", scrape, at_s, timeout_s=10.0)
    assert (scrapers.interval_s(31.0), scrapers.waiting(2, 31.0)) == (15.0, [])
    scrapers.record(OTHER, "prometheus", 3, 45.0, timeout_s=10.0)
    scrapers.record(ONE, "prometheus", 3, 46.0, timeout_s=10.0)
    assert scrapers.waiting(4, 47.0) == ["10.0.0.1 prometheus"] * 2


def test_names_made_up_by_the_thousand_cost_no_memory() -> None:
    """The oldest are forgotten."""
    scrapers = ScrapeTracker(lambda _: True)
    for index in range(10_000):
        scrapers.record(("10.0.0.1", index), "curl", 1, float(index), timeout_s=10.0)
    assert len(scrapers.waiting(2, 10_000.0)) == 64


def test_a_page_with_a_counter_held_at_zero_is_not_the_final_state() -> None:
    """An exporter that leaves waits until what was held back has been scraped, too."""
    scrapers = scraped(0, 15)
    scrapers.record(ONE, "prometheus", 2, 30.0, timeout_s=10.0, final=False)
    assert scrapers.acknowledged(30.0) == 2
    assert (scrapers.waiting(2, 30.0), scrapers.got(2)) == (["10.0.0.1 prometheus"], False)
    scrapers.record(ONE, "prometheus", 3, 45.0, timeout_s=10.0)
    assert (scrapers.waiting(3, 45.0), scrapers.got(3)) == ([], True)
