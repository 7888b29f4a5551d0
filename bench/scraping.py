"""Scrapers that keep their connections open and ask at the same moment, as busy Prometheus do."""

from __future__ import annotations

import contextlib
import http.client
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from bench.processes import cpu_s

Burst = Callable[[Sequence[str]], tuple[list[float], int]]
"""The seconds of each scrape, from the request to the last byte, and the bytes of the first page, compressed"""
ACCEPT = {
    "openmetrics": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "text": "text/plain;version=0.0.4",
}
"""What Prometheus 3 sends, by default and with `scrape_protocols: [PrometheusText0.0.4]`."""
TIMEOUT_S = 120.0
SETTLED_S = 0.12
"""A page younger than 0.1 s is served again: between two scrapes that are measured there is more."""
WARM_UP = 3
"""Bursts that are not counted: the first ones learn the series."""
MAX_SCRAPERS = 8
HEADERS = {"Accept-Encoding": "gzip", "User-Agent": "Prometheus/3.0", "X-Prometheus-Scrape-Timeout-Seconds": "10"}


@contextlib.contextmanager
def scrapers(address: str) -> Iterator[Burst]:
    """Connections to an exporter; give what scrapes once in each of these formats (:data:`ACCEPT`), all at the same time."""
    connections = [http.client.HTTPConnection(address, timeout=TIMEOUT_S) for _ in range(MAX_SCRAPERS)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(MAX_SCRAPERS) as threads:
        for connection in connections:
            stack.callback(connection.close)

        def burst(formats: Sequence[str]) -> tuple[list[float], int]:
            answers = list(threads.map(_scrape, connections, formats))
            return [seconds for seconds, _ in answers], answers[0][1]

        yield burst


def _scrape(connection: http.client.HTTPConnection, text_format: str) -> tuple[float, int]:
    began_s = perf_counter()
    connection.request("GET", "/metrics", headers={**HEADERS, "Accept": ACCEPT[text_format]})
    response = connection.getresponse()
    size = len(response.read())
    seconds = perf_counter() - began_s
    assert response.status == 200, response.status
    return seconds, size


def timed(
    scrape: Burst, pid: int, formats: Sequence[str], bursts: int, change: Callable[[], None]
) -> tuple[list[float], float, int]:
    """Scrape so often, and call ``change`` before each burst; ``pid`` is the server's.

    Return the seconds of each scrape, the median of the server's processor time for a burst, and the bytes of a page.
    """
    moments = random.Random(1)
    seconds, cpu, size = list[float](), list[float](), 0
    for number in range(bursts + WARM_UP):
        change()
        time.sleep(SETTLED_S + moments.random() / 10)  # at any moment of the exporter's own second
        before = cpu_s(pid)
        burst, size = scrape(formats)
        if number >= WARM_UP:
            seconds += burst
            cpu.append(cpu_s(pid) - before)
    return seconds, statistics.median(cpu), size


def ms(seconds: float) -> str:
    """In milliseconds, or in seconds where these are many."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
