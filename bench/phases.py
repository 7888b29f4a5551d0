"""How far the shares of phases are from the truth: loops of the zoo's kinds, whose own clock says what each part took.

``python -m bench.phases [seconds]``: a table in points of a step, of what a run shows after its first seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


class Loop:
    """A training and its truth: seconds by phase, by the loop's own clock."""

    def __init__(self, *, wide: int = 512, teacher: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 1))
        self.teacher = nn.Linear(64, 1) if teacher else None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batches = iter(DataLoader(Samples(), batch_size=None))
        self.spent_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count the block as that phase."""
        begun = time.perf_counter()
        yield
        self.spent_s[phase] += time.perf_counter() - begun

    def fetch(self) -> torch.Tensor:
        """A batch of the loader."""
        with self.of("data"):
            batch: torch.Tensor = next(self.batches)
        return batch

    def update(self, batch: torch.Tensor, *, fetch: bool = False) -> torch.Tensor | None:
        """Forward, backward and optimizer. ``fetch``: the next batch, which is returned, behind the forward pass."""
        with self.of("forward"):
            loss = self.model(batch).square().mean()
        following = self.fetch() if fetch else None
        with self.of("backward"):
            torch.autograd.backward(loss)
        with self.of("optimizer"):
            self.optimizer.step()
        with self.of("other"):
            self.optimizer.zero_grad()
        return following


def batch_by_sleep(loop: Loop) -> None:
    """A batch that takes 6 ms to come."""
    with loop.of("other"):
        time.sleep(0.006)
        batch = torch.randn(128, 64)
    loop.update(batch)


def batch_in_python(loop: Loop) -> None:
    """A batch that Python computes, with the GIL."""
    with loop.of("other"):
        batch = torch.tensor([[float(row * column % 7) for column in range(64)] for row in range(32)])
    loop.update(batch)


def logging_after_the_step(loop: Loop) -> None:
    """4 ms of logging."""
    loop.update(torch.randn(128, 64))
    with loop.of("other"):
        time.sleep(0.004)


def now_and_then(loop: Loop) -> None:
    """30 ms of it in one of ten steps."""
    loop.update(torch.randn(128, 64))
    with loop.of("other"):
        if torch.rand(()) < 0.1:  # as often
            time.sleep(0.03)


def loader(loop: Loop) -> None:
    """A loader's batch."""
    loop.update(loop.fetch())


def augmented(loop: Loop) -> None:
    """A loader's batch, augmented for 3 ms in the loop."""
    batch = loop.fetch()
    with loop.of("other"):
        time.sleep(0.003)
        batch = batch + 0.1
    loop.update(batch)


def fetched_ahead(loop: Loop) -> None:
    """The next batch is fetched behind the forward pass."""
    batch = getattr(loop, "following", None)
    loop.following = loop.update(loop.fetch() if batch is None else batch, fetch=True)  # type: ignore[attr-defined]


def teacher(loop: Loop) -> None:
    """A teacher without gradients before the forward pass."""
    batch = torch.randn(128, 64)
    with loop.of("other"), torch.no_grad():
        assert loop.teacher is not None
        loop.teacher(batch)
        time.sleep(0.002)
    loop.update(batch)


def wide(loop: Loop) -> None:
    """A forward pass of some ms, and little else."""
    loop.update(torch.randn(128, 64))


LOOPS: dict[Callable[[Loop], None], dict[str, Any]] = {
    batch_by_sleep: {}, batch_in_python: {}, logging_after_the_step: {}, now_and_then: {}, loader: {}, augmented: {},
    fetched_ahead: {}, teacher: {"teacher": True}, wide: {"wide": 1024},
}  # fmt: skip


def shown() -> dict[str, float]:
    """Seconds by phase that the run shows."""
    session = current()
    assert session is not None
    assert session.writer is not None
    session.writer.fold()
    floats = session.writer.table.core.totals.floats
    return dict(zip(PHASES, floats[Word.PHASE_TIME : Word.PHASE_TIME + len(PHASES)], strict=True))


def errors(step: Callable[[Loop], None], seconds: float, **options: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the true share of each phase in a step, and what is shown less that."""
    with tempfile.TemporaryDirectory() as folder:
        torchobs.init(flight_dir=Path(folder), exporter=False)
        loop, begun = Loop(**options), time.perf_counter()
        while time.perf_counter() < begun + WARM_UP_S:
            step(loop)
        before, truth_before, warm = shown(), dict(loop.spent_s), time.perf_counter()
        while time.perf_counter() < begun + WARM_UP_S + seconds:
            step(loop)
        after, took_s = shown(), time.perf_counter() - warm
        torchobs.shutdown()
    truth = {phase: loop.spent_s[phase] - truth_before.get(phase, 0.0) for phase in PHASES}
    truth["other"] += took_s - sum(truth.values())  # the loop's own instructions
    found = {phase: after[phase] - before[phase] for phase in PHASES}
    shares = {phase: length / sum(truth.values()) for phase, length in truth.items()}
    return shares, {phase: found[phase] / sum(found.values()) - shares[phase] for phase in PHASES}


def main() -> None:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    torch.set_num_threads(1)
    print("| loop | forward is | other is | forward, error | other, error | largest error |\n|---|---|---|---|---|---|")
    for step, options in LOOPS.items():
        share, error = errors(step, seconds, **options)
        largest = max(error, key=lambda phase: abs(error[phase]))
        print(
            f"| {step.__name__.replace('_', ' ')} | {share['forward']:.1%} | {share['other']:.1%} | {error['forward']:+.1%} | "
            f"{error['other']:+.1%} | {largest} {error[largest]:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
