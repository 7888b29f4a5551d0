"""What the rules cost that look a day back (`torchobs.links`): ``python -m tests.bench.links``; `tests.bench.rules` has no day.

A real Prometheus gets a day of NVLink and InfiniBand series, scraped every 15 s, by remote write, and is asked each expression
four times; the least processor time counts. The exit status is 1 if ten times as many ranks would take more than a third of
the group's interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import numpy as np

from tests.bench.processes import cpu_s
from tests.bench.scraping import ms
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.remote_write import FLAG, write
from tests.rule_cases import seconds
from tests.simulated_run import Series
from torchobs.rules.alerts_links import INFINIBAND, UNAME, links
from torchobs.rules.values import DEFAULT

DAY_S, INTERVAL_S = 86_400, 15.0
PER_NODE = 8
LATELY = 20
"""Samples of what only has to be there now"""
MANY, SHARE = 10, 1 / 3


def day(ranks: int, ended_s: float) -> Iterator[Series]:
    """Return a GPU and a port for each rank, with eight of them on a node."""
    times = ended_s - np.arange(int(DAY_S / INTERVAL_S))[::-1] * INTERVAL_S
    for rank in range(ranks):
        node, run = rank // PER_NODE, {"run_id": "a", "job_name": "gpt", "rank": str(rank)}
        own, exporter = {**run, "instance": f"n{node}:1"}, {"instance": f"n{node}:9100"}
        port = {**exporter, "device": f"mlx5_{rank % PER_NODE}", "port": "1"}
        yield {"__name__": "torchobs_gpu_nvlink_links", "hw_id": f"GPU-{rank}", **own}, times, np.full(len(times), 18.0)
        yield {"__name__": INFINIBAND, **port}, times, np.full(len(times), 4.0)
        yield {"__name__": "torchobs_rank_info", "host": f"node-{node}", **own}, times[-LATELY:], np.ones(LATELY)
        if rank % PER_NODE == 0:
            yield {"__name__": UNAME, **exporter, "nodename": f"node-{node}"}, times[-LATELY:], np.ones(LATELY)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000, help="with a GPU and a port each (default: %(default)s)")
    options = parser.parse_args()
    program = newest_prometheus(2)
    if program is None:
        sys.exit("needs a Prometheus on PATH: apt-get install prometheus")
    late = {"storage": {"tsdb": {"out_of_order_time_window": "2d"}}}
    group, total_s, ended_s = links().rendered(DEFAULT), 0.0, time.time()
    with PrometheusServer(program, arguments=[FLAG], settings=late) as server:
        print(f"{options.ranks} ranks, {write(server.address, day(options.ranks, ended_s)):,} samples\n")
        print("| alert | processor |\n|---|---|")
        for rule in group["rules"]:
            taken_s = []
            for _ in range(4):
                used_s = cpu_s(server.pid)
                server.query(rule["expr"], ended_s - 1)
                taken_s.append(cpu_s(server.pid) - used_s)
            total_s += min(taken_s)
            print(f"| {rule['alert']} | {ms(min(taken_s))} |")
    sys.exit(MANY * total_s > SHARE * seconds(group["interval"]))


if __name__ == "__main__":
    main()
