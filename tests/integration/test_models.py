"""Several models in one process: folds and trials are told from what one training consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.training import Recording, StepFlag, has
from torchobs import catalog
from torchobs.probes.step_recorder import LEAST_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 150


def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> float:
    """Learn a line from noisy samples; return the last loss, which begins at 70 and ends near 0.25."""
    loss = torch.zeros(())
    for _ in range(steps):
        inputs = torch.randn(64, 8)
        targets = 3 * inputs.sum(1, keepdim=True) + 0.5 * torch.randn(64, 1)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
    return loss.item()


def new(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that learns it within some tens of steps, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def begun(run: Recording) -> list[int]:
    """The steps that are the first of another model."""
    return [record.step for record in run.steps() if has(record, StepFlag.NEW_MODEL)]


@pytest.mark.parametrize("keeps", [True, False])
def test_each_fold_is_judged_by_its_own_past(run: Recording, *, keeps: bool) -> None:
    """Three folds, whose losses begin at 70 and end near 0.25: no spike, whether or not the former models are kept."""
    kept = []
    for fold in range(3):
        model, optimizer = new(fold)
        assert fit(model, optimizer) < 1.0
        kept += [(model, optimizer)] * keeps
    values = run.look()
    assert begun(run) == [STEPS + 1, 2 * STEPS + 1]
    assert [values[catalog.ANOMALIES.name, kind] for kind in catalog.ANOMALY_KINDS] == [0] * len(catalog.ANOMALY_KINDS)
    assert values[catalog.MODEL_CHANGES.name,] == 2
    assert run.frames(catalog.EVENT_MODEL_CHANGE.name)[-1]["step"] == 2 * STEPS + 1


def test_folds_just_worth_a_baseline_are_each_another(run: Recording) -> None:
    """The shortest there are."""
    for fold in range(4):
        fit(*new(fold), steps=LEAST_STEPS)
    run.look()
    assert begun(run) == [fold * LEAST_STEPS + 1 for fold in (1, 2, 3)]


def test_what_is_unusual_among_models_of_few_steps_is_found(run: Recording) -> None:
    """Their losses are one training's, and one of them is far from all the others."""
    for task in range(100):
        model, optimizer = new(0)
        fit(model, optimizer, 5)
        if task == 80:
            torch.nn.init.constant_(model.weight, 1e3)  # type: ignore[arg-type]
            fit(model, optimizer, 1)
    values = run.look()
    assert values[catalog.ANOMALIES.name, "loss_spike"] > 0


def test_what_is_unusual_within_a_later_fold_is_still_found(run: Recording) -> None:
    """The second fold's learning rate goes up sixtyfold."""
    fit(*new(0))
    model, optimizer = new(1)
    fit(model, optimizer)
    optimizer.param_groups[0]["lr"] = 3.0
    fit(model, optimizer, 10)
    values = run.look()
    assert values[catalog.ANOMALIES.name, "loss_spike"] > 0


def two_networks() -> None:
    """A GAN's optimizers, one of which does ten steps alone before."""
    (one, first), (two, second) = new(0), new(1)
    fit(one, first, LEAST_STEPS // 2)
    for _ in range(STEPS):
        fit(one, first, 1)
        fit(two, second, 1)


def another_optimizer() -> None:
    """The same model goes on with another optimizer, and then with a layer more."""
    model, optimizer = new(0)
    fit(model, optimizer)
    fit(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    added = torch.nn.Linear(1, 1)
    fit(torch.nn.Sequential(model, added), torch.optim.Adam([*model.parameters(), *added.parameters()], lr=1e-3))


def one_each_few_steps() -> None:
    """A new model every five steps, none of which is worth a baseline: Reptile's."""
    for task in range(3 * LEAST_STEPS // 5):
        fit(*new(task), steps=5)


def late_part() -> None:
    """An actor whose optimizer begins to step late, with the gradients of the critic's backward pass."""
    torch.manual_seed(0)
    critic, actor = torch.nn.Linear(8, 1), torch.nn.Linear(8, 4)
    first, second = torch.optim.SGD(critic.parameters(), lr=0.01), torch.optim.SGD(actor.parameters(), lr=0.01)
    for number in range(STEPS):
        inputs = torch.randn(16, 8)
        for optimizer in (first, second):
            optimizer.zero_grad()
        torch.autograd.backward((critic(inputs) - inputs[:, :1]).square().mean() + actor(inputs).square().mean())
        first.step()
        if number >= 2 * LEAST_STEPS:
            second.step()


@pytest.mark.parametrize("train", [two_networks, another_optimizer, one_each_few_steps, late_part])
def test_one_training_of_several_optimizers_is_one(run: Recording, train: Callable[[], None]) -> None:
    """Nothing begins anew."""
    train()
    run.look()
    assert begun(run) == []


def test_boundaries_of_the_user_s_own_change_nothing(run: Recording) -> None:
    """With ``torchobs.step()``, too, the first step of the second model is flagged, and none after it."""
    from torchobs import step  # as a user has it

    for fold in range(2):
        model, optimizer = new(fold)
        for _ in range(STEPS // 2):
            fit(model, optimizer, 1)
            step()
    run.look()
    assert begun(run) == [STEPS // 2 + 1]
