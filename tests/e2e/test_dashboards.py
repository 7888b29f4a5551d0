"""A healthy and a sick training, the real exporter, a real Prometheus: every panel has data, or says when it has none."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.dashboards import shipped, targets
from tests.exporters import start_program
from tests.prometheus_server import PrometheusServer, Series
from tests.promql import filled
from tests.support import ROOT, clean_environment, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RULES = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SMALL = ("--layers", "2", "--width", "64", "--batch-size", "8", "--block-size", "64", "--characters", "200000", "--sample", "0")
HEALTHY, SICK = "healthy", "sick"
ALERTS = {"TorchobsGradientExplosion", "TorchobsRankFailed"}
"""What the sick run is about"""


class Answers:
    """What a Prometheus has since it began, for the dashboards of one run."""

    def __init__(self, prometheus: PrometheusServer, began_s: float) -> None:
        self._prometheus, self._began_s = prometheus, began_s
        self._dashboards = shipped()

    def panel(self, run: str, uid: str, title: str, number: int = 0) -> list[Series]:
        """The series of one query of a panel."""
        found = [target["expr"] for panel, target in targets(self._dashboards[uid]) if panel["title"] == title]
        return self._ask(found[number], run)

    def unexplained(self, run: str) -> Iterator[str]:
        """Dashboard, panel and legend of the queries without data whose panel does not say when it is empty."""
        for uid, dashboard in self._dashboards.items():
            for panel, target in targets(dashboard):
                if "Empty: " not in panel["description"] and "@ 0" not in target["expr"] and not self._ask(target["expr"], run):
                    yield f"{uid} {panel['title']}: {target['legendFormat']}"

    def _ask(self, expr: str, run: str) -> list[Series]:
        given = {"rate_interval": "10s", "range": "2m", "interval": "1s"}
        query = filled(expr, **given).replace('run_id=~".*"', f'run_id=~"{run}"')
        return self._prometheus.query_range(query, self._began_s, time.time(), "1s")


@pytest.mark.parametrize("name", ["prometheus", "prometheus3"])
def test_panels_of_a_healthy_and_of_a_sick_run(
    name: str,
    start: Callable[..., subprocess.Popen[str]],
    program: Callable[[str], str],
    flight_dir: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    """Two ranks that train and finish, beside one that diverges and dies of an exception."""
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "TORCHOBS_GRAD_INTERVAL": "1", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(ROOT)
    exporter = start_program(start, tmp_path / "exporter.log", free_port(), "--flight-dir", str(flight_dir))
    with PrometheusServer(program(name), scrape=[exporter.address], rules=RULES, interval="1s") as prometheus:
        prometheus.wait_for_scrapes()
        began_s = time.time()
        gpt = (str(ROOT / "examples" / "char_gpt.py"), "--steps", "400", "--log-every", "1000", *SMALL)
        healthy = start(*TORCHRUN, "2", *gpt, torch=True, env={**environ, "TORCHOBS_RUN_ID": HEALTHY})
        dying = (sys.executable, str(ROOT / "tests" / "scripts" / "dying.py"), "raise")
        sick = start(*dying, torch=True, env={**environ, "TORCHOBS_RUN_ID": SICK}, stderr=subprocess.DEVNULL)
        assert sick.wait(timeout=120) == 1
        assert healthy.wait(timeout=240) == 0
        wait_until(lambda: len(prometheus.query('torchobs_rank_state{run_id="healthy", state="finished"} == 1')) == 2)
        wait_until(lambda: prometheus.query('torchobs_rank_exit{run_id="sick", reason="exception"} == 1'))
        wait_until(lambda: {one.labels["alertname"] for one in prometheus.query('ALERTS{run_id="sick"}')} >= ALERTS)
        answers = Answers(prometheus, began_s)
        assert list(answers.unexplained(HEALTHY)) == []
        check_healthy(answers)
        check_sick(answers)


def check_healthy(answers: Answers) -> None:
    """What two ranks without a GPU, a scaler and a compiler must show."""
    losses = answers.panel(HEALTHY, "torchobs-run", "Loss")
    assert losses[0].points[-1][1] < losses[0].points[0][1]
    ended = {series.labels["reason"]: series.value for series in answers.panel(HEALTHY, "torchobs-run", "Ended ranks")}
    assert ended == {"finished": 2}
    phases = answers.panel(HEALTHY, "torchobs-run", "Step time by phase")
    assert sum(series.points[0][1] for series in phases) == pytest.approx(1.0)
    rows = {series.labels["row"] for series in answers.panel(HEALTHY, "torchobs-ranks", "Own step time by rank")}
    assert rows == {"00000", "00001"}
    assert max(value for series in answers.panel(HEALTHY, "torchobs-run", "Ranks well") for _, value in series.points) == 1.0
    assert answers.panel(HEALTHY, "torchobs-gradients", "Greatest layer gradients")


def check_sick(answers: Answers) -> None:
    """Its story: it has ended with an exception and alerts fire, and the fleet counts it among the sick."""
    assert {series.labels["alertname"] for series in answers.panel(SICK, "torchobs-run", "Alerts of this run")} >= ALERTS
    ended = {series.labels["reason"]: series.value for series in answers.panel(SICK, "torchobs-run", "Ended ranks")}
    assert ended == {"exception": 1}
    sick = [value for series in answers.panel(SICK, "torchobs-fleet", "Sick runs") for _, value in series.points]
    assert (min(sick), max(sick)) == (0.0, 1.0)
