"""A forward pass whose graph is not gone through leaves nothing in memory, though what it keeps was looked at."""

# mypy: disable-error-code="no-untyped-call"

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from torchobs import debug, tune


def _fails(_: object) -> torch.Tensor:
    raise LookupError("no label")


def _part(output: torch.Tensor) -> torch.Tensor:
    return output[:, :1].detach().requires_grad_().sum()


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "the loss function raises": lambda model, x: debug.memory_usage(model, x, loss_fn=_fails),
    "the loss is of something else": lambda model, x: debug.memory_usage(model, x, loss_fn=_part),
    "no backward pass": lambda model, x: tune.optimize(
        model, mode="memory_efficient", checkpoint=nn.Linear, activation_budget=1, example=x
    ),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("function", [torch.tanh, torch.exp, lambda x: torch.softmax(x, 1), torch.sqrt])
def test_outputs_that_their_own_nodes_keep_are_freed(run: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Promise: by their last reference, without the garbage collector, which could not see them."""
    memory: list[weakref.ref[Any]] = []

    class Kept(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = function(x)
            memory.append(weakref.ref(out.untyped_storage()))  # torch keeps it for as long as the memory
            return out

    with suppress(LookupError):
        RUNS[run](nn.Sequential(nn.Linear(4, 8), Kept(), nn.Linear(8, 2)), torch.randn(6, 4))
    assert memory
    assert [each() for each in memory] == [None] * len(memory)
