"""``debug.memory_usage``, ``memory_tracking`` and ``profile_memory`` measure what they say."""

# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, comparison-overlap"
# a parameter may have no gradient, and here it has one; torch has no types for `backward`

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch

from tests.debug.models import MODELS
from torchobs import debug


def wide() -> torch.nn.Sequential:
    """A model whose activations are larger than its inputs."""
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


def test_components_are_counted_to_the_byte() -> None:
    """Parameters, gradients, optimizer state, buffers, inputs, and what each module keeps for the backward pass."""
    model = torch.nn.Sequential(*wide(), torch.nn.BatchNorm1d(8))
    count = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    found = debug.memory_usage(model, torch.randn(16, 64), optimizer=optimizer)
    assert (found.parameters, found.gradients, found.buffers, found.inputs) == (4 * count, 4 * count, 72, 16 * 64 * 4)
    assert found.optimizer_state == 8 * count + 4 * len(list(model.parameters()))  # two moments, and each one's step
    assert {(row.name, row.size) for row in found.modules} >= {
        ("1", 16 * 256 * 4),
        ("3", 16 * 8 * 4 + 2 * 8 * 4),
    }  # the input, and mean and deviation
    assert found.activations == sum(row.size for row in found.modules)
    assert str(found.batch_size) in str(found)
    for x in model.parameters():
        x.grad = torch.ones_like(x)
    optimizer.step()
    stepped = debug.memory_usage(model, torch.randn(16, 64), optimizer=optimizer)
    assert stepped.optimizer_state == found.optimizer_state


@pytest.mark.parametrize("name", MODELS)
def test_measuring_changes_nothing(name: str) -> None:
    """Weights, gradients, buffers, random state, hooks and modes are as they were; twice gives the same."""
    make, batch = MODELS[name]
    model, inputs = make(), batch()[0]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert str(debug.memory_usage(model, inputs)) == str(debug.memory_usage(model, inputs))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(x.grad is None for x in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert _python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor]
)
def test_the_state_of_an_optimizer_that_has_not_stepped(optimizer: Callable[..., Any]) -> None:
    """Is what it is after its first step."""
    model = wide()
    made = optimizer(model.parameters())
    foretold = debug.memory_usage(model, torch.randn(4, 64), optimizer=made).optimizer_state
    for x in model.parameters():
        x.grad = torch.ones_like(x)
    made.step()
    assert debug.memory_usage(model, torch.randn(4, 64), optimizer=made).optimizer_state == foretold


def test_lines_and_objects_that_grew_are_named() -> None:
    """Tensors by the line that made them, without those that are gone; Python's memory by ``tracemalloc``."""
    kept: list[Any] = []
    with debug.memory_tracking("leak") as found:
        assert (found.host, found.tensor_lines) == (None, ())
        for _ in range(5):
            kept.append(torch.ones(1000, 100))  # the tensors' line
            torch.ones(10_000, 10).add_(1)
        kept.append([str(number) * 100 for number in range(1000)])  # the texts' line
    lines = Path(__file__).read_text().splitlines()
    (row,) = found.tensor_lines
    assert (row.size, row.count, found.tensor_size) == (5 * 400_000, 5, 5 * 400_000)
    assert found.tensor_peak == 6 * 400_000
    assert "the tensors' line" in lines[int(row.location.rpartition(":")[2]) - 1]
    assert "the texts' line" in lines[int(found.python_lines[0].location.rpartition(":")[2]) - 1]
    assert found.python_lines[0].size > 200_000
    assert {one.name: one.count for one in found.objects}["torch.Tensor"] == 5
    assert not tracemalloc.is_tracing()
    assert "leak" in str(found)


def test_tracking_leaves_the_user_s_own_tracing_on() -> None:
    """And fills the result when an exception goes on."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="on"), debug.memory_tracking() as found:
            raise ValueError("on")
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
    assert found.host is not None
    assert _python_dispatch._get_current_dispatch_mode() is None


def test_a_point_has_the_tensors_by_shape() -> None:
    """Views of one memory count once."""
    kept = torch.ones(123, 1000)
    views = [kept[:], kept[:]]
    found = debug.profile_memory("here")
    (row,) = (row for row in found.largest if row.shape == (123, 1000))
    assert (row.count, row.size, row.dtype, row.device) == (3, 492_000, "float32", "cpu")
    assert found.host > 10 << 20
    assert (found.label, found.devices, len(views)) == ("here", (), 2)
    assert found.tensor_size >= 492_000
