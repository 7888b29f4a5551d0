"""What tests of the probes share: a session on a private directory, and its records."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import torchobs
from tests.support import wait_until
from torchobs.flight import reader
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Recording:
    """A session, and what its flight file says so far."""

    session: torchobs.Session

    def file(self) -> closing[reader.FlightFile]:
        """The file, opened for a `with` block."""
        assert self.session.writer is not None
        return closing(reader.open_path(self.session.writer.path))

    def view(self) -> reader.View:
        """The file as any other process would see it."""
        with self.file() as file:
            return file.read()

    def records(self) -> list[StepRecord]:
        """All records, the pending end of the first cycle included (as shutdown would write it)."""
        context = self.session.context
        assert context is not None
        context.recorder.flush()
        with self.file() as file:
            return file.steps()

    def steps(self) -> list[StepRecord]:
        """The step records."""
        return [record for record in self.records() if record.kind == RecordKind.STEP]

    def values(self) -> dict[tuple[str, ...], Any]:
        """Values by name and attribute values."""
        return {
            (point.series.name, *(str(value) for _, value in point.series.attributes)): point.value
            for point in self.view().points
        }

    def whole_round(self) -> None:
        """Wait until the sampler has done a whole round, begun after this was called: each begins with a heartbeat."""
        for _ in range(2):
            self._beat_after(self.view().live.heartbeat_ns)

    def _beat_after(self, beat_ns: int | None) -> None:
        wait_until(lambda: self.view().live.heartbeat_ns != beat_ns)

    def look(self) -> dict[tuple[str, ...], Any]:
        """Do one whole round of the sampler's in this thread, whose own is stopped; return the values."""
        sampler = self.session._sampler
        assert sampler is not None
        sampler.stop()
        sampler._thread.join()  # which an end does not wait for longer than a second
        sampler.round(last=True)
        return self.values()

    def frames(self, name: str) -> list[dict[str, Any]]:
        """The events and spans of that name, as they stand in the file."""
        with self.file() as file:
            return [frame for _, frame in file.events() if frame.get("name") == name]

    def attributes(self, name: str) -> list[dict[str, Any]]:
        """The attributes of these events and spans."""
        return [frame["attrs"] for frame in self.frames(name)]

    def errors(self) -> list[str]:
        """What went wrong in a probe."""
        context = self.session.context
        assert context is not None
        return [
            f"{breaker.probe}: {breaker.failures} {breaker.errors}" for breaker in context.breakers.values() if breaker.errors
        ]


def recording(flight_dir: Path, **overrides: object) -> Iterator[Recording]:
    """Yield a recording that measures the norm in every step; check that no probe failed."""
    session = torchobs.init(flight_dir=flight_dir, **{"grad_interval": 1, **overrides})
    assert session.active
    found = Recording(session)
    try:
        yield found
        assert found.errors() == []
    finally:
        torchobs.shutdown()


def mlp(seed: int = 0, width: int = 16) -> torch.nn.Sequential:
    """A small model, the same for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def batch(seed: int = 0, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 1, generator=generator)


def loss_of(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """Mean squared error on one batch."""
    inputs, targets = batch(seed)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def train(steps: int) -> None:
    """Some steps of a model and an optimizer of their own."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(steps):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def norm_of(model: torch.nn.Module) -> float:
    """The float64 reference of the gradients' total norm."""
    squares = [float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(squares))


def has(record: StepRecord, flag: int) -> bool:
    """Whether a record has the flag."""
    return bool(record.flags & flag)


__all__ = ["Recording", "StepFlag", "batch", "has", "loss_of", "mlp", "norm_of", "recording"]
