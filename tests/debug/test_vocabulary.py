"""The rules at the top of docs/debug.md, over all public signatures and results of the toolboxes in ``TOOLBOXES``."""

from __future__ import annotations

import asyncio
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import nn

from torchobs import debug
from torchobs.config.options import Level
from torchobs.debug.switches import PRESETS
from torchobs.support.result import Checked, Problem, Result

TOOLBOXES: list[ModuleType] = [debug]
"""Packages that keep the rules"""
ORDER = ("model", "batch", "loss_fn", "optimizer")
OTHER_WORDS = {
    "net": "model", "module": "model", "data": "batch", "inputs": "batch", "criterion": "loss_fn", "opt": "optimizer",
    "targets": "target", "autocast": "amp", "precision": "amp", "dtype": "amp",
}  # fmt: skip
BANNED = {"anomalies", "anomaly_detected", "reasons", "violations", "agree", "success", "verdict", "total_norm"}
UNITS = {
    "_s": {"time", "seconds", "duration", "wait", "elapsed"},
    "_bytes": {"memory", "size", "bytes", "allocated", "reserved"},
}
SIZES_OF_OTHER_THINGS = {"batch_size", "dataset_size", "world_size"}
VERBS = {"check", "inspect", "compare", "explain", "count", "trace", "profile", "monitor"}
VERBS |= {"enable", "disable", "clear", "report"}
NOUNS = {
    "context", "operation", "validation", "nan_guard", "logging_bridge", "early_stopping", "diffusion_monitor",  # blocks
    "forward_pass", "backward_pass", "optimization_step", "training_step", "inference",  # what they do is a noun in this field
    "memory", "memory_growth", "memory_by_module", "system", "status", "summary", "training_summary", "plots",  # readings
}  # fmt: skip


def functions() -> dict[str, Callable[..., Any]]:
    """All public functions, by name."""
    found = {name: getattr(toolbox, name) for toolbox in TOOLBOXES for name in toolbox.__all__}
    return {name: value for name, value in found.items() if callable(value) and not isinstance(value, type)}


def results() -> Iterator[type[Result]]:
    """All classes of results that the packages define."""
    for toolbox in TOOLBOXES:
        for module in pkgutil.iter_modules(toolbox.__path__, f"{toolbox.__name__}."):
            for value in vars(import_module(module.name)).values():
                if isinstance(value, type) and issubclass(value, Result) and value.__module__ == module.name:
                    yield value


def test_arguments_have_one_order_and_one_name() -> None:
    """Promise: model, batch, loss_fn, optimizer, in this order and before all others; a target by keyword."""
    wrong = []
    for name, function in functions().items():
        parameters = inspect.signature(function).parameters
        keyword = {word for word, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}
        places = [ORDER.index(word) if word in ORDER else len(ORDER) for word in parameters if word not in keyword]
        is_sorted = places == sorted(places) or name == "context"  # its batch is a number
        wrong += [f"{name}: the order of {list(parameters)}"] * (not is_sorted)
        wrong += [f"{name}: {word} is called {OTHER_WORDS[word]}" for word in parameters if word in OTHER_WORDS]
        wrong += [f"{name}: target by keyword only"] * ("target" in parameters and "target" not in keyword)
    assert wrong == []


def test_functions_are_verbs_or_known_nouns() -> None:
    """Promise: a new name that is neither is thought about."""
    first = {name: name.removeprefix("a") if name.startswith(("acheck", "ainspect")) else name for name in functions()}
    assert [name for name, word in first.items() if word.split("_")[0] not in VERBS and name not in NOUNS] == []


def test_results_speak_one_language() -> None:
    """Promise: frozen; what is wrong is in ``problems`` and makes a ``Checked``; seconds and bytes say so in their names."""
    wrong, classes = [], list(results())
    assert len(classes) > 10 * len(TOOLBOXES)
    for each in classes:
        names = {field.name: str(field.type) for field in fields(each)}
        wrong += [f"{each.__name__} is not frozen"] * (not each.__dataclass_params__.frozen)  # type: ignore[attr-defined]
        wrong += [f"{each.__name__}.{name}: another word for problems" for name in names if name in BANNED]
        wrong += [f"{each.__name__}: problems without ok"] * ("problems" in names and not issubclass(each, Checked))
        wrong += [f"{each.__name__}: ok without problems"] * ("problems" not in names and issubclass(each, Checked))
        for name, kind in names.items():
            for unit, words in UNITS.items():
                is_number = kind.split(" | ")[0] in {"int", "float"}
                if is_number and words & set(name.split("_")) - SIZES_OF_OTHER_THINGS and name not in SIZES_OF_OTHER_THINGS:
                    wrong += [f"{each.__name__}.{name} ends with {unit}"] * (not name.endswith(unit))
    assert wrong == []


def test_levels_are_those_of_the_session() -> None:
    """Promise: off, basic, advanced, extreme."""
    assert set(get_args(Level)) <= set(PRESETS)
    assert not {"none", "intermediate", "expert"} & set(PRESETS)


def sound() -> Iterator[Any]:
    """A result of each kind, of a small training that has nothing wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, x, y = torch.optim.SGD(model.parameters(), 0.1), torch.randn(6, 4), torch.randn(6, 1)
    with debug.context("step", slow_s=60.0, samples=6) as info, debug.memory_growth() as grown:
        step = debug.training_step(model, (x, y), nn.functional.mse_loss, optimizer, weights=True)
    yield from (info, grown, step, step.weights, debug.check_gradients(model), debug.inspect_tensor(x), debug.memory())
    yield from (debug.monitor_step(model), debug.memory_by_module(model), debug.memory_by_module(model, x), debug.status())
    yield from (debug.check_devices(model, x, optimizer), debug.count_flops(model, x), debug.compare_ranks(model))
    yield from (debug.check_dataloader([(x, y)] * 2), debug.diffusion_monitor().result(), debug.inspect_diffusion(model))
    yield from (debug.profile(lambda: model(x), 0, 0, 1), debug.summary(), debug.training_summary(), debug.inference(model, x))


def test_results_are_true_strict_json_and_readable() -> None:
    """Promise: ``bool()`` is ``ok`` is no problem; JSON without NaN; sizes and times with their units."""
    debug.clear()
    found = list(sound())
    for result in found:
        json.dumps(result.to_dict(), allow_nan=False)
        if isinstance(result, Checked):
            assert (bool(result), result.ok, result.problems) == (True, True, ()), str(result)
    by_name = {type(result).__name__: result for result in found}
    assert "KiB" in str(by_name["MemoryPoint"]) or "MiB" in str(by_name["MemoryPoint"])
    assert "ms" in str(by_name["TrainingStep"])
    assert by_name["ParameterInspection"]["0.weight"].numel == 32
    sick = debug.inspect_tensor(torch.tensor([float("nan"), 1.0]), "x")
    assert (bool(sick), sick.ok, sick.problems) == (False, False, (Problem("nonfinite_tensor", "x", "1 NaN of 2 elements"),))
    json.dumps(sick.to_dict(), allow_nan=False)


def takers() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Functions that need a model, each to be called with something as the model, and with ``None`` for what else it needs."""
    for name, function in functions().items():
        parameters = list(inspect.signature(function).parameters.values())
        needed = [each for each in parameters if each.default is inspect.Parameter.empty]
        if needed and needed[0].name == "model":
            yield name, partial(_called, function, len(needed) - 1)


def _called(function: Callable[..., Any], more: int, given: Any) -> Any:
    answer = function(given, *[None] * more)
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


@pytest.mark.parametrize("given", [None, "a model", 3, nn.Linear])
def test_what_is_no_model_is_refused_in_words(given: Any) -> None:
    """Promise: a ``TypeError`` that names the function and says what it takes, from each that takes a model."""
    called = dict(takers())
    assert len(called) > 12
    for name, call in called.items():
        with pytest.raises(TypeError, match=rf"{name.removeprefix('a')}\(\) takes a torch.nn.Module, not "):
            call(given)
