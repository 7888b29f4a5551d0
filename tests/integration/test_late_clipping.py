"""Gradients that are clipped after the optimizer's step are told; loops that clip in time, or measure norms, are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from tests.training import Recording, loss_of, mlp
from torchobs import catalog

STEPS = 12


def told(run: Recording) -> list[dict[str, Any]]:
    """The attributes of what was told of the loop."""
    return [frame["attrs"] for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name)]


def train(run: Recording, before: Callable[[nn.Module], object], after: Callable[[nn.Module], object], micro: int = 1) -> None:
    """A loop with something between backward and step, and something after the step; the sampler looks after each step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(micro):
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            before(model)
        optimizer.step()
        after(model)
        run.whole_round()


def clip(limit: float) -> Callable[[nn.Module], object]:
    """Clip by norm."""
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), limit)


def nothing(_: nn.Module) -> None:
    """Do nothing."""


@pytest.mark.parametrize("micro", [1, 3])
def test_a_clipping_after_the_step_is_told(run: Recording, micro: int) -> None:
    """Once, whether it clips or not."""
    train(run, nothing, clip(0.5), micro)
    assert told(run) == [{"kind": "clipped_late"}]


@pytest.mark.parametrize(
    ("before", "after", "micro"),
    [
        (clip(0.5), nothing, 1),
        (clip(0.5), nothing, 3),
        (clip(0.5), lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]), 1),
        (nothing, lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf")), 1),
        (nothing, nothing, 1),
    ],
    ids=["in time", "each micro-batch", "a norm for the log", "a norm by an infinite limit", "never"],
)
def test_others_are_left_alone(
    run: Recording, before: Callable[[nn.Module], object], after: Callable[[nn.Module], object], micro: int
) -> None:
    """What clips in time, in each micro-batch, or asks for a norm alone."""
    train(run, before, after, micro)
    assert told(run) == []


def test_a_scaler_that_skips_steps_makes_no_clipping_late(run: Recording) -> None:
    """A step that is skipped ends nothing of what clipping has changed."""
    model, scaler = mlp(), GradScaler("cpu", init_scale=2.0**60, growth_interval=1000, backoff_factor=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * 1e30).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        run.whole_round()
    assert told(run) == []


def test_steps_by_hand_are_left_alone(run: Recording) -> None:
    """Where a step ends is known only when the next one begins."""
    model = mlp()
    for _ in range(STEPS):
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(torch.as_tensor(parameter.grad), alpha=0.01)
                parameter.grad = None
        run.whole_round()
    assert told(run) == []
