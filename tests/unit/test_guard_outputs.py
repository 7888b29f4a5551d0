"""Outputs of models: refused or replaced where they are not finite, and told where they say nothing."""

from __future__ import annotations

from collections import UserDict, defaultdict
from dataclasses import dataclass
from math import inf, nan
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from transformers.utils import ModelOutput

from torchobs import guard


class Pair(NamedTuple):
    """Outputs as some models return them."""

    logits: torch.Tensor
    hidden: torch.Tensor | None


def test_refuse_is_the_default() -> None:
    """Promise: a NaN is never hidden unless somebody asks for it; the message names the part."""
    with pytest.raises(guard.NonFiniteOutputError, match=r"answer\.a\[1\]: 1 NaN and 1 Inf among 3 values"):
        guard.sanitize_outputs({"a": [torch.ones(1), torch.tensor([nan, inf, 0.0])]}, name="answer")


def test_finite_outputs_are_the_same_objects() -> None:
    """Promise: nothing is copied where nothing is wrong."""
    outputs = {"logits": torch.randn(3), "ids": torch.tensor([1]), "more": (Pair(torch.zeros(2), None), "text")}
    policies: Any = ("refuse", "clamp", "nan_to_num")
    assert all(guard.sanitize_outputs(outputs, policy) is outputs for policy in policies)


def test_clamp_and_nan_to_num() -> None:
    """Promise: values become what was said; the structure stays; clamp does not hide a NaN."""
    found = guard.sanitize_outputs(Pair(torch.tensor([inf, -inf, 5.0, 0.5]), None), "clamp", low=-1.0, high=1.0)
    assert found == Pair(logits=found.logits, hidden=None)
    assert found.logits.tolist() == [1.0, -1.0, 1.0, 0.5]
    with pytest.raises(guard.NonFiniteOutputError, match="use nan_to_num"):
        guard.sanitize_outputs(torch.tensor([nan]), "clamp")
    assert guard.sanitize_outputs(torch.tensor([nan, inf]), "nan_to_num", nan=0.25, high=9.0).tolist() == [0.25, 9.0]
    assert guard.sanitize_outputs(torch.tensor([inf], dtype=torch.float16), "nan_to_num").item() == 65504.0


def test_structures_of_every_class() -> None:
    """Promise: a mapping keeps its class, a NaN becomes what was said whatever the limits, and float8 is looked at."""
    outputs: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(1), logits=torch.tensor([nan, 3.0]))
    found = guard.sanitize_outputs(outputs, "nan_to_num", low=0.0, high=1.0, nan=-1.0)
    assert type(found) is defaultdict
    assert found["logits"].tolist() == [-1.0, 1.0]
    assert outputs["logits"].isnan().any()
    bad = {"logits": torch.tensor([nan]).to(torch.float8_e5m2)}
    for mapping in (UserDict(bad), MappingProxyType(bad)):
        with pytest.raises(guard.NonFiniteOutputError, match=r"output\.logits"):
            guard.sanitize_outputs(mapping)


@dataclass(frozen=True, slots=True)
class _Output:
    logits: torch.Tensor
    name: str = "a"


@dataclass
class _ModelOutput(ModelOutput):  # type: ignore[misc]  # untyped
    logits: torch.Tensor | None = None


@pytest.mark.parametrize("made", [_Output, _ModelOutput])
def test_dataclasses_of_tensors_are_looked_into(made: Any) -> None:
    """Promise: a NaN in a dataclass, or in one of transformers' outputs, is no success, and is replaced in a copy."""
    output = made(logits=torch.tensor([nan, 3.0]))
    with pytest.raises(guard.NonFiniteOutputError, match=r"output\.logits: 1 NaN"):
        guard.sanitize_outputs(output)
    assert not guard.safe_inference(lambda _: output, torch.ones(1)).ok
    found = guard.sanitize_outputs(output, "nan_to_num")
    assert type(found) is made
    assert found.logits.tolist() == [0.0, 3.0]
    assert output.logits.isnan().any()
    assert guard.sanitize_outputs(found) is found


def test_wrong_arguments() -> None:
    """Promise: a misspelt policy and an empty range are errors."""
    with pytest.raises(ValueError, match="refuse, clamp, nan_to_num"):
        guard.sanitize_outputs(torch.ones(1), "fix")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing is between"):
        guard.sanitize_outputs(torch.ones(1), "clamp", low=2.0, high=1.0)
    for bounds in ({"low": "0"}, {"nan": nan}, {"high": True}):
        with pytest.raises(ValueError, match="a number is needed"):
            guard.sanitize_outputs(torch.ones(1), "nan_to_num", **bounds)
    with pytest.raises(TypeError, match="floating-point numbers: Tensor has none"):
        guard.check_outputs(torch.tensor([1]))
    with pytest.raises(ValueError, match="classes is '1': the number of a dimension"):
        guard.check_outputs(torch.ones(4, 2), classes="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"contract is str: guard\.Contract"):
        guard.check_outputs(torch.ones(4, 2), contract="b 2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        (torch.tensor([[nan, 1.0]]), "1 of 2 values are not finite"),
        (torch.zeros(8, 5), "predictions prefer no class"),
        (torch.full((8, 5), 0.2), "predictions prefer no class"),
        (torch.tensor([[1.0, 2.0]]).repeat(8, 1), "the same output for every sample"),
        (torch.tensor([[0.5, 3.0]]), "max: 3, and 1 of 2 values are beyond, the first at [0, 1]; expected 2 or less"),
    ],
)
def test_each_sickness_is_told(outputs: torch.Tensor, problem: str) -> None:
    """Promise: what is wrong is said in words; a violation of a contract is listed, not raised."""
    report = guard.check_outputs(outputs, classes=1, contract=guard.Contract(max=2.0))
    assert any(found.text.startswith(problem) for found in report.problems), report


@pytest.mark.parametrize("made", [_Output, _ModelOutput, lambda logits: {"logits": logits, "ids": torch.tensor([1])}])
def test_outputs_are_looked_into(made: Any) -> None:
    """Promise: check_outputs takes what sanitize_outputs takes, names each part, and is never content with no values."""
    report = guard.check_outputs(made(logits=torch.tensor([[nan, 1.0], [2.0, 3.0]])), classes=1)
    assert [(each.kind, each.where) for each in report.problems] == [("nonfinite", "output.logits")]
    assert (report["output.logits"].nan_count, report["output.logits"].numel) == (1, 4)
    with pytest.raises(KeyError, match=r"there is output\.logits"):
        report["output.text"]
    assert not guard.check_outputs([torch.tensor([1j * nan]), torch.eye(2).to_sparse()])
    with pytest.raises(ValueError, match="on the device meta"):
        guard.check_outputs(torch.empty(2, device="meta"))


class Flaky:
    """A model that fails some times."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.errors:
            raise self.errors.pop(0)
        return x * 2


def test_safe_inference_returns_what_became_of_it() -> None:
    """Promise: success with data, or an error with its kind; what may pass is tried again, what may not is not."""
    x = torch.ones(2)
    result = guard.safe_inference(Flaky(torch.OutOfMemoryError(), ConnectionError()), x, backoff_s=0.0)
    assert (result.ok, result.attempts, result.severity, result.error) == (True, 3, guard.Severity.WARNING, None)
    assert result.data.tolist() == [2.0, 2.0]
    assert not result.data.requires_grad
    lasting = guard.safe_inference(Flaky(TypeError("wrong")), x, backoff_s=0.0)
    assert (lasting.ok, lasting.attempts, lasting.category) == (False, 1, guard.Category.DATA)
    assert "TypeError: wrong" in str(lasting)
    spent = guard.safe_inference(Flaky(*[torch.OutOfMemoryError() for _ in range(9)]), x, max_retries=2, backoff_s=0.0)
    assert (spent.ok, spent.attempts, spent.category) == (False, 3, guard.Category.MEMORY)
    not_finite = guard.safe_inference(Flaky(), torch.tensor([nan]))
    assert (not_finite.ok, not_finite.attempts, not_finite.category) == (False, 1, guard.Category.NUMERICS)
    for arguments in ({"a": x, "b": x}, (x, x)):
        assert guard.safe_inference(lambda a, b: a + b, arguments).data.tolist() == [2.0, 2.0]
    for wrong in ({"max_retries": -1}, {"max_retries": 2.5}, {"backoff_s": nan}, {"backoff_s": "1"}):
        with pytest.raises(ValueError, match="0 or more"):
            guard.safe_inference(Flaky(), x, **wrong)
    with pytest.raises(TypeError, match="cannot be called"):
        guard.safe_inference("model", x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on the device meta"):
        guard.safe_inference(torch.nn.Linear(2, 2, device="meta"), x)


def test_safe_inference_evaluates() -> None:
    """Promise: dropout is off and statistics stay, which the result says; each module's mode is as before."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    model[0].eval()
    before = [module.training for module in model.modules()]
    first, second = (guard.safe_inference(model, torch.ones(3, 4)) for _ in range(2))
    assert torch.equal(first.data, second.data)
    assert (first.evaluation_mode, guard.safe_inference(torch.abs, torch.ones(2)).evaluation_mode) == (True, False)
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]
    assert [module.training for module in model.modules()] == before
