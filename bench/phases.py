"""How far the shares of phases are from the truth: nine loops with a clock that says what each part took.

``python -m bench.phases [seconds]``: a table in points of a step, of what a run shows after its first seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchobs
from torchobs.catalog import PHASES
from torchobs.flight.totals import Word
from torchobs.runtime.session import current

WARM_UP_S = 6.0
"""Until there are twenty stamps"""


class Samples(Dataset[torch.Tensor]):
    """Endless samples, each read in a millisecond."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.randn(128, 64)


@dataclass
class Loop:
    """A training, and how its steps spend their time."""

    name: str
    loader: bool = False
    ahead: bool = False  # the loader is asked for the next batch behind the forward pass
    python: bool = False  # a batch is computed with the GIL
    teacher: bool = False  # a model is called without gradients before the forward pass
    before_s: float = 0.0
    after_s: float = 0.0
    chance: float = 1.0  # of a step to have ``after_s``
    width: int = 512

    def __post_init__(self) -> None:
        width = self.width
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.frozen = nn.Linear(64, 1)
        self.batches = iter(DataLoader(Samples(), batch_size=None))
        self.following = torch.randn(128, 64)
        self.spent_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as that phase."""
        begun = time.perf_counter()
        yield
        self.spent_s[name] += time.perf_counter() - begun

    def step(self) -> None:
        """Train once."""
        if self.loader:
            with self.phase("data"):
                self.following = next(self.batches)
        with self.phase("other"), torch.no_grad():
            time.sleep(self.before_s)
            batch = self.following + 0.1
            if self.python:
                batch = torch.tensor([[float(row * column % 7) for column in range(64)] for row in range(32)])
            if self.teacher:
                self.frozen(batch)
        with self.phase("forward"):
            loss = self.model(batch).square().mean()
        if self.ahead:
            with self.phase("data"):
                self.following = next(self.batches)
        with self.phase("backward"):
            torch.autograd.backward(loss)
        with self.phase("optimizer"):
            self.optimizer.step()
        with self.phase("other"):
            self.optimizer.zero_grad()
            if self.after_s and torch.rand(()) < self.chance:
                time.sleep(self.after_s)


LOOPS = (
    Loop("a batch that takes 6 ms to come", before_s=0.006), Loop("a batch in Python", python=True),
    Loop("4 ms of logging after the step", after_s=0.004), Loop("30 ms of it in one of ten", after_s=0.03, chance=0.1),
    Loop("a loader", loader=True), Loop("augmented for 3 ms", loader=True, before_s=0.003), Loop("fetched ahead", ahead=True),
    Loop("a teacher", teacher=True, before_s=0.002), Loop("a wide model", width=1024),
)  # fmt: skip


def shown() -> dict[str, float]:
    """Seconds by phase that the run shows."""
    session = current()
    assert session is not None
    assert session.writer is not None
    session.writer.fold()
    floats = session.writer.table.core.totals.floats
    return dict(zip(PHASES, floats[Word.PHASE_TIME : Word.PHASE_TIME + len(PHASES)], strict=True))


def errors(loop: Loop, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the true share of each phase in a step, and what is shown less that."""
    with tempfile.TemporaryDirectory() as folder:
        torchobs.init(flight_dir=Path(folder), exporter=False)
        begun = time.perf_counter()
        while time.perf_counter() < begun + WARM_UP_S:
            loop.step()
        before, truth_before, warm = shown(), dict(loop.spent_s), time.perf_counter()
        while time.perf_counter() < begun + WARM_UP_S + seconds:
            loop.step()
        after, duration_s = shown(), time.perf_counter() - warm
        torchobs.shutdown()
    truth = {phase: loop.spent_s[phase] - truth_before.get(phase, 0.0) for phase in PHASES}
    truth["other"] += duration_s - sum(truth.values())  # the loop's own instructions
    times = {phase: after[phase] - before[phase] for phase in PHASES}
    shares = {phase: length / sum(truth.values()) for phase, length in truth.items()}
    return shares, {phase: times[phase] / sum(times.values()) - shares[phase] for phase in PHASES}


def main() -> None:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    torch.set_num_threads(1)
    print("| loop | forward is | other is | forward, error | other, error | largest error |\n|---|---|---|---|---|---|")
    for loop in LOOPS:
        share, error = errors(loop, seconds)
        largest = max(error, key=lambda phase: abs(error[phase]))
        shares = f"{share['forward']:.1%} | {share['other']:.1%} | {error['forward']:+.1%} | {error['other']:+.1%}"
        print(f"| {loop.name} | {shares} | {largest} {error[largest]:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
