"""Clients that do not mean well, all at one exporter: whatever they do, the next scrape is served, and memory stays flat."""

from __future__ import annotations

import http.client
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.exporters import EXPORTER, Program, state_on
from tests.faults.hostile_clients import ANSWERED, HEAD, SENT, converse, crowd
from tests.rank_files import live_rank, train
from tests.support import clean_environment, free_port, wait_until
from torchobs.flight.writer import FlightWriter
from torchobs.ranks.state import UNRESPONSIVE_AFTER_S

DESCRIPTORS = 160
"""Few: a quarter of them is for connections."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The flight directory."""
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="module")
def rank(home: Path) -> Iterator[FlightWriter]:
    """A rank that has taken three steps."""
    writer = live_rank(home)
    train(writer, [1, 2, 3])
    yield writer
    writer.close()


@pytest.fixture(scope="module")
def program(home: Path, rank: FlightWriter) -> Iterator[Program]:
    """One real exporter for all of them, with few descriptors."""
    assert rank.name
    port, log = free_port(), home / "exporter.err"
    argv = (*EXPORTER, "--web.listen-address", f"127.0.0.1:{port}", "--flight-dir", str(home))
    few = ("sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh")
    with log.open("w") as error:
        process = subprocess.Popen([*few, *argv], stdin=subprocess.DEVNULL, stderr=error, env=clean_environment(), text=True)
    exporter = Program(process, f"127.0.0.1:{port}", log)
    wait_until(exporter.is_ready, timeout_s=60)
    yield exporter
    process.kill()
    process.wait()


def rss(program: Program) -> int:
    """Bytes of memory that it has."""
    return int(psutil.Process(program.process.pid).memory_info().rss)


@pytest.mark.parametrize("name", SENT)
def test_what_is_no_request_is_refused(program: Program, name: str) -> None:
    """By a 4xx, or by closing the connection, long before all of it was sent; the next scrape is served."""
    before = rss(program)
    answer, sent = converse(program.address, SENT[name])
    statuses = [line.split()[1] for line in answer.splitlines() if line.startswith(b"HTTP/1.1 ")]
    assert len(statuses) <= 2
    assert {status for status in statuses if not status.startswith(b"4")} <= ({b"200"} if name in ANSWERED else set())
    assert sent < 8 * MIB, "what the kernel holds of it at most"
    assert program.value("torchobs_steps_total") == 3
    assert rss(program) - before < 8 * MIB


def test_none_of_it_fills_the_log(program: Program) -> None:
    """One line per cause and minute, and no traceback."""
    lines = program.log.splitlines()
    assert "Traceback" not in program.log
    assert len(lines) < 12, lines


def scrapes_s(program: Program, number: int) -> list[float]:
    """How long each of so many scrapes took; all of them are served."""
    times_s = []
    for _ in range(number):
        began = time.perf_counter()
        assert program.get().status == 200
        times_s.append(time.perf_counter() - began)
    return times_s


@pytest.mark.serial
def test_a_thousand_slow_clients_keep_no_scraper_out(program: Program) -> None:
    """A header byte by byte, with descriptors for forty connections: half of the scrapes take 50 ms at most, none fails."""
    scrapes_s(program, 3)
    times_s = []
    with crowd(program.address) as slow:
        for _ in range(20):
            slow.come(50, HEAD + b"X-Slow: ")
            times_s += scrapes_s(program, 2)
            slow.drip()
        assert slow.drip() < DESCRIPTORS
    assert statistics.median(times_s) <= 0.05, times_s


def test_without_descriptors_it_serves_what_it_has(program: Program, rank: FlightWriter) -> None:
    """Nobody is taken for gone because a lock cannot be asked for; who waits is served when there are some again."""
    process = psutil.Process(program.process.pid)
    connection = http.client.HTTPConnection(program.address, timeout=10)
    beats = [time.monotonic()]

    def state() -> str:
        beats.append(time.monotonic())
        rank.heartbeat()
        rank.publish()
        connection.request("GET", "/metrics")
        shown = state_on(connection.getresponse().read().decode())
        # the page may be of a scan before this heartbeat: it tells nothing if we were held up since the one before
        return shown if time.monotonic() - beats[-2] < UNRESPONSIVE_AFTER_S else ""

    wait_until(lambda: state() == "alive")
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
    with crowd(program.address) as others:
        others.come(20, b"")
        states = {""}
        until = time.monotonic() + 1.5
        while time.monotonic() < until or states == {""}:
            states.add(state())
            time.sleep(0.15)
        process.rlimit(psutil.RLIMIT_NOFILE, before)
    assert states == {"", "alive"}
    connection.close()
    assert program.value("torchobs_steps_total") == 3
    wait_until(lambda: program.log.count("cannot accept connections") == 1)
