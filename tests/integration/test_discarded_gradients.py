"""An accumulation of which only the last micro-batch counts is told; what sets gradients to zero on purpose is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.training import Recording, mlp
from torchobs import catalog

MICRO, STEPS = 3, 60


class Loop:
    """What a loop has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.probes = batches()

    def backward(self, x: torch.Tensor) -> None:
        """Of one batch."""
        functional.mse_loss(self.model(x), x.sum(1, keepdim=True).expand(-1, self.model(x).shape[1])).backward()  # type: ignore[no-untyped-call]

    def gradients(self) -> list[torch.Tensor]:
        """Copies of them."""
        return [torch.as_tensor(parameter.grad).clone() for parameter in self.model.parameters()]


def batches() -> Iterator[torch.Tensor]:
    """Of a loader, without end."""
    width = next(mlp().parameters()).shape[1]
    loader = DataLoader(TensorDataset(torch.randn(64, width)), batch_size=4)
    while True:
        for (x,) in loader:
            yield x


Step = Callable[[Loop, Iterator[torch.Tensor]], object]


def run_steps(run: Recording, step: Step) -> list[dict[str, Any]]:
    """Train, and return what was told of the loop."""
    loop, data = Loop(), batches()
    for _ in range(STEPS):
        step(loop, data)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    run.look()
    assert run.errors() == []
    return [told for told in run.attributes(catalog.EVENT_LOOP_MISTAKE.name) if told["kind"] != "gradients_kept"]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_zero_grad_in_each_micro_batch_is_told(run: Recording, *, set_to_none: bool, clips: bool) -> None:
    """However it is done, and also where what is left is clipped."""

    def step(loop: Loop, data: Iterator[torch.Tensor]) -> None:
        for _ in range(MICRO):
            loop.optimizer.zero_grad(set_to_none=set_to_none)
            loop.backward(next(data))
        if clips:
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)

    assert run_steps(run, step) == [{"kind": "gradients_discarded"}]


def accumulates(loop: Loop, data: Iterator[torch.Tensor]) -> None:
    """As it should."""
    for _ in range(MICRO):
        loop.backward(next(data))


def one_batch(loop: Loop, data: Iterator[torch.Tensor]) -> None:
    """No accumulation."""
    loop.optimizer.zero_grad()
    loop.backward(next(data))


def sharpness(loop: Loop, data: Iterator[torch.Tensor]) -> None:
    """Two passes through one batch, as of SAM or of adversarial examples."""
    x = next(data)
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.backward(x)


def combined(loop: Loop, data: Iterator[torch.Tensor]) -> None:
    """Gradients of several tasks are kept, and what is made of them is used."""
    kept = []
    for _ in range(MICRO):
        loop.optimizer.zero_grad()
        loop.backward(next(data))
        kept.append(loop.gradients())
    for parameter, *gradients in zip(loop.model.parameters(), *kept, strict=True):
        parameter.grad = torch.stack(gradients).sum(0)


def probed(loop: Loop, data: Iterator[torch.Tensor]) -> None:
    """The gradient of a batch of another loader is looked at first."""
    loop.backward(next(loop.probes))
    loop.optimizer.zero_grad()
    loop.backward(next(data))


def skipping(loop: Loop, data: Iterator[torch.Tensor]) -> None:
    """A micro-batch is left out now and then."""
    for index in range(MICRO):
        loop.backward(next(data))
        if index == 0 and torch.rand(()) < 0.3:
            loop.optimizer.zero_grad()


@pytest.mark.parametrize("step", [accumulates, one_batch, sharpness, combined, probed, skipping])
def test_what_is_meant_so_is_left_alone(run: Recording, step: Step) -> None:
    """Gradients that add up, or are set to zero for a reason."""
    assert run_steps(run, step) == []


def test_a_part_that_gets_no_gradient_in_some_batches_proves_nothing(run: Recording) -> None:
    """What is left of a zero gradient is what has come."""

    def step(loop: Loop, data: Iterator[torch.Tensor]) -> None:
        for index in range(MICRO):
            x = next(data)
            loop.model(x).square().mean().mul(index == MICRO - 1).backward()

    assert run_steps(run, step) == []
