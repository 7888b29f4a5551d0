"""What torchobs and its peers cost a whole training: ``python -m bench.peers``.

Every measurement is a process of its own, plain and observed in turn, and an observer is started as its users start it. The
table has the median step with an observer over the median step without, as the median of the pairs with its interval of 95 %,
and the same of the 99th percentile. An interval that holds zero shows no difference. ``pip install -e .[bench]`` has the peers;
one that is missing is left out and named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from bench.processes import flight_directory
from bench.workloads import NOBODY, WORKLOADS, Observer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

NEEDS = {"wandb": "wandb", "tensorboard": "tensorboard", "traceml": "traceml_ai"}
"""Observer → the module without which it is left out."""
SECONDS = 5.0


def work(workload: str, observer: str, seconds: float, out: Path) -> None:
    """Train for that long after a warm-up; write the median and the 99th percentile of the steps, in ms."""
    training = WORKLOADS[workload][0](OBSERVERS[observer][1]())
    for _ in range(10):
        next(training)  # imports, and compiles
    lengths, now = list[int](), perf_counter_ns()
    warm, end = now + int(seconds / 3 * 1e9), now + int(seconds * 4 / 3 * 1e9)
    while now < end:
        begun = perf_counter_ns()
        next(training)
        now = perf_counter_ns()
        if begun > warm:
            lengths.append(now - begun)
    cuts = statistics.quantiles(lengths, n=100)
    out.write_text(json.dumps({"median": cuts[49] / 1e6, "p99": cuts[98] / 1e6, "steps": len(lengths)}))
    os._exit(0)  # what an observer still does at the exit is not a step


def measure(workload: str, observer: str, seconds: float) -> dict[str, float]:
    """Run one process; return what it wrote. Ends the program with that one's output if it wrote nothing."""
    with flight_directory() as directory:
        out = directory / "result.json"
        arguments = ["--worker", workload, observer, str(seconds), str(out)]
        command = [sys.executable, "-m", "bench.peers", *arguments]
        if observer == "traceml":  # which needs its own launcher
            launcher = [str(Path(sys.executable).with_name("traceml")), "run", "--run-name", uuid.uuid4().hex]
            command = [*launcher, "--logs-dir", str(directory), str(Path(__file__)), "--args", *arguments]
        path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(directory)}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120 + 10 * seconds, env=environment)
        if not out.exists():
            sys.exit(f"{observer} did not come through {workload}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def compare(workload: str, observers: list[str], rounds: int, seconds: float) -> list[str]:
    """Measure one workload; return the rows of its table."""
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in observers}
    plain_ms = []
    for number in range(rounds):
        for name in observers:
            print(f"{workload}: round {number + 1} of {rounds}, {OBSERVERS[name][0]}", file=sys.stderr, flush=True)
            before = measure(workload, "none", seconds)
            with_it = measure(workload, name, seconds)
            plain_ms.append(before["median"])
            ratios[name].append((with_it["median"] / before["median"], with_it["p99"] / before["p99"]))
    rows = [f"| {workload} | nothing | {statistics.median(plain_ms):.2f} ms | | |"]
    for name in observers:
        medians = sorted(pair[0] for pair in ratios[name])
        least, most = interval_of_median(medians)
        spread = f"{least - 1:+.1%} to {most - 1:+.1%}"
        p99 = statistics.median(pair[1] for pair in ratios[name])
        rows.append(f"| | {OBSERVERS[name][0]} | {statistics.median(medians) - 1:+.1%} | {spread} | {p99 - 1:+.0%} |")
    return rows


def interval_of_median(ordered: list[float]) -> tuple[float, float]:
    """Return the two values between which the true median is in 95 of 100 measurements; of fewer than six, the outer ones.

    The order statistics of a sign test, by its normal approximation: nothing is assumed of the values' distribution.
    """
    inner = max(0, int((len(ordered) - 1 - 1.96 * math.sqrt(len(ordered))) / 2))
    return ordered[inner], ordered[-1 - inner]


def start_torchobs(level: str) -> Observer:
    """``torchobs.init()`` at that level, and nothing else."""
    import torchobs

    torchobs.init(flight_dir=tempfile.mkdtemp(), level=level)
    return NOBODY


class WandB(Observer):
    """Weights & Biases, offline: ``watch`` (gradient histograms every 1,000 steps by default) and the loss of every step."""

    def __init__(self) -> None:
        import wandb

        os.environ["WANDB_SILENT"] = "true"
        self._run = wandb.init(mode="offline", dir=tempfile.mkdtemp())
        self._watched = False

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        if not self._watched:
            self._watched = True
            self._run.watch(model)
        self._run.log({"loss": loss.item()})


class TensorBoard(Observer):
    """TensorBoard: the loss of every step and a histogram of every gradient in one of ten."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(tempfile.mkdtemp())
        self._step = 0

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        self._step += 1
        self._writer.add_scalar("loss", loss.item(), self._step)
        if self._step % 10 == 0:
            for name, parameter in model.named_parameters():
                self._writer.add_histogram(name, parameter.grad, self._step)


class LayerNorms(Observer):
    """What Lightning's ``grad_norm`` utility does in ``on_before_optimizer_step``: a norm of each gradient, read at once."""

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        norms = {name: p.grad.data.norm(2.0) for name, p in model.named_parameters() if p.grad is not None}
        total = torch.tensor(list(norms.values())).norm(2.0)
        self.logged = {name: norm.item() for name, norm in norms.items()} | {"total": total.item(), "loss": loss.item()}


class OpenTelemetrySdk(Observer):
    """The OpenTelemetry SDK in the trainer: a span and three instruments per step, exported to nobody."""

    def __init__(self) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        spans = TracerProvider()
        self._kept = InMemorySpanExporter()
        spans.add_span_processor(BatchSpanProcessor(self._kept))
        meter = MeterProvider([InMemoryMetricReader()]).get_meter("training")
        self._tracer = spans.get_tracer("training")
        self._steps = meter.create_counter("steps")
        self._loss, self._norm = meter.create_histogram("loss"), meter.create_histogram("norm")

    def step(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        del model
        return self._tracer.start_as_current_span("step")

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        self._steps.add(1, {"rank": 0})
        self._loss.record(loss.item(), {"rank": 0})
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        self._norm.record(norm.item(), {"rank": 0})
        self._kept.clear()


class TraceML(Observer):
    """TraceML, started by its launcher: automatic instrumentation, and its context manager around each step."""

    def __init__(self) -> None:
        import traceml_ai

        self._trace_step = traceml_ai.trace_step

    def step(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        return self._trace_step(model)  # type: ignore[no-any-return]


OBSERVERS: dict[str, tuple[str, Callable[[], Observer]]] = {
    "none": ("nothing", Observer),
    "basic": ("torchobs, basic (the default)", partial(start_torchobs, "basic")),
    "advanced": ("torchobs, advanced", partial(start_torchobs, "advanced")),
    "extreme": ("torchobs, extreme", partial(start_torchobs, "extreme")),
    "wandb": ("W&B offline, watch()", WandB),
    "tensorboard": ("TensorBoard, histograms every 10", TensorBoard),
    "norms": ("a norm per layer, .item() each", LayerNorms),
    "otel": ("OpenTelemetry SDK in the trainer", OpenTelemetrySdk),
    "traceml": ("TraceML", TraceML),
}
"""Name → (what the table says, how it is started)."""


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["--worker"]:
        workload, observer, seconds, out = sys.argv[2:]
        work(workload, observer, float(seconds), Path(out))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in OBSERVERS if name != "none"]
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    parser.add_argument("--observers", nargs="*", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of processes for each, at least 6 (default: 10)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that each one trains (default: {SECONDS:g})")
    options = parser.parse_args()
    missing = [name for name in options.observers if name in NEEDS and find_spec(NEEDS[name]) is None]
    if missing:
        print(f"left out, not installed: {', '.join(missing)} (pip install -e .[bench])", file=sys.stderr)
    observers = [name for name in options.observers if name not in missing]
    print("| training | beside it | median step | 95 % interval | 99th percentile |\n|---|---|---|---|---|")
    for workload in options.workloads:
        print("\n".join(compare(workload, observers, options.rounds, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
