"""Every function of the guard on real models, eager and compiled: on what is right, on what is wrong, and twice in a row."""

from __future__ import annotations

import hashlib
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.guard_cases import CASES, Case
from tests.guard_trainings import same, weights
from torchobs import guard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.guard_cases import Batch

COMPILED = [
    ("MLP", "eager"), ("GPT", "aot_eager"), ("MLP", "inductor"), ("CNN", "aot_eager"), ("UNet", "aot_eager"),
    ("GPT", "inductor"), ("CNN", "inductor"), ("UNet", "inductor"),
]  # fmt: skip
"""Model and backend of torch.compile; the first by default, since a compiler takes its time"""


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("name", CASES)
def test_every_function_on_a_real_model(name: str, tmp_path: Path) -> None:
    """Promise: what is sound passes, and a step trains; wrong ones are refused or skipped; twice the same."""
    torch.manual_seed(0)
    exercise(CASES[name], CASES[name].make(), tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_function_on_a_compiled_model(share_of: Callable[[int], int], tmp_path: Path) -> None:
    """Promise: the same of models that torch.compile has made faster, whatever its backend."""
    for name, backend in COMPILED[: share_of(len(COMPILED))]:
        torch.manual_seed(0)
        torch.compiler.reset()
        exercise(CASES[name], torch.compile(CASES[name].make(), backend=backend, dynamic=True), tmp_path)  # type: ignore[arg-type]
    torch.compiler.reset()


def exercise(case: Case, model: torch.nn.Module, folder: Path) -> None:
    """Everything, twice in a row."""
    for _ in range(2):
        batch = case.batch()
        inputs_and_outputs(case, model, batch)
        steps(case, model, batch)
        files(case, model, folder / "weights.pt")


def inputs_and_outputs(case: Case, model: torch.nn.Module, batch: Batch) -> None:
    """Contracts, inference and outputs."""
    first, x = next(iter(batch.items()))
    inputs = {name: value for name, value in batch.items() if name != "target"}
    case.contract.check(x)
    guard.validate_inputs(batch, {first: case.contract, "target": guard.Contract("batch ...")})
    result = guard.safe_inference(model, inputs)
    assert result.success, result.error
    output = result.data if isinstance(result.data, torch.Tensor) else result.data.sample
    assert guard.sanitize_outputs(result.data) is result.data
    sample = output.repeat(20, *[1] * (output.dim() - 1))
    assert guard.check_outputs(sample, reference=sample).ok
    for wrong in case.wrong:
        with pytest.raises(guard.ContractError, match=f"{first}: "):
            case.contract.check(wrong, first)
        failed = guard.safe_inference(model, {**inputs, first: wrong})
        assert (failed.success, failed.attempts, failed.data) == (False, 1, None)


def steps(case: Case, model: torch.nn.Module, batch: Batch) -> None:
    """Recovery: what is sound trains, and in parts where it does not fit; a NaN changes nothing; an error is the user's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recovery = guard.Recovery(model, optimizer, max_grad_norm=1.0)
    outcome = recovery.step([batch, case.batch()], lambda part: case.loss(model, part), accumulate=True)
    assert (outcome.action, outcome.parts, outcome.stepped, isfinite(outcome.loss)) == ("none", 2, True, True)
    before = weights(model)
    assert recovery.step(batch, lambda part: case.loss(model, part) * nan).action == "skip"
    assert same(before, weights(model))

    def too_large(part: Batch) -> torch.Tensor:
        if len(part["target"]) > 3:
            raise torch.OutOfMemoryError("too many samples")
        return case.loss(model, part)

    assert recovery.step(batch, too_large).action == "split"
    assert not same(before, weights(model))
    before, first = weights(model), next(iter(batch))
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        recovery.step({**batch, first: case.wrong[0]}, lambda part: case.loss(model, part))
    assert same(before, weights(model))


def files(case: Case, model: torch.nn.Module, path: Path) -> None:
    """Weights: sound, saved, clean, the same when they are loaded, and not those of another architecture."""
    report = guard.check_model(model, reference=case.make())
    assert report.ok, report
    torch.save(model.state_dict(), path)
    assert guard.scan_file(path).verdict == "clean"
    guard.verify(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    loaded: dict[str, Any] = guard.load(path)
    assert same(list(loaded.values()), weights(model))
    assert not guard.check_model(loaded, reference=torch.nn.Linear(3, 3)).ok
    with pytest.raises(guard.WrongFileError):
        guard.verify(path, sha256=hashlib.sha256(b"").hexdigest())
