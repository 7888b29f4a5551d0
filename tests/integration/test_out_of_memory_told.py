"""What is told of memory that ran out: by component and by module, for the host and for a device; the error is the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.training import Recording, loss_of, mlp
from torchobs import catalog
from torchobs.probes.device_memory import components, host_shortage
from torchobs.support import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.context import ProbeContext

TOO_MUCH = 1 << 50


def context_of(run: Recording) -> ProbeContext:
    """The session's."""
    assert run.session.context is not None
    return run.session.context


def torch_runs_out() -> object:
    """More than any machine has: torch has no class for this error."""
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


def numpy_runs_out() -> object:
    """The same in numpy, whose error is a ``MemoryError``."""
    return np.empty(TOO_MUCH, dtype=np.uint8)


@pytest.mark.parametrize(("fail", "asked"), [(torch_runs_out, TOO_MUCH), (numpy_runs_out, None)])
def test_the_host_s_memory_is_told_by_component(run: Recording, fail: Callable[[], object], asked: int | None) -> None:
    """An exception that ends the script, as the excepthook is given it: an event beside the exception's own."""
    model = torch.nn.Sequential(mlp(width=64), torch.nn.BatchNorm1d(1))
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        fail()
    session = run.session
    session._exits.record_exception(raised.value)
    session._exits.record_exception(raised.value)
    (told,) = run.frames(catalog.EVENT_OUT_OF_MEMORY.name)
    size = sum(parameter.nbytes for parameter in model.parameters())
    attributes = told["attrs"]
    assert attributes.get("requested") == asked
    assert attributes["parameters"] >= size
    assert attributes["gradients"] >= size
    assert attributes["optimizer_state"] >= 2 * size
    assert attributes["buffers"] >= sum(buffer.nbytes for buffer in model.buffers())
    assert len(run.frames(catalog.EVENT_EXCEPTION.name)) == 1


def test_other_errors_are_not_taken_for_it(run: Recording) -> None:
    """A ``RuntimeError`` is one only by the allocator's words."""
    for error in (RuntimeError("shapes do not match"), ValueError("DefaultCPUAllocator: can't allocate memory"), OSError(12)):
        assert host_shortage(context_of(run), error) is None


def test_modules_are_named_by_what_they_take_on_a_device(run: Recording) -> None:
    """With gradients and optimizer state; tensors on another device do not count."""
    model = torch.nn.ModuleDict({"large": torch.nn.Linear(300, 400), "small": torch.nn.Linear(3, 4)})
    large = model["large"]
    assert isinstance(large, torch.nn.Linear)
    size = large.weight.nbytes + large.bias.nbytes
    found = components(context_of(run), "cpu")
    assert f"large, {text.size(size)}" in found.modules
    assert components(context_of(run), "cuda:0").sizes["parameters"] == 0
