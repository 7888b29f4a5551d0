"""One vocabulary for torchobs.tune and torchobs.guard: arguments, results and errors of all that is public."""

from __future__ import annotations

import dataclasses
import inspect
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchobs import guard, tune
from torchobs.support.result import Checked, Result

ORDER = ("model", "batch", "loss_fn", "optimizer")
DEFAULTS = {"amp": "auto", "level": "basic"}
OTHER_WORDS = {
    "accepted", "agree", "anomalies", "exceeded", "failures", "left_out", "missing", "norm", "reasons", "success", "total_norm",
    "verdict", "violations",
}  # fmt: skip
"""For ``ok`` and ``problems``, and for ``gradient_norm``"""
OTHER_ARGUMENTS = {"amp_dtype", "compute", "criterion", "net", "precision"}


def public() -> Iterator[tuple[str, Any]]:
    """Each public function, constructor and method, with its name."""
    for toolbox in (tune, guard):
        for name in toolbox.__all__:
            value = getattr(toolbox, name)
            if isinstance(value, type) and issubclass(value, BaseException):
                continue
            yield name, value
            if isinstance(value, type):
                methods = {method for base in value.__mro__ if base.__module__.startswith("torchobs.") for method in vars(base)}
                callables = {method: getattr(value, method) for method in methods if not method.startswith("_")}
                yield from ((f"{name}.{method}", each) for method, each in callables.items() if inspect.isfunction(each))


def test_arguments_stand_in_one_order_and_have_one_name() -> None:
    """Promise: whoever knows one function's arguments knows them of all: model, batch, loss_fn, optimizer; amp, level."""
    wrong = []
    for name, function in public():
        parameters = inspect.signature(function).parameters
        places = [ORDER.index(each) for each in parameters if each in ORDER]
        if places != sorted(places):
            wrong.append(f"{name}: {', '.join(parameters)}")
        wrong += [f"{name}: {each}" for each in parameters if each in OTHER_ARGUMENTS]
        defaults = {each: parameters[each].default for each in DEFAULTS if each in parameters}
        wrong += [
            f"{name}: {defaults}" for each, default in defaults.items() if default not in {DEFAULTS[each], inspect._empty}
        ]
    assert wrong == []


def results() -> dict[str, type[Result]]:
    """All classes of results of the toolboxes, rows of results included."""
    found = {}
    kinds = [Result]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__module__.startswith(("torchobs.tune.", "torchobs.guard.")):
            found[kind.__name__] = kind
    return found


def test_results_are_frozen_and_have_one_word_for_one_thing() -> None:
    """Promise: what a function returns has ok and problems, and no field that says the same in another word."""
    functions = list(public())
    kinds, wrong = results(), []
    for name, kind in kinds.items():
        parameters: Any = kind.__dataclass_params__  # type: ignore[attr-defined]
        names = {each.name for each in dataclasses.fields(kind)} | {each for each in vars(kind) if not each.startswith("_")}
        wrong += [f"{name}.{each}" for each in names & OTHER_WORDS]
        wrong += [] if parameters.frozen else [f"{name} is not frozen"]
    for name, function in functions:
        returned = [] if isinstance(function, type) else function.__annotations__.get("return", "").split(" | ")
        wrong += [f"{name} returns {each}" for each in returned if each in kinds and not issubclass(kinds[each], Checked)]
    assert wrong == []


def model() -> nn.Sequential:
    """A small one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def skipped() -> guard.StepOutcome:
    """One of a recovery, of a batch with a NaN."""
    trained = model()
    recovery = guard.Recovery(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    return recovery.step((torch.full((2, 4), torch.nan), torch.ones(2, 2)), nn.functional.mse_loss)


X = torch.ones(2, 4)
PAIR = (X, torch.ones(2, 2))
MADE: dict[str, Callable[[Path], Checked]] = {
    "Benchmark": lambda _: tune.benchmark(model(), X, modes=("none",), rounds=6),
    "Plan": lambda _: tune.optimize(model(), amp="bf16"),
    "Difference": lambda _: tune.optimize(model(), amp="bf16").inspect(X),
    "FitResult": lambda _: tune.pipeline(model(), nn.functional.mse_loss, amp="off").fit([PAIR], 1),
    "MemoryStats": lambda _: tune.memory_stats("cpu"),
    "Devices": lambda _: tune.devices(),
    "Freed": lambda _: tune.clear_cache("cpu"),
    "MemoryLimit": lambda _: tune.memory_fraction(0.5, "cpu"),
    "ContractReport": lambda _: guard.Contract(max=0.0).inspect(X),
    "OutputReport": lambda _: guard.check_outputs(X),
    "ModelReport": lambda _: guard.check_model({"w": torch.tensor([torch.nan])}),
    "InferenceResult": lambda _: guard.safe_inference(model(), X * torch.nan),
    "StepOutcome": lambda _: skipped(),
    "ResourceReport": lambda _: guard.resources(memory=0, cpu=None).check(),
    "FileScan": lambda folder: guard.scan_file(_saved(folder)),
}


def _saved(folder: Path) -> Path:
    torch.save(model(), folder / "whole.pt")
    return folder / "whole.pt"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", MADE)
def test_a_result_says_whether_all_is_well(name: str, tmp_path: Path) -> None:
    """Promise: ok, bool() and problems agree; it cannot be changed, prints, and becomes strict JSON."""
    result = MADE[name](tmp_path)
    assert type(result).__name__ == name
    assert result.ok == bool(result) == (not result.problems)
    assert isinstance(result.problems, tuple)
    assert all(type(each.kind) is type(each.where) is type(each.text) is str for each in result.problems)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (plain["ok"], len(plain["problems"])) == (result.ok, len(result.problems))
    assert str(result)
    assert result._repr_html_()
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.problems = ()  # type: ignore[misc]


def test_numbers_print_in_units_for_people() -> None:
    """Promise: bytes and seconds, which are plain numbers in the fields."""
    assert "iB" in str(tune.memory_stats("cpu"))
    assert (
        "ms"
        in str(tune.pipeline(model(), nn.functional.mse_loss, amp="off").fit([PAIR], 1)).split("duration_s")[1].split("\n")[0]
    )


META = nn.Linear(4, 2, device="meta")
TAKES_A_MODEL: dict[str, Callable[[Any], object]] = {
    "benchmark": lambda given: tune.benchmark(given, X),
    "pipeline": lambda given: tune.pipeline(given, nn.functional.mse_loss),
    "Plan.inspect": lambda given: tune.optimize(given).inspect(X),
    "check_model": guard.check_model,
    "safe_inference": lambda given: guard.safe_inference(given, X),
    "Recovery": lambda given: guard.Recovery(given, torch.optim.SGD([torch.ones(1)])).step(PAIR, nn.functional.mse_loss),
}


@pytest.mark.parametrize("given", [None, "model", META], ids=str)
@pytest.mark.parametrize("name", TAKES_A_MODEL)
def test_what_is_no_model_is_refused_with_what_is_needed(name: str, given: Any) -> None:
    """Promise: None, a name and a model without values are errors that say so, before anything is computed."""
    with pytest.raises((TypeError, ValueError), match=r"on the device meta|[mM]odule.*not (str|NoneType)"):
        TAKES_A_MODEL[name](given)


@pytest.mark.parametrize("loss_fn", [None, "mse", nn.MSELoss, lambda a, b, c: a + b + c])
def test_what_is_no_loss_function_is_refused(loss_fn: Any) -> None:
    """Promise: the error has both forms."""
    trained = model()
    recovery = guard.Recovery(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    for call in (lambda: tune.pipeline(model(), loss_fn), lambda: recovery.step(PAIR, loss_fn)):
        with pytest.raises(TypeError, match=r"loss_fn\(model, batch\), or loss_fn\(output, target\)"):
            call()
    assert recovery.steps == 0


@pytest.mark.parametrize("name", ["tuned_training", "guarded_training"])
def test_the_programs_of_the_toolbox_run(
    name: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: at most twenty lines each, and they print what they found."""
    path = checkout / "examples" / "toolbox" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    expected = {
        "tuned_training": ["Plan: mode amp", "recommended", "losses"],
        "guarded_training": ["batch 7: x: finite", "39 steps"],
    }
    assert [words for words in expected[name] if words not in printed] == []
