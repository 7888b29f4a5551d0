"""Scrapers in a process of their own: several connections that stay open and ask at the same moment, as busy Prometheus do.

``python -m tests.bench.scraping HOST:PORT PATH`` reads lines of JSON, each a list of formats, and scrapes once in each of them,
all at the same time. It answers with a line: the time that each took in seconds, from the request to the last byte, and the
bytes of its page as they came.
"""

from __future__ import annotations

import json
import random
import select
import selectors
import socket
import statistics
import subprocess
import sys
import time
from time import perf_counter
from types import TracebackType
from typing import IO, TYPE_CHECKING, NamedTuple

import h11

from tests.bench.processes import cpu_s
from tests.support import clean_environment

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
_WARM = 3
"""Bursts that are not counted: the first ones learn the series."""
_CHUNK = 1 << 20


class Burst(NamedTuple):
    """Some scrapes at the same time."""

    seconds: list[float]
    sizes: list[int]
    """bytes of each page, compressed"""


class Connection:
    """One scraper's."""

    def __init__(self, address: str, path: str) -> None:
        self._address, self._path = address, path
        self._socket: socket.socket | None = None
        self._http = h11.Connection(h11.CLIENT)
        self._size = 0
        self._asked_s = 0.0

    def ask(self, selector: selectors.BaseSelector, accept: str) -> None:
        """Send the request, over a new connection if there is none."""
        if self._was_closed():
            self._close(selector)
        if self._socket is None:
            self._connect(selector)
        headers = [("Host", self._address), ("Accept", accept), ("Accept-Encoding", "gzip"), ("User-Agent", "Prometheus/3.0"),
                   ("X-Prometheus-Scrape-Timeout-Seconds", "10")]  # fmt: skip
        request = self._http.send(h11.Request(method="GET", target=self._path, headers=headers))
        self._size, self._asked_s = 0, perf_counter()
        assert self._socket is not None
        self._socket.sendall((request or b"") + (self._http.send(h11.EndOfMessage()) or b""))

    def take(self, selector: selectors.BaseSelector) -> tuple[float, int] | None:
        """Take what has come; return seconds and bytes when that was the end of the page."""
        assert self._socket is not None
        self._http.receive_data(self._socket.recv(_CHUNK))
        while (event := self._http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response) and event.status_code != 200:
                sys.exit(f"{self._address}{self._path} answered {event.status_code}")
            if isinstance(event, h11.ConnectionClosed):
                sys.exit(f"{self._address} closed the connection")
            if isinstance(event, h11.Data):
                self._size += len(event.data)
            if isinstance(event, h11.EndOfMessage):
                took_s = perf_counter() - self._asked_s
                self._next(selector)
                return took_s, self._size
        return None

    def _connect(self, selector: selectors.BaseSelector) -> None:
        host, _, port = self._address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._http = h11.Connection(h11.CLIENT)
        selector.register(self._socket, selectors.EVENT_READ, self)

    def _next(self, selector: selectors.BaseSelector) -> None:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return
        self._close(selector)  # it does not keep connections

    def _was_closed(self) -> bool:
        """Return True if the server has left a connection that nobody used for a while."""
        # readable with nothing asked for is the end
        return self._socket is not None and bool(select.select([self._socket], [], [], 0)[0])

    def _close(self, selector: selectors.BaseSelector) -> None:
        if self._socket is not None:
            selector.unregister(self._socket)
            self._socket.close()
        self._socket = None


class Scraper:
    """The process, within a ``with`` block."""

    def __init__(self, address: str, path: str = "/metrics") -> None:
        self._command = [sys.executable, "-m", "tests.bench.scraping", address, path]

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _pipe(self._child.stdin).close()
        self._child.wait(timeout=30)
        _pipe(self._child.stdout).close()

    def burst(self, formats: Sequence[str]) -> Burst:
        """Scrape once in each of these formats (:data:`ACCEPT`), all at the same time."""
        _pipe(self._child.stdin).write(json.dumps(list(formats)) + "\n")
        _pipe(self._child.stdin).flush()
        answer = _pipe(self._child.stdout).readline()
        if not answer:
            sys.exit("the scraping process ended")
        return Burst(*json.loads(answer))


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
    for number in range(bursts + _WARM):
        change()
        time.sleep(SETTLED_S + when.random() / 10)  # at any moment of the exporter's own second
        before = cpu_s(pid)
        burst = scraper.burst(formats)
        if number >= _WARM:
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


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def main() -> None:
    """See the module."""
    address, path = sys.argv[1:]
    connections: list[Connection] = []
    selector = selectors.DefaultSelector()
    for line in sys.stdin:
        formats = json.loads(line)
        connections += [Connection(address, path) for _ in range(len(formats) - len(connections))]
        pending = connections[: len(formats)]
        for connection, wanted in zip(pending, formats, strict=True):
            connection.ask(selector, ACCEPT[wanted])
        done: dict[Connection, tuple[float, int]] = {}
        while len(done) < len(formats):
            for key, _ in selector.select(TIMEOUT_S) or sys.exit(f"no answer within {TIMEOUT_S:g} s"):
                taken = key.data.take(selector)
                if taken is not None:
                    done[key.data] = taken
        answers = [done[connection] for connection in pending]
        print(json.dumps([[seconds for seconds, _ in answers], [size for _, size in answers]]), flush=True)


if __name__ == "__main__":
    main()
