"""Modules that swap their parameters' content to convert or load them: torch refuses that to tensors referred to weakly."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchobs
from tests.training import Recording, batch, mlp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 12


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    """As torch will do by default in some later version."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step."""
    inputs, targets = batch()
    dtype = next(model.parameters()).dtype
    nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def convert_and_load(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters after a conversion there and back, and loading them."""
    model.double()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.float()
    return list(model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("level", ["basic", "advanced", "extreme"])
def test_a_model_under_watch_is_converted_and_loaded(flight_dir: Path, level: str) -> None:
    """During training, and after the end of the recording: the same parameters, trained on."""
    model = mlp()
    with torchobs.init(flight_dir=flight_dir, level=level, grad_interval=1) as session:
        torchobs.watch(model)
        recording, optimizer = Recording(session), sgd(model)
        before = list(model.parameters())
        for _ in range(STEPS):
            step(model, optimizer)
        recording.whole_round()
        after = convert_and_load(model)
        assert all(one is other for one, other in zip(before, after, strict=True))
        for _ in range(STEPS):
            step(model, optimizer)
        layers = {layer[0] for name, *layer in recording.look() if name == "torchobs.grad.layer.norm"}
    assert len(convert_and_load(model)) == len(before)
    assert layers == {"0", "2"}


def test_a_compiled_model_under_watch_is_converted(flight_dir: Path) -> None:
    """The inputs of its calls are noted, which are its parameters and the batch."""
    model = mlp()
    with torchobs.init(flight_dir=flight_dir, grad_interval=1):
        compiled, optimizer = torch.compile(model, backend="aot_eager"), sgd(model)
        for _ in range(STEPS):
            step(compiled, optimizer)
        convert_and_load(model)


def test_references_of_others_are_still_refused(flight_dir: Path) -> None:
    """What torch protects its users from."""
    model = mlp()
    with torchobs.init(flight_dir=flight_dir, grad_interval=1):
        step(model, sgd(model))
        known: Any = weakref.ref(next(model.parameters()))
        with pytest.raises(RuntimeError, match="swap Linear"):
            model.double()
    assert known() is not None
