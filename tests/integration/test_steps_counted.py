"""Every way to train is counted right: steps, losses, norms, and what is no step at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchobs
from tests.training import Recording, StepFlag, has, loss_of, mlp, norm_of, recording

if TYPE_CHECKING:
    from collections.abc import Callable
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_norms_equal_the_reference(run: Recording, name: str) -> None:
    """Step by step the loss is the loss, and the norm is within 1e-4 of a float64 reference, whatever the optimizer does."""
    model = mlp()
    losses, norms = train(model, OPTIMIZERS[name](model.parameters()), 12)
    steps = run.steps()
    assert [record.step for record in steps] == list(range(1, 13))
    assert [record.loss for record in steps] == losses
    assert [record.grad_norm for record in steps] == pytest.approx(norms, rel=1e-4)
    assert all(has(record, StepFlag.LEARNING_RATE) for record in steps)


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


def test_a_closure_of_a_first_order_optimizer(run: Recording) -> None:
    """Lightning hands every optimizer a closure that computes the loss: the norm is that of its gradients."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    losses, norms = [], []
    for index in range(4):

        def closure(index: int = index) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, index)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            norms.append(norm_of(model))
            return loss

        optimizer.step(closure)
    steps = run.steps()
    assert [record.loss for record in steps] == losses
    assert [record.grad_norm for record in steps] == pytest.approx(norms, rel=1e-4)


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


@pytest.mark.parametrize("fused", [False, True])
def test_what_the_loss_scaler_skips_is_a_skipped_step(run: Recording, fused: bool) -> None:  # noqa: FBT001
    """Skips count as steps and are marked, fused or not; loss and norm are without the scale."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, norms = [], []
    for index in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        losses.append(loss.item())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if index in (2, 3):
            next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        norms.append(norm_of(model) / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    steps = run.steps()
    assert [has(record, StepFlag.SKIPPED) for record in steps] == [False, False, True, True, False, False]
    assert [record.loss for record in steps] == losses
    measured = [(a.grad_norm, b) for a, b in zip(steps, norms, strict=True) if not has(a, StepFlag.SKIPPED)]
    assert [a for a, _ in measured] == pytest.approx([b for _, b in measured], rel=1e-4)


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


def test_activation_checkpointing_is_one_backward(run: Recording) -> None:
    """Reentrant checkpointing runs backward inside backward; the loss is taken once."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for index in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(index), requires_grad=True)
        loss = checkpoint(model, inputs, use_reentrant=True).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    steps = run.steps()
    assert [record.loss for record in steps] == losses
    assert {record.losses for record in steps} == {1}


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


def test_nonfinite_values_are_data(run: Recording) -> None:
    """A NaN loss and an infinite gradient become counters, anomalies and flags, never a gauge."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    before = run.values()[("torchobs.loss",)]
    optimizer.zero_grad()
    (loss_of(model) * float("nan")).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    values = run.values()
    assert values[("torchobs.loss",)] == before
    assert values[("torchobs.anomalies", "nonfinite_loss")] == 1
    assert values[("torchobs.anomalies", "nonfinite_gradient")] == 1
    assert values[("torchobs.grad.nonfinite_steps",)] == 1
    assert values[("torchobs.anomaly.active", "nonfinite_loss")] == 1.0
