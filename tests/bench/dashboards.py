"""How long the dashboards' panels take at a thousand ranks: ``python -m tests.bench.dashboards [--ranks 1000]``.

A real Prometheus gets an hour of a simulated run (tests/simulated_run.py) by remote write, without recording rules, whose
fallbacks are the dearest queries there are. Then each panel's queries are asked as Grafana does for a range of an hour, one
after the other, each panel three times; printed is the median of the slowest panels. The exit status is 1 if one takes longer
than a second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from tests.bench.processes import MIB, available, rss
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


def duration_s(server: PrometheusServer, panel: dict[str, Any], ended_s: float, ranks: str) -> tuple[float, int]:
    """Ask a panel's queries; return how long it took, and how many series came."""
    given = {"rate_interval": f"{4 * INTERVAL_S:.0f}s", "range": "55m", "interval": f"{INTERVAL_S:.0f}s"}
    step_s = max(INTERVAL_S, RANGE_S / (panel.get("maxDataPoints") or RANGE_S))
    began_s, found = time.perf_counter(), 0
    for target in panel["targets"]:
        if "@ 0" in target["expr"]:
            continue  # exemplars: it has no samples
        query = filled(target["expr"], **given)
        query = query.replace('rank=~".*"', f'rank=~"{ranks}"')
        if target["instant"]:
            found += len(server.query(query, ended_s))
        else:
            found += len(server.query_range(query, ended_s - RANGE_S, ended_s, f"{step_s:.0f}s"))
    return time.perf_counter() - began_s, found


def measure(server: PrometheusServer, ended_s: float) -> list[tuple[float, str, str, int]]:
    """Return the median of three times of each panel, the slowest first, with its dashboard, title and number of series."""
    found = []
    for uid, dashboard in shipped().items():
        for panel in panels(dashboard):
            runs = [duration_s(server, panel, ended_s, "0" if uid == FIRST_RANK else ".*") for _ in range(3)]
            found.append((statistics.median(seconds for seconds, _ in runs), uid, panel["title"], runs[0][1]))
    return sorted(found, reverse=True)


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
        samples = write(server.address, series(Run(ranks=options.ranks), ended_s - RANGE_S, ended_s, INTERVAL_S))
        total = int(server.query('count({__name__=~".+"})', ended_s - 1)[0].value)
        print(
            f"{options.ranks} ranks, {total:,} series, {samples:,} samples, Prometheus with {rss(server.pid) / MIB:,.0f} MiB\n"
        )
        found = measure(server, ended_s - 1)
    print("| dashboard | panel | series | median |\n|---|---|---|---|")
    for seconds, uid, title, number in found[: options.shown]:
        print(f"| {uid.removeprefix('torchobs-')} | {title} | {number} | {seconds * 1000:.0f} ms |")
    print(f"\n{len(found)} panels: half of them take at most {statistics.median(one for one, *_ in found) * 1000:.0f} ms")
    sys.exit(found[0][0] > LIMIT_S)


if __name__ == "__main__":
    main()
