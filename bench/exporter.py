"""What the exporter takes and how fast it answers: ``python -m bench.exporter``.

Everything is real: ranks' files by the real writer, kept alive by processes of their own; the program ``torchobs exporter``;
scrapers that keep their connections open and ask for gzip as Prometheus does. Parts:

idle    memory and processor time with 8 ranks, without a scraper and scraped every 15 s
scrape  10,000 series that all change between two scrapes: 1 and 8 scrapers at the same moment
curve   10^4, 10^5 and 10^6 series: time and bytes of a page, bytes of memory per series

A series is what Prometheus counts: a line of the page. The page is the whole one, with what the exporter says of itself. The
99th percentile is over all scrapes, the processor time that of the exporter alone. Prints the tables of
docs/exporter-performance.md, and its progress on standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.processes import MIB, cpu_s, exit_on_sigterm, exporter, flight_directory, rss
from bench.ranks import fleet
from bench.scraping import ACCEPT, SETTLED_S, TIMEOUT_S, Burst, ms, scrapers, timed
from tests.exporters import Client, Program

RANKS, SERIES, USUAL_SERIES = 8, 1250, 300
IDLE_RSS, IDLE_CPU, HUNDRED_THOUSAND_S = 45 * MIB, 0.005, 0.5


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    idle_s: float
    bursts: int
    pages: int
    curve: tuple[int, ...]


EFFORT = Effort(idle_s=120.0, bursts=200, pages=7, curve=(10_000, 100_000, 1_000_000))
QUICK = Effort(idle_s=16.0, bursts=25, pages=3, curve=(10_000, 100_000))


def idle(effort: Effort) -> Iterator[str]:
    """Measure an exporter that has next to nothing to do."""
    yield "| exporter | memory (RSS) | of a core | budget |\n|---|---|---|---|"
    for interval_s in (None, 15.0):
        asked = "nobody asks" if interval_s is None else f"scraped every {interval_s:g} s"
        name = f"{RANKS} ranks of {USUAL_SERIES} series, {asked}"
        print(f"idle: {name}", file=sys.stderr)
        with (
            flight_directory() as path,
            exporter(path) as program,
            scrapers(program.address) as burst,
            fleet(path, RANKS, USUAL_SERIES, step_s=0.1),
        ):
            largest, share = _watch(program, burst, effort.idle_s, interval_s)
        yield f"| {name} | {largest / MIB:.1f} MiB | {share:.2%} | {budget(largest <= IDLE_RSS and share <= IDLE_CPU)} |"


def _watch(program: Program, burst: Burst, seconds: float, interval_s: float | None) -> tuple[int, float]:
    """Return the most memory and the share of a core that a process takes, once it has warmed up."""
    if interval_s is not None:
        for _ in range(3):
            burst(["openmetrics"])
            time.sleep(SETTLED_S)
    time.sleep(3.0)
    pid, largest, began_s = program.process.pid, 0, time.monotonic()
    before, scraped_s = cpu_s(pid), began_s
    while (now_s := time.monotonic()) < began_s + seconds:
        if interval_s is not None and now_s >= scraped_s + interval_s:
            burst(["openmetrics"])
            scraped_s = now_s
        largest = max(largest, rss(pid))
        time.sleep(0.5)
    return largest, (cpu_s(pid) - before) / (time.monotonic() - began_s)


def scrape(effort: Effort) -> Iterator[str]:
    """Measure scrapes of the usual size."""
    with flight_directory() as path, exporter(path) as program, fleet(path, RANKS, SERIES) as change:
        time.sleep(2.0)  # until the exporter has found all of them
        lines = program.page().splitlines()
        yield f"{sum(not line.startswith('#') for line in lines):,} series, all changed since the scrape before:\n"
        yield "| scrapers | median | 99th percentile | slowest | processor time of a burst | page, gzip |"
        yield "|---|---|---|---|---|---|"
        for formats in (("openmetrics",), ("text",), ("openmetrics",) * 8, ("text",) * 8, ("openmetrics", "text") * 4):
            print(f"scrape: {len(formats)} scrapers", file=sys.stderr)
            with scrapers(program.address) as burst:
                seconds, burst_s, size = timed(burst, program.process.pid, formats, effort.bursts, change)
            kinds = " and ".join(dict.fromkeys(formats))
            cuts = statistics.quantiles(seconds, n=100, method="inclusive")
            times = (cuts[49], cuts[98], max(seconds), burst_s)
            yield f"| {len(formats)}, {kinds} | {' | '.join(map(ms, times))} | {size / 1024:,.0f} KiB |"


def curve(effort: Effort) -> Iterator[str]:
    """Measure pages of many series."""
    yield (
        "| series | ranks | all changed, median | slowest | nothing changed | processor time, all changed | gzip | plain | "
        "memory (RSS) | per series | budget |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    yield from (_point(series, effort.pages) for series in effort.curve)


def _point(series: int, pages: int) -> str:
    print(f"curve: {series:,} series", file=sys.stderr)
    ranks, limits = series // SERIES, ("--series-limit-total", str(2 * series))
    with flight_directory() as path, exporter(path, *limits) as program, scrapers(program.address) as burst:
        pid, formats = program.process.pid, ["openmetrics"]
        burst(formats)
        before = rss(pid)
        with fleet(path, ranks, SERIES, processes=2, step_s=3600.0) as change:
            size = _settle(burst)
            changed, unchanged, cpu = list[float](), list[float](), list[float]()
            for _ in range(pages):
                change()
                time.sleep(1.5)
                used = cpu_s(pid)
                changed += burst(formats)[0]
                cpu.append(cpu_s(pid) - used)
                time.sleep(1.5)
                unchanged += burst(formats)[0]
            resident, page = rss(pid), Client(program.address, TIMEOUT_S).get(Accept=ACCEPT["openmetrics"]).body
    met = budget(statistics.median(changed) <= HUNDRED_THOUSAND_S) if series == 100_000 else ""
    times = (statistics.median(changed), max(changed), statistics.median(unchanged), statistics.median(cpu))
    lines = sum(not line.startswith(b"#") for line in page.splitlines())
    sizes = f"{size / MIB:.1f} MiB | {len(page) / MIB:.1f} MiB | {resident / MIB:,.0f} MiB"
    return (
        f"| {lines:,} | {ranks} | {' | '.join(map(ms, times))} | {sizes} | {(resident - before) / lines:,.0f} bytes | {met} |"
    )


def _settle(burst: Burst) -> int:
    """Scrape until the exporter has found every rank, which its page's size shows; return the size, in bytes as they came."""
    last, now = 0, 1
    while abs(now - last) > now / 100:
        time.sleep(2.5)
        last, now = now, burst(["openmetrics"])[1]
    return now


def budget(met: bool) -> str:  # noqa: FBT001  # the one thing it is about
    """Return a word for a table."""
    return "met" if met else "**not met**"


PARTS: dict[str, Callable[[Effort], Iterator[str]]] = {"idle": idle, "scrape": scrape, "curve": curve}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="which ones (default: all)")
    parser.add_argument("--quick", action="store_true", help="a first look: fewer and shorter measurements, no 10^6 series")
    options = parser.parse_args()
    exit_on_sigterm()
    for part in options.parts:
        print(f"### {part}\n", flush=True)
        for line in PARTS[part](QUICK if options.quick else EFFORT):
            print(line, flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
