"""``shutdown()`` in the middle of a step: the step goes on, and torch is as it was before the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torchobs
from tests.training import loss_of, mlp

if TYPE_CHECKING:
    from pathlib import Path

REGISTER = {"pre": register_optimizer_step_pre_hook, "post": register_optimizer_step_post_hook}


def hooks() -> int:
    """How many optimizer hooks torch has."""
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


@pytest.mark.parametrize("raise_on", [(), ("nonfinite",)])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_shutdown_in_a_user_s_step_hook(flight_dir: Path, when: str, raise_on: tuple[str, ...]) -> None:
    """One registered before ``init()`` is called before ours, while torch iterates over all of them."""
    ended, backward, before = list[int](), torch.autograd.backward, hooks()

    def end(*_: Any) -> None:
        if not ended:
            ended.append(1)
            torchobs.shutdown()

    register: Any = REGISTER[when]
    handle = register(end)
    try:
        torchobs.init(flight_dir=flight_dir, raise_on=set(raise_on))
        model: Any = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        weights = model[0].weight.detach().clone()
        optimizer.step()
        assert ended
        assert not torch.equal(weights, model[0].weight)
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        assert hooks() == before + 1
        assert torch.autograd.backward is backward
        optimizer.step()
    finally:
        torchobs.shutdown()
        handle.remove()
    assert hooks() == before


@pytest.mark.parametrize("when", ["pre", "post"])
def test_shutdown_in_a_hook_of_a_scaler_s_step(flight_dir: Path, when: str) -> None:
    """Mixed precision has a hook of its own by then, which torch calls after the user's."""
    steps, before = list[int](), hooks()

    def end(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 2:
            torchobs.shutdown()

    register: Any = REGISTER[when]
    handle = register(end)
    try:
        torchobs.init(flight_dir=flight_dir)
        model: Any = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
        for _ in range(3):
            scaler.scale(loss_of(model)).backward()  # type: ignore[no-untyped-call]
            weights = model[0].weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert not torch.equal(weights, model[0].weight)
        assert len(steps) == 3
        assert hooks() == before + 1
    finally:
        torchobs.shutdown()
        handle.remove()
