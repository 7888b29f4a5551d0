"""A Prometheus that was down itself: what it did not see in this time has not happened."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.alertmanager_server import serving
from tests.prometheus_server import PrometheusServer
from tests.support import wait_until
from torchobs import catalog
from torchobs.rules.promql import select
from torchobs.rules.recordings import ALIVE, FAILED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MINUTES = range(-55, -14)
"""What it has of the runs, by their minute; then it was down"""
RUNS = ("trained", "was-restarting")
ALERTS = {"trained": "TorchobsTelemetryGone", "was-restarting": "TorchobsRunDown"}


def past(now_s: float) -> Iterator[str]:
    """Both runs as Prometheus recorded them, in OpenMetrics: one whose rank lived, one whose rank had failed at last."""
    for name, last in ((ALIVE, {"was-restarting": 0}), (FAILED, {"was-restarting": 1})):
        yield f"# TYPE {name} gauge"
        for run in RUNS:
            for minute in MINUTES:
                usual = 1 if name == ALIVE else 0
                value = last.get(run, usual) if minute == MINUTES[-1] else usual
                yield f'{name}{{job_name="gpt",run_id="{run}"}} {value} {now_s + 60 * minute:.0f}'
    yield "# EOF\n"


@pytest.mark.parametrize("name", ["prometheus", "prometheus3"])
def test_nobody_is_told_that_a_run_is_gone_which_nobody_looked_at(
    name: str, program: Callable[[str], str], checkout: Path, tmp_path: Path
) -> None:
    """Rules are evaluated before the first scrape is done, or recorded: until then all runs of the cluster seem to be gone."""
    (tmp_path / "past.txt").write_text("\n".join(past(time.time())))
    promtool = program(name.replace("prometheus", "promtool"))
    argv = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(tmp_path / "past.txt"), str(tmp_path / "data")]
    subprocess.run(argv, check=True, capture_output=True)
    page = {"text": ""}
    rules = sorted((checkout / "deploy" / "prometheus" / "rules").glob("torchobs-*.yml"))
    with (
        serving(lambda _: page["text"].encode()) as target,
        PrometheusServer(program(name), scrape=[target], rules=rules, data=tmp_path / "data") as prometheus,
    ):

        def active() -> set[tuple[str, str]]:
            return {(one.labels["run_id"], one.name) for one in prometheus.alerts()}

        wait_until(lambda: active() >= set(ALERTS.items()), timeout_s=60)
        assert not prometheus.query('ALERTS{alertstate="firing"}')
        page["text"] = "".join(f'{select(catalog.RANK_UP)}{{job_name="gpt", run_id="{run}", rank="0"}} 1\n' for run in RUNS)
        wait_until(lambda: not active() & set(ALERTS.items()), timeout_s=60)
        assert not prometheus.query('count_over_time(ALERTS{alertstate="firing"}[1h])')
