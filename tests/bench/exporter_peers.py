"""What else serves metrics, beside the exporter: the part ``peers`` of ``tests.bench.exporter``.

Each is a process as its users start it, asked by the same scrapers. One that is not on PATH is named, and not measured.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.bench.fleet import Fleet, Node, flight_directory
from tests.bench.processes import MIB, end, exporter, rss, start
from tests.bench.scraping import Scraper, ms, percentile, timed
from tests.exporters import Client
from tests.otlp import listens
from tests.support import clean_environment, free_port, wait_until

RANKS, LINES = 8, 1250


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that serves a page, or only takes one in."""

    name: str
    process: subprocess.Popen[str]
    address: str
    change: Callable[[], None]
    """gives every series another value"""


def rows(bursts: int) -> Iterator[str]:
    """Measure us and each of the others; yield the lines of a table."""
    yield (
        "| who serves | series | 1 scraper, median | slowest | 8 scrapers, median | 99th percentile | of prometheus-client's | "
        "processor time of a scrape | memory (RSS) |\n|---|---|---|---|---|---|---|---|---|"
    )
    rows, p99_s = dict[Callable[..., object], list[str]](), dict[Callable[..., object], float]()
    for peer in (_torchobs, _multiprocess, _node_exporter, _collector):
        with peer() as found:
            rows[peer], p99_s[peer] = _row(found, bursts) if isinstance(found, Peer) else ([found, *[""] * 8], 0.0)
    for peer in (_torchobs, _node_exporter):
        if p99_s[peer] and p99_s[_multiprocess]:
            rows[peer][6] = f"1/{p99_s[_multiprocess] / p99_s[peer]:.0f}"
    yield from (f"| {' | '.join(cells)} |" for cells in rows.values())


def _row(peer: Peer, bursts: int) -> tuple[list[str], float]:
    """Return a line's cells, and the 99th percentile with eight scrapers."""
    pid = peer.process.pid
    if not peer.address:
        return [peer.name, *[""] * 7, f"{rss(pid) / MIB:.0f} MiB"], 0.0
    with Scraper(peer.address) as scraper:
        one = timed(scraper, pid, ["openmetrics"], max(8, bursts // 8), peer.change)
        eight = timed(scraper, pid, ["openmetrics"] * 8, max(3, bursts // 8), peer.change)
    series = sum(not line.startswith(b"#") for line in Client(peer.address).get().body.splitlines())
    p99_s = percentile(eight.seconds, 99)
    times = list(map(ms, (one.median, max(one.seconds), eight.median, p99_s)))
    return [peer.name, f"{series:,}", *times, "", ms(one.cpu_s), f"{rss(pid) / MIB:.0f} MiB"], p99_s


@contextlib.contextmanager
def _torchobs() -> Iterator[Peer | str]:
    with flight_directory() as path, exporter(path) as program, Fleet(Node(path, RANKS, LINES)) as fleet:
        yield Peer("torchobs exporter", program.process, program.address, fleet.change)


@contextlib.contextmanager
def _multiprocess() -> Iterator[Peer | str]:
    with flight_directory() as path, exporter(path) as program, Fleet(Node(path, RANKS, LINES)):
        time.sleep(2.5)  # until the exporter has found all of them
        page = program.page()
    with flight_directory() as home, contextlib.ExitStack() as undo:
        text = home / "page.txt"
        text.write_text(page)
        environment = {**clean_environment(), "PROMETHEUS_MULTIPROC_DIR": str(home)}
        workers = [_worker(text, rank, environment) for rank in range(RANKS)]
        for worker in workers:
            undo.callback(_end_worker, worker)

        def change(word: str = "changed") -> None:
            for worker in workers:
                _tell(worker, word)
            for worker in workers:
                _hear(worker)

        for worker in workers:
            _hear(worker)
        port = free_port()
        server = start(sys.executable, "-m", "tests.bench.multiprocess", "server", str(port), env=environment)
        undo.callback(end, server)
        wait_until(lambda: listens(f"http://127.0.0.1:{port}"), timeout_s=30)
        yield Peer(f"prometheus-client, {RANKS} processes", server, f"127.0.0.1:{port}", change)


def _worker(page: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.multiprocess", "worker", str(page), str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _tell(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{word}\n")
    worker.stdin.flush()


def _hear(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    if not worker.stdout.readline():
        sys.exit("a process with prometheus-client ended")


def _end_worker(worker: subprocess.Popen[str]) -> None:
    worker.communicate(timeout=30)  # closes its input


@contextlib.contextmanager
def _node_exporter() -> Iterator[Peer | str]:
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None:
        yield "node_exporter: not on PATH"
        return
    port = free_port()
    process = start(program, f"--web.listen-address=127.0.0.1:{port}", stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listens(f"http://127.0.0.1:{port}"), timeout_s=30)
        yield Peer("node_exporter, its own series", process, f"127.0.0.1:{port}", lambda: None)
    finally:
        end(process)


@contextlib.contextmanager
def _collector() -> Iterator[Peer | str]:
    """The Collector, to which an exporter of ours pushes all series every five seconds; it serves them if its build can."""
    program = shutil.which("otelcol") or shutil.which("otelcol-contrib")
    if program is None:
        yield "OpenTelemetry Collector: not on PATH"
        return
    listed = subprocess.run([program, "components"], capture_output=True, text=True, check=True).stdout
    serves = any(one["name"] == "prometheus" for one in yaml.safe_load(listed)["exporters"])
    otlp, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as undo:
        config = Path(home, "otelcol.yml")
        config.write_text(yaml.safe_dump(_collector_config(otlp, port if serves else None)))
        process = start(program, "--config", config, stderr=subprocess.DEVNULL)
        undo.callback(end, process)
        wait_until(lambda: listens(f"http://127.0.0.1:{otlp}"), timeout_s=30)
        path = undo.enter_context(flight_directory())
        push = ("--otlp.endpoint", f"http://127.0.0.1:{otlp}", "--otlp.interval", "5s")
        undo.enter_context(exporter(path, *push))
        fleet = undo.enter_context(Fleet(Node(path, RANKS, LINES)))
        for _ in range(4):
            fleet.change()
            time.sleep(5.0)
        name = "OpenTelemetry Collector, by OTLP" + ("" if serves else "; its build serves no page")
        yield Peer(name, process, f"127.0.0.1:{port}" if serves else "", fleet.change)


def _collector_config(otlp: int, port: int | None) -> dict[str, object]:
    exporter_name = "nop" if port is None else "prometheus"
    return {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{otlp}"}}}},
        "exporters": {exporter_name: {"endpoint": f"127.0.0.1:{port}"} if port else {}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"metrics": {"receivers": ["otlp"], "exporters": [exporter_name]}},
        },
    }
