"""The guard beside a training that is recorded: findings are in the flight file; functions are checked by annotation."""

# ruff: noqa: F722  # jaxtyping's shapes are no Python

import argparse
from math import nan
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tests.training import Recording
from torchobs import catalog, guard

Images = Annotated[Tensor, guard.Contract("batch 3 size size", min=0.0, max=1.0)]


@guard.checked
def classify(
    images: Images, weights: Float[Tensor, "features classes"], ids: Int[Tensor, " batch"] | None = None
) -> Float[Tensor, "batch classes"]:
    """A function with annotations of both kinds."""
    del ids
    return images.flatten(1) @ weights


@guard.checked
def mixed(x: Float[Tensor, "batch features"], y: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """A function of which the result may be wrong."""
    return x.sum(0) if y.numel() == 2 else x.sum(1)


def test_violations_are_events_and_metrics(run: Recording) -> None:
    """Promise: what was refused can be seen outside."""
    with pytest.raises(guard.ContractError):
        guard.Contract("b 2", max=1.0).check(torch.tensor([[nan, 2.0]]), "batch")
    with pytest.raises(guard.NonFiniteOutputError):
        guard.sanitize_outputs(torch.tensor([nan]))
    guard.sanitize_outputs(torch.tensor([nan, 1.0]), "nan_to_num")
    run.whole_round()
    values = run.values()
    assert values["torchobs.guard.violations", "contract", "error", "finite"] == 1
    assert values["torchobs.guard.violations", "contract", "error", "max"] == 1
    assert values["torchobs.guard.sanitized", "numerics", "refuse", "error"] == 1
    assert values["torchobs.guard.sanitized", "numerics", "nan_to_num", "warning"] == 1
    (violation,) = run.frames("torchobs.guard.violation")
    about = violation["attrs"]
    assert (about["tensor"], about["category"], about["severity"]) == ("batch", "contract", "error")
    assert [frame["attrs"]["policy"] for frame in run.frames("torchobs.guard.outputs")] == ["refuse", "nan_to_num"]


def test_every_finding_has_a_category_and_a_severity(run: Recording, tmp_path: Path) -> None:
    """Promise: files, models, outputs, inference and resources are events and metrics too, each with how bad it is."""
    path = tmp_path / "whole.pt"
    torch.save(argparse.Namespace(), path)
    with pytest.raises(guard.UnsafeFileError):
        guard.load(path)
    with pytest.raises(guard.WrongFileError):
        guard.verify(path, sha256="0" * 64)
    guard.check_model({"w": torch.full((2,), nan)})
    guard.check_outputs(torch.zeros(4, 2), classes=1)
    guard.safe_inference(lambda x: x, torch.tensor([nan]))
    guard.resources(cpu=None, memory=0, disk=None, gpu_memory=None).check()
    run.whole_round()
    found = [event for event in vars(catalog).values() if isinstance(event, catalog.Event) and ".guard." in event.name]
    frames = [(event.name, frame["attrs"]) for event in found for frame in run.frames(event.name)]
    assert {(name, about["category"], about["severity"]) for name, about in frames} == {
        ("torchobs.guard.file", "file", "error"), ("torchobs.guard.model", "numerics", "warning"),
        ("torchobs.guard.outputs", "numerics", "warning"), ("torchobs.guard.outputs", "numerics", "error"),
        ("torchobs.guard.recovery", "numerics", "error"), ("torchobs.guard.resource", "resources", "warning"),
    }  # fmt: skip
    values = run.values()
    for by, category, severity in (
        ("load", "file", "error"),
        ("verify", "file", "error"),
        ("check_model", "numerics", "warning"),
    ):
        assert values["torchobs.guard.findings", by, category, severity] == 1
    assert values["torchobs.guard.exceeded", "resources", "memory", "warning"] == 1
    assert values["torchobs.guard.recoveries", "return", "numerics", "error"] == 1


def test_every_metric_and_event_says_how_bad_it_is() -> None:
    """Promise: none of the guard's is without severity and category, of values that the enumerations have."""
    described = [each for each in vars(catalog).values() if isinstance(each, (catalog.Event, catalog.Metric))]
    ours = [each for each in described if each.name.startswith("torchobs.guard.")]
    assert len(ours) >= 11
    for each in ours:
        attributes = {attribute.name: set(attribute.values) for attribute in each.attributes}
        assert attributes["severity"] <= {severity.value for severity in guard.Severity}, each.name
        assert attributes["category"] <= {category.value for category in guard.Category}, each.name


def test_annotations_of_both_kinds() -> None:
    """Promise: arguments are checked, with one size for a name in one call."""
    assert classify(torch.rand(2, 3, 4, 4), torch.rand(48, 5)).shape == (2, 5)
    with pytest.raises(guard.ContractError, match="images: max"):
        classify(torch.full((2, 3, 4, 4), 2.0), torch.rand(48, 5))
    with pytest.raises(guard.ContractError, match="weights: dtype"):
        classify(torch.rand(2, 3, 4, 4), torch.ones(48, 5, dtype=torch.int64))
    with pytest.raises(guard.ContractError, match="weights: type"):
        classify(torch.rand(2, 3, 4, 4), [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing a required argument"):
        classify(torch.rand(2, 3, 4, 4))  # type: ignore[call-arg]


def test_jaxtyping_s_names_hold_through_arguments_and_result() -> None:
    """Promise: a batch is one batch, in the arguments and in the result."""
    assert mixed(torch.rand(3, 5), torch.rand(3)).shape == (3,)
    with pytest.raises(guard.ContractError, match="y: shape"):
        mixed(torch.rand(3, 5), torch.rand(4))
    with pytest.raises(guard.ContractError, match="return: shape"):
        mixed(torch.rand(2, 5), torch.rand(2))


@guard.checked
def several(*parts: Annotated[Tensor, guard.Contract("n")], last: Float[Tensor, " n"] | None = None) -> None:
    """A function with any number of tensors, and one that may be missing."""
    del parts, last


def test_optional_and_repeated_arguments() -> None:
    """Promise: each of several is checked, and what may be None is checked where it is not."""
    several()
    several(torch.rand(2), torch.rand(2))
    with pytest.raises(guard.ContractError, match="parts: shape"):
        several(torch.rand(2), torch.rand(3))
    with pytest.raises(guard.ContractError, match="last: shape"):
        several(last=torch.rand(2, 2))


@guard.checked
def united(
    a: Optional[Float[Tensor, " b"]] = None,  # noqa: UP045  # as people write it
    b: Union[Float[Tensor, "b c"], Int[Tensor, " b"], float] = 0.0,  # noqa: UP007
    c: Annotated[Tensor | None, guard.Contract("n 3", max=1.0)] = None,
    d: Annotated[Float[Tensor, "b d"], guard.Contract(max=1.0)] = None,  # type: ignore[assignment]
) -> Float[Tensor, " b"] | None:
    """A function with unions of all kinds, and annotations that are both at once."""
    del b, c, d
    return a


def test_one_alternative_of_a_union_has_to_match() -> None:
    """Promise: Optional, Union and ``|`` are checked, and what is allowed in none of their parts is refused."""
    allowed: list[dict[str, Any]] = [
        {}, {"a": torch.rand(2), "b": torch.rand(2, 5), "d": torch.rand(2, 7)}, {"b": 3.0}, {"b": torch.tensor([1])},
        {"a": torch.rand(4), "c": torch.rand(2, 3)},
    ]  # fmt: skip
    for arguments in allowed:
        united(**arguments)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"a": torch.rand(2, 2)}, "a: shape"), ({"b": "text"}, "b: type: str"), ({"b": None}, "b: type: NoneType"),
        ({"a": torch.rand(3), "b": torch.rand(4, 2)}, "b: shape"), ({"c": torch.rand(2, 4)}, "c: shape"),
        ({"d": torch.ones(2, 3).long()}, "d: dtype"), ({"d": torch.full((2, 3), 2.0)}, "d: max"), ({"a": 1}, "a: type: int"),
    ]  # fmt: skip
    for arguments, message in refused:
        with pytest.raises(guard.ContractError, match=message):
            united(**arguments)


def test_nothing_to_check_is_an_error() -> None:
    """Promise: a decorator that would do nothing says so, and so does one that could not wait."""
    with pytest.raises(TypeError, match="no annotation to check"):
        guard.checked(lambda x: x)

    async def later(x: Images) -> None:
        del x

    with pytest.raises(TypeError, match="coroutine function"):
        guard.checked(later)
    with pytest.raises(TypeError, match="a function, not int"):
        guard.checked(3)  # type: ignore[arg-type]

    def unresolved(x: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
        del x

    with pytest.raises(TypeError, match="'Missing' is not defined: import it at run time"):
        guard.checked(unresolved)


def test_checked_functions_compile() -> None:
    """Promise: no graph break."""
    compiled = torch.compile(mixed, fullgraph=True, backend="eager")
    assert compiled(torch.ones(3, 5), torch.ones(3)).tolist() == [5.0, 5.0, 5.0]
