"""How long the shipped rules take at a thousand ranks, and so at ten thousand: ``python -m tests.bench.rules [--ranks 1000]``.

A real Prometheus, which evaluates deploy/prometheus/rules every 15 s, gets a quarter of an hour of a simulated run that crashes
and has a slow rank (tests/simulated_run.py) by remote write. Then it is asked how long each rule took. Other programs on the
machine, and groups that are evaluated at the same time, only lengthen that, so that the shortest of some evaluations counts.
Rules read and write series of each rank once, so that ten thousand ranks take ten times as long. The exit status is 1 if a
group would take more than a third of its interval then: the rest is for scrapes, for queries, and for what is not linear.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from typing import Any

from tests.bench.processes import MIB, available, rss
from tests.bench.scraping import ms
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.remote_write import FLAG, write
from tests.simulated_run import Run, series
from tests.support import ROOT

RULES = ROOT / "deploy" / "prometheus" / "rules"
RANGE_S, INTERVAL_S = 900.0, 15.0
MANY, SHARE = 10_000, 1 / 3
BYTES_PER_RANK = 4 * MIB


def measure(server: PrometheusServer, seconds: float) -> dict[str, dict[str, float]]:
    """Return the shortest time that each rule took, by group and rule, over the evaluations that end in so many seconds."""
    before = {group["name"]: group["lastEvaluation"] for group in groups(server)}
    seen = defaultdict[str, dict[str, float]](dict)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(INTERVAL_S / 3)
        for group in groups(server):
            times = seen[group["name"]]
            for number, rule in enumerate(group["rules"] if group["lastEvaluation"] != before[group["name"]] else ()):
                name = f"{number} {rule['name']}"
                times[name] = min(rule["evaluationTime"], times.get(name, rule["evaluationTime"]))
    return seen


def groups(server: PrometheusServer) -> list[dict[str, Any]]:
    """The groups of rules as Prometheus knows them."""
    found: list[dict[str, Any]] = server.get("/api/v1/rules")["groups"]
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000, help="of the run, eight on a machine (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="how long to look; the longest interval is a minute (default: %(default)s)"
    )
    parser.add_argument("--rules", type=int, default=0, help="print so many of the dearest rules, too")
    parser.add_argument("--prometheus", default=newest_prometheus(2), help="the program (default: the newest on PATH)")
    options = parser.parse_args()
    if options.prometheus is None:
        sys.exit("needs a Prometheus on PATH: apt-get install prometheus")
    if options.ranks * BYTES_PER_RANK > available():
        sys.exit(f"needs {options.ranks * BYTES_PER_RANK >> 20} MiB of memory: fewer --ranks")
    settings = {"global": {"scrape_interval": f"{INTERVAL_S:.0f}s", "evaluation_interval": f"{INTERVAL_S:.0f}s"}}
    rules = sorted(RULES.glob("*.yml"))
    with PrometheusServer(options.prometheus, rules=rules, settings=settings, arguments=[FLAG]) as server:
        ended_s = time.time()
        write(server.address, series(Run(ranks=options.ranks), ended_s - RANGE_S, ended_s, INTERVAL_S))
        time.sleep(2 * INTERVAL_S)  # what other groups record is there
        found, intervals = measure(server, options.seconds), {one["name"]: one["interval"] for one in groups(server)}
        if unseen := sorted(group for group, times in found.items() if not times):
            sys.exit(f"not evaluated within {options.seconds:g} s: {', '.join(unseen)}; more --seconds")
        firing = len([one for one in server.alerts() if one.state == "firing"])
        print(f"{options.ranks} ranks, {firing} alerts firing, Prometheus with {rss(server.pid) / MIB:,.0f} MiB\n")
    print(f"| group of rules | rules | interval | {options.ranks} ranks | {MANY:,} ranks |\n|---|---|---|---|---|")
    slow = False
    for group, times in sorted(found.items(), key=lambda one: -sum(one[1].values())):
        took_s = sum(times.values())
        many_s = took_s * MANY / options.ranks
        slow |= many_s > SHARE * intervals[group]
        print(f"| `{group}` | {len(times)} | {intervals[group]:g} s | {ms(took_s)} | {ms(many_s)} |")
    dearest = sorted(((took_s, group, rule) for group, times in found.items() for rule, took_s in times.items()), reverse=True)
    for took_s, group, rule in dearest[: options.rules]:
        print(f"{ms(took_s):>10}  {group}  {rule}")
    sys.exit(slow)


if __name__ == "__main__":
    main()
