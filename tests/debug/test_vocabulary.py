"""One vocabulary for torchobs.debug, tune and guard: arguments, results and errors of all that is public."""

from __future__ import annotations

import asyncio
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from torchobs import debug, guard, tune
from torchobs.support.result import Checked, Problem, Result
from torchobs.support.text import moment

TOOLBOXES: list[ModuleType] = [debug, tune, guard]
DEFAULTS = {"amp": {"auto", "off"}, "level": {"basic"}}
ORDER = ("model", "batch", "loss_fn", "optimizer")
OTHER_WORDS = {
    "net": "model", "module": "model", "data": "batch", "inputs": "batch", "criterion": "loss_fn", "opt": "optimizer",
    "targets": "target", "autocast": "amp", "precision": "amp", "amp_dtype": "amp", "compute": "amp",
}  # fmt: skip
ARE_INPUTS = {"validate_inputs"}
"""What it takes is no batch of a model"""
UNITS = {
    "_s": {"time", "seconds", "duration", "wait", "elapsed"},
    "_bytes": {"memory", "size", "bytes", "allocated", "reserved"},
}
SIZES_OF_OTHER_THINGS = {"batch_size", "dataset_size", "world_size", "memory_savings"}


def functions() -> dict[str, Callable[..., Any]]:
    """All public functions, by name."""
    return {name: value for name, value in public() if "." not in name and not isinstance(value, type)}


def public() -> Iterator[tuple[str, Any]]:
    """Each public function, constructor and method, with its name."""
    for toolbox in TOOLBOXES:
        for name in toolbox.__all__:
            value = getattr(toolbox, name)
            if isinstance(value, type) and not issubclass(value, BaseException):
                methods = {method for base in value.__mro__ if base.__module__.startswith("torchobs.") for method in vars(base)}
                callables = {method: getattr(value, method) for method in methods if not method.startswith("_")}
                yield from ((f"{name}.{key}", method) for key, method in callables.items() if inspect.isfunction(method))
            if not (isinstance(value, type) and issubclass(value, BaseException)):
                yield name, value


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
    for name, function in public():
        if isinstance(function, type):
            continue  # of results and policies
        parameters = inspect.signature(function).parameters
        keyword = {word for word, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
        places = [ORDER.index(word) for word in parameters if word in ORDER and word not in keyword]
        is_sorted = places == sorted(places) or name == "context"  # its batch is a number
        wrong += [f"{name}: the order of {list(parameters)}"] * (not is_sorted)
        others = [word for word in parameters if word in OTHER_WORDS and name not in ARE_INPUTS]
        wrong += [f"{name}: {word} is called {OTHER_WORDS[word]}" for word in others]
        wrong += [f"{name}: target by keyword only"] * ("target" in parameters and "target" not in keyword)
        defaults = {word: parameters[word].default for word in DEFAULTS if word in parameters}
        wrong += [
            f"{name}: {word}={default!r}"
            for word, default in defaults.items()
            if default not in {*DEFAULTS[word], inspect.Parameter.empty}
        ]
    assert wrong == []


def test_results_speak_one_language() -> None:
    """Promise: frozen; what is wrong is in ``problems`` and makes a ``Checked``; seconds and bytes say so in their names."""
    wrong, classes = [], list(results())
    assert len(classes) > 10 * len(TOOLBOXES)
    for result in classes:
        names = {field.name: str(field.type) for field in fields(result)}
        has_problems = "problems" in names or hasattr(result, "problems")
        wrong += [f"{result.__name__} is not frozen"] * (not result.__dataclass_params__.frozen)  # type: ignore[attr-defined]
        wrong += [f"{result.__name__}: problems without ok"] * (has_problems and not issubclass(result, Checked))
        wrong += [f"{result.__name__}: ok without problems"] * (issubclass(result, Checked) and not has_problems)
        for name, kind in names.items():
            for unit, words in UNITS.items():
                is_number = kind.split(" | ")[0] in {"int", "float"}
                if is_number and words & set(name.split("_")) - SIZES_OF_OTHER_THINGS and name not in SIZES_OF_OTHER_THINGS:
                    wrong += [f"{result.__name__}.{name} ends with {unit}"] * (not name.endswith(unit))
    assert wrong == []


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


def takers() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Functions that need a model, each to be called with something as the model, and with ``None`` for what else it needs."""
    for name, function in functions().items():
        parameters = list(inspect.signature(function).parameters.values())
        usual = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        needed = [parameter for parameter in usual if parameter.default is inspect.Parameter.empty]
        if needed and needed[0].name == "model":
            yield name, partial(_called, function, len(needed) - 1)


def _called(function: Callable[..., Any], more: int, model: Any) -> Any:
    answer = function(model, *[None] * more)
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


@pytest.mark.parametrize("wrong", [None, "a model", 3, nn.Linear])
def test_what_is_no_model_is_refused_in_words(wrong: Any) -> None:
    """Promise: a ``TypeError`` that names the function and says what it takes, from each that takes a model."""
    called = dict(takers())
    assert len(called) > 16
    for name, call in called.items():
        if not (name == "safe_inference" and callable(wrong)):
            takes = rf"({name.removeprefix('a')}\(\) takes|model is) a torch.nn.Module.* not |a module or its state"
            with pytest.raises(TypeError, match=takes):
                call(wrong)


def small() -> nn.Sequential:
    """A small one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.ones(2, 4)
PAIR = (X, torch.ones(2, 2))


def others(folder: Path) -> Iterator[Checked]:
    """A result of each kind of tune and guard, and of debug one that is sick."""
    torch.save(small(), folder / "whole.pt")
    model, loss_fn = small(), nn.functional.mse_loss
    recovery = guard.Recovery(model, torch.optim.SGD(model.parameters(), lr=0.1))
    yield from (tune.benchmark(small(), X, modes=("none",), rounds=6), tune.optimize(small(), amp="bf16"), tune.devices())
    yield from (tune.optimize(small(), amp="bf16").inspect(X), tune.pipeline(small(), loss_fn, amp="off").fit([PAIR], 1))
    yield from (tune.memory_stats("cpu"), tune.clear_cache("cpu"), tune.memory_fraction(0.5, "cpu"))
    yield from (guard.Contract(max=0.0).inspect(X), guard.check_outputs(X), guard.check_model({"w": torch.tensor([torch.nan])}))
    yield from (guard.safe_inference(small(), X * torch.nan), recovery.step((X * torch.nan, PAIR[1]), loss_fn))
    yield from (guard.resources(memory=0, cpu=None).check(), guard.scan_file(folder / "whole.pt"))
    yield debug.inspect_tensor(torch.tensor([float("nan"), 1.0]), "x")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_results_are_true_strict_json_and_readable(tmp_path: Path) -> None:
    """Promise: ``bool()`` is ``ok`` is no problem; JSON without NaN; sizes and times with their units; nothing is changed."""
    debug.clear()
    healthy = list(sound())
    for result in (*healthy, *others(tmp_path)):
        plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert str(result)
        if isinstance(result, Checked):
            assert result.ok == bool(result) == (not result.problems), str(result)
            assert all(type(problem.kind) is type(problem.where) is type(problem.text) is str for problem in result.problems)
            assert (plain["ok"], len(plain["problems"])) == (result.ok, len(result.problems))
            assert result.ok or result not in healthy
            with pytest.raises(FrozenInstanceError):
                result.problems = ()  # type: ignore[misc]
    by_name = {type(result).__name__: result for result in healthy}
    assert "KiB" in str(by_name["MemoryPoint"]) or "MiB" in str(by_name["MemoryPoint"])
    assert "ms" in str(by_name["TrainingStep"])
    assert moment(by_name["DebugInfo"].timestamp_s) in str(by_name["DebugInfo"])
    assert by_name["ParameterInspection"]["0.weight"].numel == 32
    assert result.problems == (Problem("nonfinite_tensor", "x", "1 NaN of 2 elements"),)


META = nn.Linear(4, 2, device="meta")
LOOKS_INTO: list[Callable[[Any], object]] = [
    lambda model: debug.memory_by_module(model, X),
    lambda model: debug.trace_nan(model, X.to("meta")),
    debug.monitor_step,
    lambda model: tune.benchmark(model, X),
    lambda model: tune.pipeline(model, nn.functional.mse_loss),
    lambda model: tune.optimize(model).inspect(X),
    guard.check_model,
    lambda model: guard.safe_inference(model, X),
    lambda model: guard.Recovery(model, torch.optim.SGD([torch.ones(1)])).step(PAIR, nn.functional.mse_loss),
]


def test_a_model_without_values_is_refused() -> None:
    """Promise: an error that says so, before anything is computed: zero bytes, or no NaN, would be no answer."""
    for look in LOOKS_INTO:
        with pytest.raises(ValueError, match=r"on the device meta|monitor_step\(\) needs weights"):
            look(META)


@pytest.mark.parametrize("loss_fn", [None, "mse", nn.MSELoss, lambda a, b, c: a + b + c])
def test_what_is_no_loss_function_is_refused(loss_fn: Any) -> None:
    """Promise: the error has both forms."""
    trained = small()
    recovery = guard.Recovery(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    for call in (lambda: tune.pipeline(small(), loss_fn), lambda: recovery.step(PAIR, loss_fn)):
        with pytest.raises(TypeError, match=r"loss_fn\(model, batch\), or loss_fn\(output, target\)"):
            call()
    assert recovery.steps == 0
