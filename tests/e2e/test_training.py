"""From the training script to the firing alert and the panels: real ranks, the real exporter, a real Prometheus."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

import pytest

from tests.exporters import Program, start_program
from tests.prometheus_server import PrometheusServer
from tests.support import ROOT, clean_environment, wait_until
from torchobs import catalog
from torchobs.flight import reader
from torchobs.flight.step_record import RecordKind

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PHASES = ("data", "forward", "backward", "optimizer")


@pytest.fixture
def environ(flight_dir: Path) -> dict[str, str]:
    """The ranks' environment."""
    more = {"TORCHOBS_DIR": str(flight_dir), "TORCHOBS_GRAD_INTERVAL": "1", "TORCHOBS_RUN_ID": "run", "OMP_NUM_THREADS": "1"}
    return {**clean_environment(), **more, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def exporter(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]
) -> Program:
    """The real exporter of the flight directory."""
    return start_program(start, tmp_path / "exporter.log", free_port(), "--flight-dir", str(flight_dir))


def timings(path: Path) -> dict[str, list[dict[str, float]]]:
    """What the script says it measured, by rank."""
    lines = defaultdict(list)
    for line in path.read_text().splitlines():
        figures = json.loads(line)
        lines[str(figures["rank"])].append(figures)
    return lines


def by_rank(prometheus: PrometheusServer, expression: str) -> dict[str, float]:
    """Values of an expression by rank."""
    return {series.labels["rank"]: series.value for series in prometheus.query(expression)}


def test_two_ranks_in_prometheus_equal_what_the_script_measured(
    start: Callable[..., subprocess.Popen[str]],
    program: Callable[[str], str],
    environ: dict[str, str],
    exporter: Program,
    flight_dir: Path,
    tmp_path: Path,
) -> None:
    """Steps are those printed, losses and norms equal to float32, a step's phases the script's within 5 %."""
    measured = tmp_path / "timings"
    arguments = ("--steps", "40", "--timings", str(measured), "--log-every", "1000", "--characters", "500000", "--sample", "0")
    with PrometheusServer(program("prometheus"), scrape=[exporter.address], interval="1s") as prometheus:
        job = start(*TORCHRUN, "2", str(ROOT / "examples" / "char_gpt.py"), *arguments, torch=True, env=environ)
        assert job.wait(timeout=240) == 0, job
        # the last step was scraped before its rank had ended, maybe: what is looked at is the end
        wait_until(lambda: by_rank(prometheus, 'torchobs_rank_state{state="finished"}') == {"0": 1.0, "1": 1.0})
        assert by_rank(prometheus, "torchobs_steps_total") == {"0": 40.0, "1": 40.0}
        expected = timings(measured)
        assert {rank: len(lines) for rank, lines in expected.items()} == {"0": 40, "1": 40}
        for name, field in (
            ("torchobs_loss", "loss"),
            ("torchobs_grad_norm", "grad_norm"),
            ("torchobs_learning_rate", "learning_rate"),
        ):
            last = {rank: lines[-1][field] for rank, lines in expected.items()}
            assert by_rank(prometheus, name) == pytest.approx(last, rel=2e-6), name
        assert by_rank(prometheus, "torchobs_tokens_total") == {"0": 40 * 12 * 64, "1": 40 * 12 * 64}
        assert by_rank(prometheus, "torchobs_grad_norm_distribution_count") == {"0": 40.0, "1": 40.0}
        recorded = dict(map(phases_of, flight_dir.glob("*.flight")))
        for phase in PHASES:
            # Prometheus has the forward pass without what lies before the model's first call, which is other
            parts = [phase] if phase != "forward" else ["forward", "other", "between"]
            expression = "|".join(parts)
            totals = by_rank(prometheus, f'sum by (rank) (torchobs_step_phase_time_seconds_total{{phase=~"{expression}"}})')
            for rank, lines in expected.items():
                both = [sum(times[catalog.PHASES.index(part)] for part in parts) for times in recorded[rank]]
                assert totals[rank] == pytest.approx(sum(both), rel=1e-5), (phase, rank)
                ours, said = [times[catalog.PHASES.index(phase)] for times in recorded[rank]], [line[phase] for line in lines]
                # step by step: a preemption between the two clocks is neither's. 0.2 ms are for our hooks within the script's
                apart = median(abs(mine - other) for mine, other in zip(ours, said, strict=True))
                assert apart <= 0.05 * median(said) + 2e-4, (phase, rank)
        assert by_rank(prometheus, 'sum by (rank) (torchobs_anomalies_total{kind!="loss_spike"})') == {"0": 0.0, "1": 0.0}


def phases_of(path: Path) -> tuple[str, list[tuple[float, ...]]]:
    """The rank that a file is of, and the times of each of its steps by phase, in seconds."""
    file = reader.open_path(str(path))
    steps = [step.phase_s for step in file.steps() if step.kind == RecordKind.STEP]
    file.close()
    return str(file.header.resource["rank"]), steps


LAST, FEWER = 40, 2
"""Steps of the last life, and how many more each one before it had: whatever a scrape misses, a restart is seen as a reset."""
RESTARTED = f"""
import os, sys, time, torch, torchobs
torchobs.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
left = int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) - int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for _ in range({LAST} + {FEWER} * left):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.025)
sys.exit(int(left > 0))
"""


def test_elastic_restarts_merge_nothing(
    start: Callable[..., subprocess.Popen[str]],
    program: Callable[[str], str],
    environ: dict[str, str],
    exporter: Program,
    flight_dir: Path,
    tmp_path: Path,
) -> None:
    """Two incarnations, each on the page alone; to Prometheus a counter reset, over which increase() adds up."""
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    with PrometheusServer(program("prometheus"), scrape=[exporter.address], interval="250ms") as prometheus:
        prometheus.wait_for_scrapes()
        job = start(*TORCHRUN, "1", "--max-restarts", "1", str(script), torch=True, env=environ)
        shown = []

        def ended() -> bool:
            series = prometheus.query("torchobs_steps_total")
            shown.append(len(series))
            return job.poll() is not None

        wait_until(ended, timeout_s=240, interval_s=0.2)
        assert job.returncode == 0
        wait_until(lambda: prometheus.value("torchobs_steps_total") == LAST, timeout_s=20)
        assert set(shown) <= {0, 1}
        assert len(list(flight_dir.glob("*.flight"))) == 2
        assert prometheus.value("torchobs_rank_restarts_total") == 1
        assert prometheus.value("resets(torchobs_steps_total[5m])") == 1
        # each incarnation's first sample counts from 0, and what a scrape every 0.25 s misses at its end is lost
        assert prometheus.value("increase(torchobs_steps_total[5m])") == pytest.approx(2 * LAST + FEWER, rel=0.25)
