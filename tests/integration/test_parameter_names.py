"""How parameters get their names, without a scan of all objects that would hold up the training; which layers are shown."""

from __future__ import annotations

import copy
import gc
from math import log
from typing import Any

import pytest
import torch

from torchobs.detect.spikes import LASTING, judge_low
from torchobs.support.error_guard import CircuitBreaker
from torchobs.tensors import names as module_of_names
from torchobs.tensors.names import LONGEST, ParameterNames, clean, layer_of


@pytest.fixture
def names() -> Any:
    """Names, with torch's hooks in place."""
    breaker = CircuitBreaker("gradients")
    found = ParameterNames(lambda: None)
    found.built_modules.install(breaker)
    yield found
    found.built_modules.remove()
    assert not breaker.errors


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per look at all objects."""
    made: list[int] = []
    whole = gc.get_objects

    def counted(generation: int | None = None) -> list[Any]:
        made.append(1)
        return whole(generation)

    monkeypatch.setattr(gc, "get_objects", counted)
    return made


class Net(torch.nn.Module):
    """A module in a list in a module, one of them made by copying, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.blocks = torch.nn.ModuleList([copy.deepcopy(block) for _ in range(2)])
        self.scale = torch.nn.Parameter(torch.ones(()))


def called(names: ParameterNames, model: torch.nn.Module) -> list[str | None]:
    """What its parameters are called."""
    names.look_for(list(model.parameters()))
    return [names.get(parameter) for parameter in model.parameters()]


def test_a_module_built_after_init_is_known_without_a_look(names: ParameterNames, looks: list[int]) -> None:
    """Also its copied parts; the outermost module names them, and a wrapper around it leaves no trace."""
    model = Net()
    expected = ["scale", "blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.0.weight", "blocks.1.0.bias"]
    assert called(names, torch.nn.ModuleDict({"module": model})) == expected
    assert looks == []


def test_a_bare_layer_is_its_own_model(names: ParameterNames, looks: list[int]) -> None:
    """It is given parameters and no child."""
    assert called(names, torch.nn.Linear(2, 1)) == ["weight", "bias"]
    assert looks == []


def test_one_built_before_or_copied_as_a_whole_is_looked_for(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch told nobody of them."""
    monkeypatch.setattr(module_of_names, "SCAN_AFTER_S", 0.0)
    model = Net()
    names = ParameterNames(lambda: None)
    names.built_modules.install(CircuitBreaker("gradients"))
    try:
        twin = copy.deepcopy(model)
        assert called(names, twin)[0] == "scale"
        assert looks == [1]
    finally:
        names.built_modules.remove()


def test_what_was_built_may_go(names: ParameterNames, looks: list[int]) -> None:
    """Nothing is kept alive, and another module at the same address is another."""
    for _ in range(50):
        Net()
    gc.collect()
    assert names.built_modules.modules() == []
    assert called(names, Net())[0] == "scale"
    assert looks == []


NAMES = {
    "module.0.weight": "0.weight",
    "module.module.0.weight": "0.weight",
    "_orig_mod.module.blocks.3._checkpoint_wrapped_module.mlp.weight": "blocks.3.mlp.weight",
    "module._fsdp_wrapped_module.head.weight": "head.weight",
    "encoder.module.weight": "encoder.module.weight",
    "module": "module",
    "linear.parametrizations.weight.original0": "linear.weight",
}


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_wrappers_leave_no_trace_in_a_name(name: str, expected: str) -> None:
    """Only what wraps from outside is taken off: a module that the author called `module` keeps its name."""
    assert clean(name) == expected


def test_a_layer_is_the_module_of_a_parameter() -> None:
    """A parameter of the outermost module is its own layer; of an endless name the end stays, for it tells most."""
    assert [layer_of("a.b.weight"), layer_of("scale")] == ["a.b", "scale"]
    assert layer_of("x" * 500 + ".end.weight").endswith("x.end")
    assert len(layer_of("x" * 500 + ".end.weight")) == LONGEST


def test_only_a_lasting_decline_is_a_verdict() -> None:
    """Four small norms are none, the fifth in a row is; an ordinary one in between begins anew."""
    low = 0
    for number in range(1, LASTING + 3):
        vanished, low = judge_low(1e-4, log(1.0), 0.01, 100, low)
        assert vanished == (number >= LASTING)
    assert judge_low(1.0, log(1.0), 0.01, 100, low) == (False, 0)
    assert judge_low(1e-4, log(1.0), 0.01, 5, LASTING) == (False, 0)  # too little past
    assert judge_low(1e-4, log(1.0), 4.0, 100, 0) == (False, 0)  # within six standard deviations
    assert judge_low(0.0, 0.0, 0.0, 0, LASTING - 1) == (True, LASTING)  # zero needs no past
