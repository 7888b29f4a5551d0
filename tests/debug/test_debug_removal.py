"""What is switched off by a hook of the user's, while torch iterates over all of them, is off at once and goes later."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchobs import debug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REGISTER: dict[str, Any] = {"pre": register_optimizer_step_pre_hook, "post": register_optimizer_step_post_hook}


@pytest.fixture
def model() -> Iterator[nn.Linear]:
    """A model, without findings of other tests."""
    debug.clear()
    yield nn.Linear(2, 1)
    debug.disable()
    debug.clear()


def global_hooks() -> int:
    """How many optimizer hooks torch has."""
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step after its backward pass."""
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()


def removed_in_a_hook(when: str, model: nn.Module, start: Callable[[Any], Any], stop: Callable[[], Any]) -> None:
    """Start before the first step, stop in it, and step again."""
    calls, before, backward = list[int](), global_hooks(), torch.autograd.backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(*_: Any) -> None:
        if not calls:
            stop()
        calls.append(1)

    handle = REGISTER[when](hook)  # before ours: it is called first, and torch goes on to ours
    try:
        start(optimizer)
        step(model, optimizer)
        weights = [weight.detach().clone() for weight in model.parameters()]
        step(model, optimizer)
        assert len(calls) == 2
        assert not all(map(torch.equal, weights, model.parameters()))
        assert global_hooks() == before + 1
        assert torch.autograd.backward is backward
    finally:
        handle.remove()


@pytest.mark.parametrize("when", ["pre", "post"])
def test_switches(model: nn.Linear, when: str) -> None:
    """Promise: ``disable()`` in a step's hook neither raises there nor leaves a hook behind."""
    removed_in_a_hook(when, model, lambda _: debug.enable(["gradient_norms"], gradients_every=1), debug.disable)
    assert debug.status().steps == 0


@pytest.mark.parametrize("when", ["pre", "post"])
def test_gradient_norms_of_an_operation(model: nn.Linear, when: str) -> None:
    """Promise: the block of ``debug.operation`` may end in a step's hook."""
    block = debug.context("step")
    removed_in_a_hook(when, model, lambda _: block.__enter__(), lambda: block.__exit__(None, None, None))


@pytest.mark.parametrize("when", ["pre", "post"])
def test_nan_guard(model: nn.Linear, when: str) -> None:
    """Promise: a guard that is removed in a step's hook holds no step back from then on."""
    guards: list[Any] = []
    removed_in_a_hook(when, model, lambda optimizer: guards.append(debug.nan_guard(optimizer)), lambda: guards.pop().remove())
    assert not guards
