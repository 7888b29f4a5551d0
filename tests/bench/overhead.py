"""What torchobs costs per training step: ``python -m tests.bench.overhead``.

Two figures per workload. *Self-time*: how long our hooks themselves run, between real steps, where caches are cold; the median
over the steps, so that a preemption is not ours. It is stable, and ``--gate`` fails when it is over its budget. *Wall*: steps
with and without torchobs, in turn, block by block, as a ratio of the block medians; it is what a user feels, and noisy.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from torchobs import guarding
from torchobs.flight.record import Kind
from torchobs.probes.cycle import Cycle
from torchobs.probes.trace import BACKWARD_BEGINS, BACKWARD_ENDS, FETCH, FETCHED, STEP_BEGINS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOOKKEEPING_US = 10.0
"""Budget per step, the norms excluded, at steps of about 1 ms."""
TIGHT_US = 3.0
"""The same in a tight loop: reported, not gated, for it says little about training."""
SHARES = {"mlp": 0.01, "gpt": 0.005}
"""Budget for all hooks, norms included, as a part of the step's time."""


@dataclass
class Meter:
    """Times every guarded call while it is installed; nested ones count for their own probe only."""

    steps: list[dict[str, int]] = field(default_factory=list)
    _now: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _inner: int = 0

    def guard(self, fuse: guarding.Fuse, function: Callable[..., Any]) -> Callable[..., Any]:
        """Stand in for ``Fuse.guard``."""
        guarded, probe = _guard(fuse, function), fuse.probe

        def timed(*args: Any) -> Any:
            outer, self._inner = self._inner, 0
            begun = perf_counter_ns()
            result = guarded(*args)
            elapsed = perf_counter_ns() - begun
            self._now[probe] += elapsed - self._inner
            self._inner = outer + elapsed
            return result

        return timed

    def step(self) -> None:
        """A step has ended."""
        self.steps.append(dict(self._now))
        self._now.clear()

    def median_us(self, *, norms: bool) -> float:
        """Median over the steps, in µs."""
        sums = [sum(ns for probe, ns in step.items() if norms or probe != "gradients") for step in self.steps]
        return statistics.median(sums) / 1000

    def mean_us(self, probe: str) -> float:
        """Mean over the steps of one probe, in µs: the norm is not measured in every step."""
        return statistics.fmean(step.get(probe, 0) for step in self.steps) / 1000


_guard = guarding.Fuse.guard


def mlp() -> Iterator[None]:
    """A 3-layer perceptron in steps of about 1 ms; yields after each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    data = TensorDataset(torch.randn(50, 64, 128), torch.randint(0, 10, (50, 64)))
    while True:
        for inputs, labels in DataLoader(data, batch_size=None):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


def gpt() -> Iterator[None]:
    """The example's GPT, about 80 ms a step on two cores; yields after each."""
    from examples import char_gpt

    options = char_gpt.Options()
    torch.manual_seed(0)
    model = char_gpt.GPT(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = char_gpt.read_text(500_000)
    while True:
        for inputs, targets in char_gpt.batches(text, options):
            loss = char_gpt.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield


WORKLOADS: dict[str, tuple[Callable[[], Iterator[None]], int, int]] = {"mlp": (mlp, 400, 8), "gpt": (gpt, 12, 5)}
"""Name → (training, steps per block, blocks of each kind)."""


def run(training: Iterator[None], steps: int, after: Callable[[], None] | None = None) -> float:
    """Run ``steps`` steps; return the median step in ms."""
    lengths = []
    begun = perf_counter_ns()
    for _ in range(steps):
        next(training)
        if after is not None:
            after()
        ended = perf_counter_ns()
        lengths.append(ended - begun)
        begun = ended
    return statistics.median(lengths) / 1e6


@dataclass
class Result:
    """One workload."""

    name: str
    step_ms: float
    bookkeeping_us: float
    norms_us: float
    interval: float
    wall: float
    wall_spread: tuple[float, float]

    @property
    def share(self) -> float:
        """All hooks as a part of the step."""
        return (self.bookkeeping_us + self.norms_us) / 1000 / self.step_ms


def measure(name: str, directory: Path, blocks: int | None) -> Result:
    """Measure one workload."""
    make, steps, default_blocks = WORKLOADS[name]
    training = make()
    run(training, max(5, steps // 4))
    plain, observed = [], []
    for _ in range(blocks or default_blocks):
        plain.append(run(training, steps))
        torchobs.init(flight_dir=directory)
        run(training, max(3, steps // 4))  # learns the cycle and the interval
        observed.append(run(training, steps))
        torchobs.shutdown()
    ratios = sorted(b / a for a, b in zip(plain, observed, strict=True))
    meter, interval = in_situ(training, steps * 2, directory)
    return Result(
        name, statistics.median(plain), meter.median_us(norms=False), meter.mean_us("gradients"), interval,
        statistics.median(ratios), (ratios[0], ratios[-1]),
    )  # fmt: skip


def in_situ(training: Iterator[None], steps: int, directory: Path) -> tuple[Meter, float]:
    """Time our own code between real steps; return it with the interval at which norms were measured."""
    meter = Meter()
    guarding.Fuse.guard = lambda fuse, function: meter.guard(fuse, function)  # type: ignore[method-assign]
    try:
        session = torchobs.init(flight_dir=directory)
        run(training, max(4, steps // 2))
        meter.steps.clear()
        run(training, steps, meter.step)
        assert session.host is not None
        measured = [record for record in _records(session) if record.flags & 2]
        torchobs.shutdown()
    finally:
        guarding.Fuse.guard = _guard  # type: ignore[method-assign]
    return meter, steps / max(1, min(steps, len(measured)))


def _records(session: torchobs.Session) -> list[Any]:
    from torchobs.flight import reader

    assert session.writer is not None
    file = reader.open_path(session.writer.path)
    try:
        return [record for record in file.steps() if record.kind == Kind.STEP]
    finally:
        file.close()


def tight_loop(directory: Path) -> float:
    """The same bookkeeping with nothing between: µs per step."""
    session = torchobs.init(flight_dir=directory)
    assert session.writer is not None
    cycle, optimizer = Cycle(session.writer.append), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    lengths = []
    for index in range(4000):
        now = (index + 1) * 1_000_000
        begun = perf_counter_ns()
        cycle.mark(FETCH, now, 1)
        cycle.trace.append(now + 1 << 4 | FETCHED)
        cycle.trace.append(now + 2 << 4 | BACKWARD_BEGINS)
        cycle.add_loss(1.0, within_step=False)
        cycle.trace.append(now + 3 << 4 | BACKWARD_ENDS)
        cycle.optimizer_begins(optimizer)
        cycle.trace.append(now + 4 << 4 | STEP_BEGINS)
        cycle.optimizer_ends(optimizer, now + 5)
        lengths.append(perf_counter_ns() - begun)
    torchobs.shutdown()
    return statistics.median(lengths) / 1000


def table(results: list[Result], tight_us: float) -> str:
    """Render the results as a Markdown table."""
    lines = [
        "| workload | step | bookkeeping, in situ | norms, in situ | every n-th step | share of the step | wall ratio (range) |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.step_ms:.2f} ms | {r.bookkeeping_us:.1f} µs | {r.norms_us:.1f} µs | {r.interval:.1f} | "
        f"{r.share:.2%} | {r.wall:.4f} ({r.wall_spread[0]:.3f} to {r.wall_spread[1]:.3f}) |"
        for r in results
    ]
    return "\n".join([*lines, "", f"The cycle alone in a tight loop: {tight_us:.1f} µs per step (budget {TIGHT_US:g} µs)."])


def over_budget(results: list[Result]) -> list[str]:
    """Say which self-times are over their budget."""
    found = [
        f"{r.name}: self-time {r.share:.2%} of the step, {SHARES[r.name]:.1%} allowed"
        for r in results
        if r.share > SHARES[r.name]
    ]
    found += [
        f"mlp: bookkeeping {r.bookkeeping_us:.1f} µs per step, {BOOKKEEPING_US:g} µs allowed"
        for r in results
        if r.name == "mlp" and r.bookkeeping_us > BOOKKEEPING_US
    ]
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workloads", nargs="*", default=list(WORKLOADS), help=f"which ones: {', '.join(WORKLOADS)} (default: all)"
    )
    parser.add_argument("--blocks", type=int, help="blocks of each kind, with and without torchobs")
    parser.add_argument("--gate", action="store_true", help="exit 1 when a self-time in situ is over its budget")
    options = parser.parse_args()
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    shm = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="torchobs-bench-", dir=shm if shm.is_dir() else None))
    try:
        results = [measure(name, directory, options.blocks) for name in options.workloads]
        print(table(results, tight_loop(directory)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    problems = over_budget(results) if options.gate else []
    for problem in problems:
        print(f"over budget: {problem}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
