"""An optimizer made anew for each step is told; one for each epoch, fold, episode, round or problem is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import Recording
from torchobs import catalog
from torchobs.probes.optimizer.remade import LEAST

pytestmark = pytest.mark.usefixtures("seeded")

STEPS = 3 * LEAST
Train = Callable[[nn.Module, torch.optim.Optimizer], None]


def told(run: Recording) -> list[tuple[str, int | None]]:
    """The optimizers that were told, and the steps."""
    run.look()
    frames = [frame for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name) if frame["attrs"]["kind"] == "optimizer_remade"]
    return [(frame["attrs"]["optimizer"], frame.get("step")) for frame in frames]


def net() -> nn.Sequential:
    """A small model."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on a new batch."""
    optimizer.zero_grad()
    torch.autograd.backward(model(torch.randn(8, 8)).square().mean())
    optimizer.step()


KEEPING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("kind", KEEPING)
def test_an_optimizer_made_anew_for_each_step(run: Recording, kind: str) -> None:
    """Once, by its class, after some steps."""
    model = net()
    for _ in range(STEPS):
        optimizer = KEEPING[kind](model.parameters())
        step(model, optimizer)
    assert told(run) == [(kind, LEAST + 1)]
    assert run.session.context is not None
    assert run.session.context.recorder.ended == STEPS


@pytest.mark.parametrize("apart", [True, False])
def test_both_players_optimizers_made_anew(run: Recording, apart: bool) -> None:  # noqa: FBT001  # of the test
    """Of two that take turns, too, with clipping and a rate that is set by hand. Both are one step."""
    one, two = net(), net()
    for number in range(STEPS):
        if apart:
            first = torch.optim.Adam(one.parameters())
            step(one, first)
            second = torch.optim.Adam(two.parameters())
            step(two, second)
            continue
        first, second = torch.optim.Adam(one.parameters(), lr=1e-3 / (1 + number)), torch.optim.Adam(two.parameters())
        step(one, first)
        nn.utils.clip_grad_norm_(two.parameters(), 1.0)
        step(two, second)
    assert [kind for kind, _ in told(run)] == ["Adam"]
    assert run.session.context is not None
    assert run.session.context.recorder.ended == STEPS


def plain(model: nn.Module) -> None:
    """SGD that keeps nothing."""
    for _ in range(STEPS):
        step(model, torch.optim.SGD(model.parameters(), lr=1e-3))


def once(model: nn.Module) -> None:
    """One optimizer."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        step(model, optimizer)


def by_epoch(model: nn.Module) -> None:
    """One for each epoch of two steps."""
    for _ in range(STEPS):
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)
        step(model, optimizer)


def folds(first: nn.Module) -> None:
    """A new model each time."""
    del first
    for _ in range(STEPS):
        model = net()
        step(model, torch.optim.Adam(model.parameters()))


def episodes(model: nn.Module) -> None:
    """Test-time adaptation: the weights are set back after each sample."""
    kept = copy.deepcopy(model.state_dict())
    for _ in range(STEPS):
        step(model, torch.optim.Adam(model.parameters()))
        model.load_state_dict(kept)


def episodes_by_data(model: nn.Module) -> None:
    """As above, by ``.data``, which torch does not count as a change."""
    kept = [each.detach().clone() for each in model.parameters()]
    for _ in range(STEPS):
        step(model, torch.optim.Adam(model.parameters()))
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(before)


def rounds(model: nn.Module) -> None:
    """Reptile: an inner step, then part of the way back."""
    for _ in range(STEPS):
        before = [each.detach().clone() for each in model.parameters()]
        step(model, torch.optim.Adam(model.parameters()))
        with torch.no_grad():
            for each, old in zip(model.parameters(), before, strict=True):
                each.lerp_(old, 0.5)


def problems(model: nn.Module) -> None:
    """L-BFGS, which solves a problem in each step."""
    for _ in range(STEPS):
        optimizer, batch = torch.optim.LBFGS(model.parameters(), max_iter=2), torch.randn(8, 8)

        def closure(optimizer: Any = optimizer, batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            torch.autograd.backward(loss)
            return loss  # type: ignore[no-any-return]

        optimizer.step(closure)  # type: ignore[no-untyped-call]


def within_backward(model: nn.Module) -> None:
    """An optimizer for each parameter, which steps within the backward pass."""
    optimizers = {each: torch.optim.Adam([each]) for each in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        torch.autograd.backward(model(torch.randn(8, 8)).square().mean())


def fast_weights(model: nn.Module) -> None:
    """An inner loop on a copy, with an optimizer of its own, and an outer step."""
    outer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        inner = copy.deepcopy(model)
        step(inner, torch.optim.Adam(inner.parameters()))
        step(model, outer)


HEALTHY = (plain, once, by_epoch, folds, episodes, episodes_by_data, rounds, problems, within_backward, fast_weights)


@pytest.mark.parametrize("train", HEALTHY, ids=lambda train: train.__name__)
def test_what_is_meant_so_is_left_alone(run: Recording, train: Callable[[nn.Module], None]) -> None:
    """Nothing is lost there that is used again."""
    train(net())
    assert told(run) == []
