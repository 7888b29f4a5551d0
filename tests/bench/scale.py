"""A thousand ranks or more, their exporters and one real Prometheus with the shipped rules: ``python -m tests.bench.scale``.

The ranks are files of the real writer, kept alive by a process for each exporter that takes a step of each rank a second. Each
exporter is the real program with the ranks of one node. Prometheus, the newest on PATH (``prometheus3``, ``prometheus``),
scrapes all of them and evaluates the rules of deploy/prometheus. Printed are missed scrapes, the longest one, how long the
rules take, and the memory of all. The exit status is 1 when a scrape or an evaluation was missed, or a rank was ever not there.

With ``--restarts 0.1`` a tenth of the ranks is killed and started again every five minutes, spread over that time, each on the
machine where it was. Then as many ranks may be away at a scrape as start again within its interval.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.fleet import RESTART_S, Fleet, Node, flight_directory
from tests.bench.processes import MIB, available, cpu_s, exporter, leave_in_order, rss
from tests.bench.scraping import ms
from tests.exporters import Client, Program
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = ROOT / "deploy" / "prometheus" / "rules"
INTERVAL_S = 15
WARM_S = 2 * INTERVAL_S + 5
"""Prometheus spreads its first scrapes over an interval."""
BYTES_PER_SERIES, BYTES_PER_RANK = 12_000, 2 * MIB
"""What all of it takes of the machine's memory: most of it is Prometheus'."""
_LAST = "prometheus_rule_group_last_duration_seconds"
_CREATED = "prometheus_tsdb_head_series_created_total"
_MISSED = ("prometheus_rule_group_iterations_missed_total", "prometheus_rule_evaluation_failures_total")


@dataclass
class Record:
    """What was seen of the processes while it ran."""

    created: list[float] = field(default_factory=list)
    """series that Prometheus had made since its start, at each sample"""
    rules_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """seconds that each evaluation of a group of rules took"""
    evaluations: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_MISSED, 0.0))
    prometheus_rss: int = 0
    exporter_rss: int = 0
    exporter_cpu: float = 0.0

    def look(self, server: PrometheusServer, programs: list[Program]) -> None:
        """Take one sample."""
        lost = dict.fromkeys(_MISSED, 0.0)
        for family in text_string_to_metric_families(Client(server.address).page()):
            for sample in family.samples:
                group = sample.labels.get("rule_group", "").rpartition(";")[2]
                if sample.name == _LAST:
                    self.rules_s[group].append(sample.value)
                elif sample.name == "prometheus_rule_group_iterations_total":
                    self.evaluations[group] = sample.value
                elif sample.name == _CREATED:
                    self.created.append(sample.value)
                elif sample.name in lost:
                    lost[sample.name] += sample.value
        self.lost = lost
        self.prometheus_rss = max(self.prometheus_rss, rss(server.pid))
        self.exporter_rss = max(self.exporter_rss, *(rss(program.process.pid) for program in programs))


def run(server: PrometheusServer, programs: list[Program], seconds: float) -> tuple[Record, float]:
    """Watch for so long; return what was seen, and the time at which it began, by the wall clock."""
    time.sleep(WARM_S)
    record, began_s, monotonic_s = Record(), time.time(), time.monotonic()
    cpu = sum(cpu_s(program.process.pid) for program in programs)
    while time.monotonic() < monotonic_s + seconds:
        time.sleep(min(INTERVAL_S / 2, max(0.0, monotonic_s + seconds - time.monotonic())))
        record.look(server, programs)
        say(f"{(time.monotonic() - monotonic_s) / 60:.1f} min: Prometheus {record.prometheus_rss / MIB:.0f} MiB, {record.lost}")
    used = sum(cpu_s(program.process.pid) for program in programs) - cpu
    record.exporter_cpu = used / (time.monotonic() - monotonic_s) / len(programs)
    return record, began_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """What Prometheus has of the scrapes."""

    failed: int
    late: int
    """scrapes that there should be, and are not"""
    scrapes: int
    longest_s: float
    median_s: float
    series: int
    created: int
    """series that Prometheus has made while it was watched, those of rules among them"""
    least_ranks: int
    restarts: int
    firing: int

    @property
    def missed(self) -> int:
        """Scrapes that failed or never were."""
        return self.failed + self.late


def ask(server: PrometheusServer, exporters: int, began_s: float, created: int) -> Verdict:
    """Ask Prometheus what it has since then; ``created`` is what :class:`Record` saw of new series."""
    now_s = time.time() - 2 * INTERVAL_S  # a scrape that takes long is there only afterwards, between two of these questions
    window = f"[{int(now_s - began_s)}s]"

    def one(expression: str) -> float:
        found = server.query(expression, at=now_s)
        return found[0].value if found else 0.0

    scrapes = int(one(f"sum(count_over_time(up{window}))"))
    expected = exporters * int((now_s - began_s) / INTERVAL_S)
    ranks = server.query_range("count(torchobs_rank_up == 1)", began_s, now_s - INTERVAL_S, f"{INTERVAL_S}s")
    return Verdict(
        failed=scrapes - int(one(f"sum(sum_over_time(up{window}))")),
        late=max(0, expected - scrapes),
        scrapes=scrapes,
        longest_s=one(f"max(max_over_time(scrape_duration_seconds{window}))"),
        median_s=one(f"quantile(0.5, quantile_over_time(0.5, scrape_duration_seconds{window}))"),
        series=int(one("sum(scrape_samples_scraped)")),
        created=created,
        restarts=int(one(f"sum(changes(torchobs_rank_start_time_seconds{window}))")),
        least_ranks=min((int(value) for series in ranks for _, value in series.points), default=0),
        firing=len([alert for alert in server.alerts() if alert.state == "firing"]),
    )


def table(record: Record, verdict: Verdict, options: argparse.Namespace, program: str) -> str:
    """Render it as Markdown."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    name = (version.stdout + version.stderr).split("(")[0].strip().replace(", version", "").capitalize()
    again = f", {options.restarts:.0%} of them started again every five minutes" if options.restarts else ""
    who = f"{options.ranks:,} ranks{again}"
    lines = [
        f"{who}, {options.exporters} exporters, {name}, {options.minutes:g} minutes, every {INTERVAL_S} s:\n",
        "| what | measured |\n|---|---|",
        f"| series | {verdict.series:,} |",
        f"| scrapes, missed | {verdict.scrapes}, {verdict.missed} |",
        f"| ranks alive, the least ever seen | {verdict.least_ranks} |",
        f"| ranks started again | {verdict.restarts} |",
        f"| series that came meanwhile, those of rules included | {verdict.created:,} |",
        f"| a scrape, as Prometheus sees it: median, longest | {ms(verdict.median_s)}, {ms(verdict.longest_s)} |",
        f"| evaluations of rules missed, failed | {', '.join(f'{value:.0f}' for value in record.lost.values())} |",
        f"| alerts firing | {verdict.firing} |",
        f"| memory of an exporter, the most | {record.exporter_rss / MIB:.0f} MiB |",
        f"| of a core, an exporter | {record.exporter_cpu:.1%} |",
        f"| memory of Prometheus, the most | {record.prometheus_rss / MIB:,.0f} MiB |",
        "\n| group of rules | rules | evaluations | median | longest |\n|---|---|---|---|---|",
    ]
    numbers = {group["name"]: len(group["rules"]) for group in _groups()}
    for group, seconds in sorted(record.rules_s.items()):
        times = f"{ms(statistics.median(seconds))} | {ms(max(seconds))}"
        lines.append(f"| `{group}` | {numbers[group]} | {record.evaluations.get(group, 0):.0f} | {times} |")
    return "\n".join(lines)


def _groups() -> Iterator[dict[str, Any]]:
    for path in sorted(RULES.glob("*.yml")):
        yield from yaml.safe_load(path.read_text())["groups"]


def measure(options: argparse.Namespace, program: str) -> bool:
    """Run all of it; return whether nothing was missed."""
    share = -(-options.ranks // options.exporters)
    with contextlib.ExitStack() as undo:
        nodes = []
        for first in range(0, options.ranks, share):
            home = undo.enter_context(flight_directory())
            nodes.append(Node(home, min(share, options.ranks - first), options.series, first, options.ranks))
        say(f"{options.ranks} ranks of {options.series} series for {len(nodes)} exporters")
        undo.enter_context(Fleet(*nodes, step_s=1.0, restarts=options.restarts))
        programs = [undo.enter_context(exporter(node.directory)) for node in nodes]
        scrape = [one.address for one in programs]
        settings = {"global": {"scrape_interval": f"{INTERVAL_S}s", "evaluation_interval": f"{INTERVAL_S}s"}}
        rules = sorted(RULES.glob("*.yml"))
        server = undo.enter_context(PrometheusServer(program, scrape=scrape, rules=rules, settings=settings))
        record, began_s = run(server, programs, options.minutes * 60)
        verdict = ask(server, len(programs), began_s, int(record.created[-1] - record.created[0]))
    print(table(record, verdict, options, program), flush=True)
    away = math.ceil(options.ranks * options.restarts * INTERVAL_S / RESTART_S)
    return not verdict.missed and not any(record.lost.values()) and verdict.least_ranks >= options.ranks - away


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, after the first scrapes (default: 10)")
    parser.add_argument("--ranks", type=int, default=1000, help="in all (default: 1000)")
    parser.add_argument("--exporters", type=int, default=8, help="that share them (default: 8, as one for a node of 125 ranks)")
    parser.add_argument("--restarts", type=float, default=0.0, help="share started again every five minutes (default: 0)")
    parser.add_argument("--series", type=int, default=300, help="of a rank (default: 300, the most a rank has by default)")
    options = parser.parse_args()
    leave_in_order()
    program = newest_prometheus(2)
    if program is None:
        sys.exit("needs a Prometheus on PATH: apt-get install prometheus")
    needed = options.ranks * (BYTES_PER_RANK + options.series * BYTES_PER_SERIES)
    if needed > available():
        sys.exit(f"needs {needed >> 20} MiB of memory, {available() >> 20} are free: fewer --ranks, or fewer --series")
    sys.exit(not measure(options, program))


if __name__ == "__main__":
    main()
