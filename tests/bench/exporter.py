"""What the exporter takes and how fast it answers: ``python -m tests.bench.exporter``.

Everything is real: ranks' files by the real writer, kept alive by processes of their own; the program ``torchobs exporter``; a
process of scrapers that keep their connections open and ask for gzip as Prometheus does. Parts:

idle    memory and processor time with 8 ranks, nobody asking and scraped every 15 s
scrape  8 ranks of 1,250 series, of which every one changes between two scrapes: 1 and 8 scrapers at the same moment
quiet   what series cost that are in the ranks' files and not on the page, for they have their default value
curve   10^4, 10^5 and 10^6 series: time and bytes of a page, bytes of memory per series
memory  where the memory of an exporter with 8 ranks of 1,250 series goes
peers   the same series from prometheus-client's multiprocess mode, and node_exporter and the Collector where they are on PATH

A series is what Prometheus counts: a line of the page. The page is the whole one, with what the exporter says of itself. The
99th percentile is over all scrapes, the processor time that of the exporter alone. Prints the tables of
docs/exporter-performance.md, and says what it is at on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.bench import exporter_peers
from tests.bench.fleet import Fleet, Node, flight_directory
from tests.bench.processes import MIB, available, cpu_s, exporter, leave_in_order, rss
from tests.bench.scraping import ACCEPT, SETTLED_S, TIMEOUT_S, Scraper, ms, percentile, timed
from tests.exporters import Client, Program

RANKS, LINES, BY_DEFAULT = 8, 1250, 300
QUIET = (0, 80, 400)
"""A plain training has 78."""
IDLE_RSS, IDLE_CPU = 45 * MIB, 0.005
SCRAPE_P99_S, HUNDRED_THOUSAND_S = 0.020, 0.5
BYTES_PER_SERIES = 5000
"""What a series takes of the machine while it is measured, file, writer and exporter together, so as not to fill its memory."""


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
    for ranks, interval_s in ((0, None), (RANKS, None), (RANKS, 15.0)):
        asked = "nobody asks" if interval_s is None else f"scraped every {interval_s:g} s"
        what = f"{ranks} ranks of {BY_DEFAULT} series, {asked}" if ranks else f"no rank, {asked}"
        say(f"idle: {what}")
        with (
            flight_directory() as path,
            exporter(path) as program,
            Scraper(program.address) as scraper,
            Fleet(*([Node(path, ranks, BY_DEFAULT)] if ranks else []), step_s=0.1),
        ):
            largest, share = _watch(program, scraper, effort.idle_s, interval_s)
        met = budget(largest <= IDLE_RSS and share <= IDLE_CPU) if ranks else ""
        yield f"| {what} | {largest / MIB:.1f} MiB | {share:.2%} | {met} |"


def _watch(program: Program, scraper: Scraper, seconds: float, interval_s: float | None) -> tuple[int, float]:
    """Return the most memory and the share of a core that a process takes, once it has warmed up."""
    if interval_s is not None:
        for _ in range(3):
            scraper.burst(["openmetrics"])
            time.sleep(SETTLED_S)
    time.sleep(3.0)
    pid, largest, began_s = program.process.pid, 0, time.monotonic()
    before, scraped_s = cpu_s(pid), began_s
    while (now_s := time.monotonic()) < began_s + seconds:
        if interval_s is not None and now_s >= scraped_s + interval_s:
            scraper.burst(["openmetrics"])
            scraped_s = now_s
        largest = max(largest, rss(pid))
        time.sleep(0.5)
    return largest, (cpu_s(pid) - before) / (time.monotonic() - began_s)


def scrape(effort: Effort) -> Iterator[str]:
    """Measure scrapes of the usual size."""
    with flight_directory() as path, exporter(path) as program, Fleet(Node(path, RANKS, LINES)) as fleet:
        time.sleep(2.0)  # until the exporter has found all of them
        yield f"{lines_of(program):,} series, all of them changed since the scrape before:\n"
        yield (
            "| scrapers | median | 99th percentile | slowest | processor time of a burst | page, gzip | budget |\n"
            "|---|---|---|---|---|---|---|"
        )
        with Scraper(program.address) as scraper:
            for name, formats in (
                ("OpenMetrics", ["openmetrics"]), ("text", ["text"]), ("OpenMetrics", ["openmetrics"] * RANKS),
                ("text", ["text"] * RANKS), ("half of each", ["openmetrics", "text"] * (RANKS // 2)),
            ):  # fmt: skip
                say(f"scrape: {len(formats)} scrapers, {name}")
                found = timed(scraper, program.process.pid, formats, effort.bursts, fleet.change)
                p99_s = percentile(found.seconds, 99)
                times = " | ".join(map(ms, (found.median, p99_s, max(found.seconds), found.cpu_s)))
                yield f"| {len(formats)}, {name} | {times} | {found.size / 1024:,.0f} KiB | {budget(p99_s <= SCRAPE_P99_S)} |"


def quiet(effort: Effort) -> Iterator[str]:
    """Measure what series cost that are held back until they say something; in turn, for the machine's speed changes."""
    yield "| series held back, of each rank | processor time of a scrape | 8 ranks' together | each |\n|---|---|---|---|"
    with contextlib.ExitStack() as held:
        running: dict[int, tuple[Fleet, Program, Scraper]] = {}
        for number in QUIET:
            path = held.enter_context(flight_directory())
            program = held.enter_context(exporter(path))
            fleet = held.enter_context(Fleet(Node(path, RANKS, BY_DEFAULT, quiet=number)))
            running[number] = fleet, program, held.enter_context(Scraper(program.address))
        time.sleep(2.0)  # until the exporters have found all of them
        taken: dict[int, list[float]] = {number: [] for number in QUIET}
        for turn in range(effort.bursts // 5):
            say(f"quiet: turn {turn + 1} of {effort.bursts // 5}")
            for number, (fleet, program, scraper) in running.items():
                taken[number].append(timed(scraper, program.process.pid, ["openmetrics"], 5, fleet.change).cpu_s)
    without_s = statistics.median(taken[0])
    for number, each in taken.items():
        more_s = statistics.median(each) - without_s
        share = f"{more_s / (RANKS * number) * 1e6:.2f} µs" if number else ""
        yield f"| {number} | {ms(statistics.median(each))} | {ms(more_s)} | {share} |"


def curve(effort: Effort) -> Iterator[str]:
    """Measure pages of many series."""
    yield (
        "| series | ranks | all changed, median | slowest | nothing changed | processor time, all changed | gzip | plain | "
        "memory (RSS) | per series | budget |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for wanted in effort.curve:
        if wanted * BYTES_PER_SERIES > available():
            yield f"| {wanted:,} | | not measured: less than {wanted * BYTES_PER_SERIES >> 30} GiB are free | | | | | | | | |"
            continue
        say(f"curve: {wanted:,} series")
        yield _point(wanted, effort.pages)


def _point(wanted: int, pages: int) -> str:
    ranks, limits = wanted // LINES, ("--series-limit-total", str(2 * wanted))
    with flight_directory() as path, exporter(path, *limits) as program, Scraper(program.address) as scraper:
        pid, ask = program.process.pid, ["openmetrics"]
        scraper.burst(ask)
        before = rss(pid)
        with Fleet(Node(path, ranks, LINES, world=ranks), processes=2, step_s=3600.0) as fleet:
            size = settle(scraper)
            changed, unchanged, cpu = list[float](), list[float](), list[float]()
            for _ in range(pages):
                fleet.change()
                time.sleep(1.5)
                used = cpu_s(pid)
                changed += scraper.burst(ask).seconds
                cpu.append(cpu_s(pid) - used)
                time.sleep(1.5)
                unchanged += scraper.burst(ask).seconds
            taken, page = rss(pid), Client(program.address, TIMEOUT_S).get(Accept=ACCEPT["openmetrics"]).body
    met = budget(statistics.median(changed) <= HUNDRED_THOUSAND_S) if wanted == 100_000 else ""
    times = (statistics.median(changed), max(changed), statistics.median(unchanged), statistics.median(cpu))
    series = sum(not line.startswith(b"#") for line in page.splitlines())
    sizes = f"{size / MIB:.1f} MiB | {len(page) / MIB:.1f} MiB | {taken / MIB:,.0f} MiB"
    return f"| {series:,} | {ranks} | {' | '.join(map(ms, times))} | {sizes} | {(taken - before) / series:,.0f} bytes | {met} |"


def settle(scraper: Scraper) -> int:
    """Scrape until the exporter has found every rank, which its page's size shows; return the size, in bytes as they came."""
    last, now = 0, 1
    while abs(now - last) > now / 100:
        time.sleep(2.5)
        last, now = now, scraper.burst(["openmetrics"]).sizes[0]
    return now


def memory(effort: Effort) -> Iterator[str]:
    """Say where the memory goes."""
    yield "| after | memory (RSS) | more |\n|---|---|---|"
    with flight_directory() as path, exporter(path) as program, Scraper(program.address) as scraper:
        last = 0

        def row(after: str) -> str:
            nonlocal last
            now, before, last = rss(program.process.pid), last, rss(program.process.pid)
            return f"| {after} | {now / MIB:.1f} MiB | {(now - before) / MIB:+.1f} MiB |"

        say("memory")
        yield row("the start, without a rank")
        with Fleet(Node(path, RANKS, LINES)) as fleet:
            time.sleep(2.5)
            yield row(f"{RANKS} ranks of {LINES:,} series have come")
            scraper.burst(["text"])
            yield row("a scrape of text")
            scraper.burst(["openmetrics"])
            yield row("a scrape of OpenMetrics")
            for _ in range(effort.bursts):
                fleet.change()
                time.sleep(SETTLED_S)
                scraper.burst(["openmetrics"])
            yield row(f"{effort.bursts} more, all series changed")
            Client(program.address).get("/")
            yield row("a look at the live page")


def lines_of(program: Client) -> int:
    """How many series there are on the page, as Prometheus counts them."""
    return sum(not line.startswith(b"#") for line in program.get().body.splitlines())


def budget(met: bool) -> str:  # noqa: FBT001  # the one thing it is about
    """One word for a table."""
    return "met" if met else "**not met**"


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def peers(effort: Effort) -> Iterator[str]:
    """Put the peers beside us."""
    yield from exporter_peers.rows(effort.bursts)


PARTS: dict[str, Callable[[Effort], Iterator[str]]] = {
    "idle": idle, "scrape": scrape, "quiet": quiet, "curve": curve, "memory": memory, "peers": peers,
}  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="which ones (default: all)")
    parser.add_argument("--quick", action="store_true", help="a first look: fewer and shorter measurements, no 10^6 series")
    options = parser.parse_args()
    leave_in_order()
    for part in options.parts:
        print(f"### {part}\n", flush=True)
        for line in PARTS[part](QUICK if options.quick else EFFORT):
            print(line, flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
