"""Clipping in a long run: the total norm stands in every record; and clipping after the optimizer's step, a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from tests.training import Recording, StepFlag, has, loss_of, mlp, norm_of, recording
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[0.005, 0.2], ids=["seldom", "often"])
def paced(flight_dir: Path, request: pytest.FixtureRequest) -> Iterator[Recording]:
    """A recording with the interval that a user gets: by the default budget seldom, by a generous one in every step."""
    yield from recording(flight_dir, grad_interval=None, overhead_budget=request.param)


def test_every_clipped_step_has_its_norm_before_clipping(paced: Recording) -> None:
    """Whatever changes on the way: a layer is frozen and thawed, a step clips twice, one not at all, a gradient overflows."""
    model = mlp(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    norms, clipped = dict[int, float](), list[bool]()
    for step in range(1, 301):
        frozen = 100 <= step < 130
        for parameter in parameters[:2]:
            parameter.requires_grad_(not frozen)
        optimizer.zero_grad()
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        if step == 200:
            assert parameters[2].grad is not None
            parameters[2].grad[0, 0] = torch.inf
        limit = 1e-6 if step % 3 else 1e6
        norms[step] = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        if step % 50 == 7:
            torch.nn.utils.clip_grad_norm_(parameters, 1e6)
        if step % 40 != 11:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        clipped.append(step % 40 != 11 and limit < norms[step] < torch.inf)
        optimizer.step()
        if step == 200:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.nan_to_num_(0.1)
    records = paced.steps()
    assert len(records) == 300
    for record in records:
        if record.step % 40 != 11:
            assert has(record, StepFlag.GRAD_NORM), record.step
            assert record.grad_norm == pytest.approx(norms[record.step], rel=1e-5)
    assert [has(record, StepFlag.CLIPPED) for record in records] == clipped


def test_clipping_a_part_does_not_pass_for_the_whole(run: Recording) -> None:
    """Only the first layer is clipped: the norm is that of all gradients, as the optimizer finds them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    norms = []
    for index in range(3):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)
        norms.append(norm_of(model))
        optimizer.step()
    assert [record.grad_norm for record in run.steps()] == pytest.approx(norms, rel=1e-4)


LATE_STEPS = 12


def told(run: Recording) -> list[dict[str, Any]]:
    """The attributes of what was told of the loop."""
    return [frame["attrs"] for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name)]


def train(run: Recording, before: Callable[[nn.Module], object], after: Callable[[nn.Module], object], micro: int = 1) -> None:
    """A loop with something between backward and step, and something after the step; the sampler looks after each step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(LATE_STEPS):
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
    for _ in range(LATE_STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * 1e30).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        run.whole_round()
    assert told(run) == []
