"""How long the dashboards' panels take at a thousand ranks: ``python -m tests.bench.dashboards [--ranks 1000]``.

A real Prometheus gets an hour of a simulated run (tests/simulated_run.py) by remote write, without recording rules, whose
fallbacks are the dearest queries there are. Then each panel's queries are asked as Grafana does for a range of an hour, one
after the other, each panel three times; printed are the dearest panels, with the processor time that Prometheus took, which
other programs on the machine change little, and the time until the answers were there, which they do: of both the shortest
counts. The exit status is 1 if a panel takes more than a second of a processor. Series that exporters leave out while nothing
happens are not there, either.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from tests.bench.processes import MIB, available, cpu_s, rss
from tests.bench.scraping import ms
from tests.dashboards import panels, shipped
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.promql import filled
from tests.remote_write import FLAG, write
from tests.simulated_run import Run, series

RANGE_S, INTERVAL_S = 3300.0, 30.0
"""An hour but for what Prometheus' head would refuse as too old; the scrape interval, and so the least step."""
LIMIT_S = 1.0
BYTES_PER_RANK = 4 * MIB
FIRST_RANK = "torchobs-gradients"
"""The dashboard whose variable is rank 0 unless others are chosen"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a panel costs: the least of three times. ``processor_s`` is Prometheus' own."""

    processor_s: float
    wall_s: float
    uid: str
    title: str
    series: int


def ask(server: PrometheusServer, panel: dict[str, Any], ended_s: float, ranks: str) -> int:
    """Ask a panel's queries; return how many series came."""
    given = {"rate_interval": f"{4 * INTERVAL_S:.0f}s", "range": "55m", "interval": f"{INTERVAL_S:.0f}s"}
    step_s = max(INTERVAL_S, RANGE_S / (panel.get("maxDataPoints") or RANGE_S))
    given["interval"] = f"{step_s:.0f}s"
    found = 0
    for target in panel["targets"]:
        if "@ 0" in target["expr"]:
            continue  # exemplars: it has no samples
        query = filled(target["expr"], **given).replace('rank=~".*"', f'rank=~"{ranks}"')
        if target["instant"]:
            found += len(server.query(query, ended_s))
        else:
            found += len(server.query_range(query, ended_s - RANGE_S, ended_s, f"{step_s:.0f}s"))
    return found


def measure(server: PrometheusServer, ended_s: float) -> list[Cost]:
    """Return what each panel costs, the dearest first."""
    found = []
    for uid, dashboard in shipped().items():
        for panel in panels(dashboard):
            processor_s, wall_s, series_ = [], [], 0
            for _ in range(3):
                began_s, used_s = time.perf_counter(), cpu_s(server.pid)
                series_ = ask(server, panel, ended_s, "0" if uid == FIRST_RANK else ".*")
                wall_s.append(time.perf_counter() - began_s)
                processor_s.append(cpu_s(server.pid) - used_s)
            found.append(Cost(min(processor_s), min(wall_s), uid, panel["title"], series_))
    return sorted(found, key=lambda one: one.processor_s, reverse=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000, help="of the run, eight on a machine (default: %(default)s)")
    parser.add_argument("--shown", type=int, default=8, help="how many panels to print (default: %(default)s)")
    parser.add_argument("--prometheus", default=newest_prometheus(2), help="the program (default: the newest on PATH)")
    options = parser.parse_args()
    if options.prometheus is None:
        sys.exit("needs a Prometheus on PATH: apt-get install prometheus")
    if options.ranks * BYTES_PER_RANK > available():
        sys.exit(f"needs {options.ranks * BYTES_PER_RANK >> 20} MiB of memory: fewer --ranks")
    with PrometheusServer(options.prometheus, arguments=[FLAG]) as server:
        ended_s = time.time()
        samples = write(server.address, series(Run(ranks=options.ranks, quiet=False), ended_s - RANGE_S, ended_s, INTERVAL_S))
        total = int(server.query('count({__name__=~".+"})', ended_s - 1)[0].value)
        print(
            f"{options.ranks} ranks, {total:,} series, {samples:,} samples, Prometheus with {rss(server.pid) / MIB:,.0f} MiB\n"
        )
        found = measure(server, ended_s - 1)
    print("| dashboard | panel | series | processor | answered after |\n|---|---|---|---|---|")
    for one in found[: options.shown]:
        figures = f"{one.series} | {ms(one.processor_s)} | {ms(one.wall_s)}"
        print(f"| {one.uid.removeprefix('torchobs-')} | {one.title} | {figures} |")
    print(f"\nHalf of the {len(found)} panels take at most {ms(statistics.median(one.processor_s for one in found))}.")
    sys.exit(found[0].processor_s > LIMIT_S)


if __name__ == "__main__":
    main()
