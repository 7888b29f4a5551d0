"""What runs a model, or takes batches, beside a training leaves no trace in it: random states, buffers, also replaced ones."""

# mypy: disable-error-code="no-untyped-call"
# ruff: noqa: NPY002  # the global generator, which augmentations draw from

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchobs import debug


class _Counting(nn.Module):
    """Keeps a count and a mean as buffers, and draws from all generators."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1  # another tensor each time, as in `self.queue = torch.cat(...)`
        self.mean = x.detach().mean()
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return self.norm(self.layer(x + noise))  # type: ignore[no-any-return]


def random_states() -> list[Any]:
    """The next number of each generator, which stays where it is."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return drawn


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "memory_usage": debug.memory_usage,
    "count_flops": debug.count_flops,
    "devices": debug.devices,
    "compile": debug.compile,
    "trace_nan": debug.trace_nan,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_model_that_is_run_beside_its_training_is_as_before(name: str) -> None:
    """Promise: buffers, also those that a forward pass replaces, and the states of Python's, NumPy's and torch's generators."""
    model, x = _Counting(), torch.randn(6, 4)
    model(x)
    buffers = dict(model.named_buffers())
    values, drawn = {key: buffer.clone() for key, buffer in buffers.items()}, random_states()
    RUNS[name](model, x)
    after = dict(model.named_buffers())
    assert all(after[key] is buffer and torch.equal(buffer, values[key]) for key, buffer in buffers.items())
    assert after.keys() == buffers.keys()
    assert random_states() == drawn


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_on_where_they_are_measured(mode: Callable[[], Any]) -> None:
    """Promise: called where gradients are off, as in an evaluation, the answers are the same, and they are off afterwards."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(6, 4)
    asked = [lambda: debug.memory_usage(model, x).activations, lambda: debug.count_flops(model, x).flops]
    expected = [ask() for ask in asked]
    with mode():
        assert [ask() for ask in asked] == expected
        assert debug.trace_nan(model, x) is None
        assert not torch.is_grad_enabled()


def test_a_backward_pass_that_waits_is_still_possible() -> None:
    """Promise: what is put back counts as no change of what a graph has kept."""
    model, x = _Counting().eval(), torch.randn(6, 4)
    loss = (model(x) * model.norm.running_var).sum()
    debug.count_flops(model, x)
    loss.backward()
    assert model.layer.weight.grad is not None


class _Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), index + random.random() + float(np.random.rand()))


def test_batches_that_are_looked_at_leave_the_order_and_the_augmentation() -> None:
    """Promise: the training's own batches are those that it would have had."""
    drawn = random_states()
    debug.dataloader(DataLoader(_Augmented(), batch_size=2, shuffle=True), batches=3)
    assert random_states() == drawn
