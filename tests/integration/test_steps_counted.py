"""Every way to train is counted right: steps, losses, norms, and what is no step at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchobs
from tests.training import Recording, StepFlag, has, loss_of, mlp, norm_of, recording

if TYPE_CHECKING:
    from pathlib import Path


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[list[float], list[float]]:
    """Train plainly; return the losses and the reference norms."""
    losses, norms = [], []
    for index in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        norms.append(norm_of(model))
        optimizer.step()
    return losses, norms


def test_an_optimizer_made_before_init_is_seen(flight_dir: Path) -> None:
    """The hooks are global: nothing has to be made after init()."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for run in recording(flight_dir):
        train(model, optimizer, 3)
        assert len(run.steps()) == 3


def test_a_subclass_that_calls_super_steps_once(run: Recording) -> None:
    """The wrapper around every class's step fires two pairs of hooks; that is one step."""

    class Doubled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = mlp()
    train(model, Doubled(model.parameters(), lr=0.1), 5)
    assert len(run.steps()) == 5


def test_a_step_that_raised_does_not_hide_the_next(run: Recording) -> None:
    """An exception inside a step leaves no post hook behind; the following steps count."""

    class Fragile(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise RuntimeError("out of memory, say")
            return super().step(closure)

    model = mlp()
    optimizer = Fragile(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    optimizer.broken = True
    with pytest.raises(RuntimeError):
        train(model, optimizer, 1)
    optimizer.broken = False
    train(model, optimizer, 3)
    assert len(run.steps()) == 5


def test_lbfgs_evaluates_its_closure_many_times_in_one_step(run: Recording) -> None:
    """The loss is what `step()` returns, its first evaluation's; the norm the last one's, which p.grad holds afterwards."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        return loss

    norms = []
    returned = []
    for _ in range(3):
        returned.append(optimizer.step(closure).item())  # type: ignore[no-untyped-call]
        norms.append(norm_of(model))
    steps = run.steps()
    assert len(steps) == 3
    assert len(losses) > 3
    assert [record.loss for record in steps] == pytest.approx(returned, rel=1e-12)
    assert [record.grad_norm for record in steps] == pytest.approx(norms, rel=1e-4)
    assert all(has(record, StepFlag.CLOSURE) for record in steps)


def test_a_closure_that_skips_a_batch_remains_one(run: Recording) -> None:
    """Lightning's automatic optimization, where ``training_step`` may return nothing, be it in the very first step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for index in range(10):

        def closure(index: int = index) -> torch.Tensor | None:
            if index % 4 == 0:
                return None
            optimizer.zero_grad()
            loss = loss_of(model, index)
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(norm_of(model))
            return loss

        optimizer.step(closure)
    measured = [record for record in run.steps() if has(record, StepFlag.CLOSURE) and has(record, StepFlag.GRAD_NORM)]
    assert [record.step for record in measured] == [3, 4, 6, 7, 8, 10]
    assert [record.grad_norm for record in measured] == pytest.approx(norms[1:], rel=1e-4)


def test_a_scaled_loss_divided_for_accumulation_is_unscaled(run: Recording) -> None:
    """``(scaler.scale(loss) / n).backward()`` is no longer the tensor that scale() returned."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    expected = []
    for index in range(3):
        total = 0.0
        for micro in range(2):
            loss = loss_of(model, index + micro)
            (scaler.scale(loss) / 2).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / 2
        expected.append(total)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [record.loss for record in run.steps()] == pytest.approx(expected, rel=1e-6)


def test_a_compiled_step_counts(run: Recording) -> None:
    """``torch.compile(optimizer.step)`` fires the hooks, and our own code is not compiled with it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = torch.compile(optimizer.step, backend="eager")
    for index in range(4):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        step()
    assert len(run.steps()) == 4


def test_log_after_the_step_belongs_to_that_step(run: Recording) -> None:
    """The usual place for it is after optimizer.step(); the last step's tokens are not lost."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for index in range(5):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torchobs.log(tokens=10 + index, samples=2, loss=torch.tensor(float(index)))
    run.records()
    values = run.values()
    assert values[("torchobs.tokens",)] == 60
    assert values[("torchobs.samples",)] == 10
    assert values[("torchobs.loss",)] == 4.0
