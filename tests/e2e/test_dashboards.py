"""A healthy and a sick training, the real exporter, a real Prometheus: every panel has data, or says when it has none."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.dashboard_answers import Answers
from tests.exporters import start_program
from tests.prometheus_server import PrometheusServer
from tests.support import ROOT, clean_environment, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RULES = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SMALL = ("--layers", "2", "--width", "64", "--batch-size", "8", "--block-size", "64", "--characters", "200000", "--sample", "0")
HEALTHY, SICK = "healthy", "sick"
ALERTS = {"TorchobsGradientExplosion", "TorchobsRankFailed"}
"""What the sick run is about"""
FINISHED = 'torchobs_rank_state{run_id="healthy", state="finished"} == 1'
"""The end of the healthy run"""


def test_panels_of_a_healthy_and_of_a_sick_run(
    start: Callable[..., subprocess.Popen[str]],
    program: Callable[[str], str],
    flight_dir: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    """Two ranks that train and finish, then one that diverges and dies of an exception, seen by both Prometheus versions.

    Panels of the whole fleet are asked before: they would have the sick run's data.
    """
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "TORCHOBS_GRAD_INTERVAL": "1", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(ROOT)
    exporter = start_program(start, tmp_path / "exporter.log", free_port(), "--flight-dir", str(flight_dir))
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(PrometheusServer(program(name), scrape=[exporter.address], rules=RULES, interval="1s"))
            for name in ("prometheus", "prometheus3")
        ]
        for prometheus in servers:
            prometheus.wait_for_scrapes()
        began_s = time.time()
        gpt = (str(ROOT / "examples" / "char_gpt.py"), "--steps", "400", "--log-every", "1000", *SMALL)
        healthy = start(*TORCHRUN, "2", *gpt, torch=True, env={**environ, "TORCHOBS_RUN_ID": HEALTHY})
        assert healthy.wait(timeout=240) == 0
        answers = [Answers(prometheus, began_s) for prometheus in servers]
        for prometheus, answer in zip(servers, answers, strict=True):
            wait_until(lambda prometheus=prometheus: len(prometheus.query(FINISHED)) == 2)  # type: ignore[misc]
            assert list(answer.unexplained(HEALTHY)) == []
            check_healthy(answer)
        dying = (sys.executable, str(ROOT / "tests" / "scripts" / "dying.py"), "raise")
        sick = start(*dying, torch=True, env={**environ, "TORCHOBS_RUN_ID": SICK}, stderr=subprocess.DEVNULL)
        assert sick.wait(timeout=120) == 1
        for prometheus, answer in zip(servers, answers, strict=True):
            wait_until(partial(has_seen_it_end, prometheus))
            check_sick(answer)


def has_seen_it_end(prometheus: PrometheusServer) -> bool:
    """Whether the sick run's end has been scraped, and its alerts are active."""
    died = prometheus.query('torchobs_rank_exit{run_id="sick", reason="exception"} == 1')
    alerts = {one.labels["alertname"] for one in prometheus.query('ALERTS{run_id="sick"}')}
    return bool(died) and alerts >= ALERTS


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
