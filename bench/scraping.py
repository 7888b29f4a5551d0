"""Scrapers in a process of their own: several connections that stay open and ask at the same moment, as busy Prometheus do.

``python -m bench.scraping HOST:PORT PATH`` reads lines of JSON, each a list of formats, and scrapes once in each of them,
all at the same time. It answers with a line: the time that each took in seconds, from the request to the last byte, and the
bytes of its page as they came.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from bench.processes import Answering, cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

ACCEPT = {
    "openmetrics": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "text": "text/plain;version=0.0.4",
}
"""What Prometheus 3 sends, and what it is told to send by `scrape_protocols: [PrometheusText0.0.4]`."""
TIMEOUT_S = 120.0
SETTLED_S = 0.12
"""A page younger than 0.1 s is served again: between two scrapes that are measured there is more."""
WARM_UP = 3
"""Bursts that are not counted: the first ones learn the series."""
MAX_SCRAPERS = 8
HEADERS = {"Accept-Encoding": "gzip", "User-Agent": "Prometheus/3.0", "X-Prometheus-Scrape-Timeout-Seconds": "10"}


class Burst(NamedTuple):
    """Some scrapes at the same time."""

    seconds: list[float]
    sizes: list[int]
    """bytes of each page, compressed"""


class Connection:
    """One scraper's, which stays open between scrapes."""

    def __init__(self, address: str, path: str) -> None:
        self._http = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        self._path = path

    def scrape(self, accept: str) -> tuple[float, int]:
        """Return the seconds from the request to the last byte, and the bytes of the page as they came."""
        headers = {**HEADERS, "Accept": accept}
        began_s = perf_counter()
        self._http.request("GET", self._path, headers=headers)
        response = self._http.getresponse()
        body = response.read()
        seconds = perf_counter() - began_s
        if response.status != 200:
            sys.exit(f"{self._http.host}{self._path} answered {response.status}")
        return seconds, len(body)


class Scraper:
    """The process, within a ``with`` block."""

    def __init__(self, address: str, path: str = "/metrics") -> None:
        self._where = (address, path)

    def __enter__(self) -> Self:
        self._child = Answering("bench.scraping", *self._where)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._child.end()

    def burst(self, formats: Sequence[str]) -> Burst:
        """Scrape once in each of these formats (:data:`ACCEPT`), all at the same time."""
        self._child.tell(json.dumps(list(formats)))
        return Burst(*json.loads(self._child.answer()))


class Timed(NamedTuple):
    """Bursts of scrapes."""

    seconds: list[float]
    """of each scrape"""
    cpu_s: float
    """processor time that the server took for a burst, the median"""
    size: int
    """bytes of a page, compressed"""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def timed(scraper: Scraper, pid: int, formats: Sequence[str], bursts: int, change: Callable[[], None]) -> Timed:
    """Scrape so often, and call ``change`` before each burst; ``pid`` is the server."""
    when = random.Random(1)
    seconds, cpu, size = list[float](), list[float](), 0
    for number in range(bursts + WARM_UP):
        change()
        time.sleep(SETTLED_S + when.random() / 10)  # at any moment of the exporter's own second
        before = cpu_s(pid)
        burst = scraper.burst(formats)
        if number >= WARM_UP:
            seconds += burst.seconds
            cpu.append(cpu_s(pid) - before)
            size = burst.sizes[0]
    return Timed(seconds, statistics.median(cpu), size)


def ms(seconds: float) -> str:
    """In milliseconds, or in seconds where these are many."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many percent of them do not exceed; of one value, that one."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def main() -> None:
    """See the module."""
    address, path = sys.argv[1:]
    connections: list[Connection] = []
    with ThreadPoolExecutor(MAX_SCRAPERS) as threads:
        for line in sys.stdin:
            formats = json.loads(line)
            connections += [Connection(address, path) for _ in range(len(formats) - len(connections))]
            scrapes = [
                threads.submit(connection.scrape, ACCEPT[name])
                for connection, name in zip(connections[: len(formats)], formats, strict=True)
            ]
            answers = [scrape.result() for scrape in scrapes]
            print(json.dumps([[seconds for seconds, _ in answers], [size for _, size in answers]]), flush=True)


if __name__ == "__main__":
    main()
