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
