"""Contracts of tensors: what they refuse, in which words, and that they refuse nothing else."""

from __future__ import annotations

import pickle
from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchobs import guard

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGES = guard.Contract(shape="batch 3 height width", dtype="floating", min=0.0, max=1.0)


def test_the_message_says_what_was_found_and_where() -> None:
    """Promise: number, place and expectation are in the error, for all that is wrong."""
    x = torch.rand(4, 3, 2, 2)
    x[2, 1, 0, 1], x[3, 0, 0, 0], x[1, 0, 1, 1] = nan, inf, -7.0
    with pytest.raises(guard.ContractError) as caught:
        IMAGES.check(x, "images")
    assert str(caught.value).splitlines() == [
        "images: finite: 1 NaN and 1 Inf among 48 values, the first at [2, 1, 0, 1]; expected finite values",
        "images: min: -7, and 1 of 48 values are beyond, the first at [1, 0, 1, 1]; expected 0 or more",
        "images: max: inf, and 1 of 48 values are beyond, the first at [3, 0, 0, 0]; expected 1 or less",
    ]
    assert caught.value.problems[0].index == (2, 1, 0, 1)
    assert IMAGES.inspect(x, "images").problems == caught.value.problems
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems  # noqa: S301  # our own


@pytest.mark.parametrize(
    ("contract", "x", "what"),
    [
        (guard.Contract(shape="b 3"), torch.zeros(2, 4), ["shape"]),
        (guard.Contract(shape=(None, 4)), torch.zeros(2, 4), []),
        (guard.Contract(shape="n n"), torch.zeros(2, 3), ["shape"]),
        (guard.Contract(shape="b ... c", dtype=torch.float32), torch.zeros(2, 9, 9, 4), []),
        (guard.Contract(dtype="integer"), torch.zeros(2), ["dtype"]),
        (guard.Contract(dtype=(torch.float16, "integer")), torch.zeros(2, dtype=torch.int8), []),
        (guard.Contract(device="cuda"), torch.zeros(2), ["device"]),
        (guard.Contract(), [1.0], ["type"]),
        (guard.Contract(), torch.tensor([nan]), ["finite"]),
        (guard.Contract(finite=False, max=1.0), torch.tensor([nan, 0.5]), []),
        (guard.Contract(max_norm=5.0), torch.tensor([3.0, 4.0]), []),
        (guard.Contract(max_norm=5.0), torch.tensor([3.0, 4.1]), ["norm"]),
        (guard.Contract(max_norm=2e5), torch.full((10_000,), 1000.0, dtype=torch.float16), []),
        (guard.Contract(min=0.1, max=0.1), torch.full((2,), 0.1), []),
        (guard.Contract(max=0.1), torch.full((2,), 0.1, dtype=torch.bfloat16), []),
        (guard.Contract(min=0, max=2), torch.tensor([0, 3]), ["max"]),
    ],
)
def test_each_condition(contract: guard.Contract, x: Any, what: list[str]) -> None:
    """Promise: each condition refuses what breaks it, and only that."""
    assert [problem.kind for problem in contract.inspect(x).problems] == what


KINDS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "token ids": (lambda: torch.tensor([5, 120_000]), True),
    "logits": (lambda: torch.tensor([-3.0, 11.5]), True),
    "images": (lambda: torch.zeros(1, 3, 8, 8), True),
    "bool": (lambda: torch.tensor([True]), True),
    "empty": (lambda: torch.empty(0, 4), True),
    "float8": (lambda: torch.zeros(2, dtype=torch.float8_e4m3fn), True),
    "complex": (lambda: torch.tensor([1 + 2j]), True),
    "coo": (lambda: torch.tensor([1.0, 0.0, 2.0]).to_sparse(), True),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), True),
    "quantized": (lambda: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8), True),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), True),
    "meta": (lambda: torch.empty(3, device="meta"), True),
    "bad double": (lambda: torch.tensor([1.0, nan], dtype=torch.float64), False),
    "bad bfloat16": (lambda: torch.tensor([inf], dtype=torch.bfloat16), False),
    "bad float8": (lambda: torch.tensor([nan]).to(torch.float8_e5m2), False),
    "bad complex": (lambda: torch.tensor([complex(0, nan)]), False),
    "bad coo": (lambda: torch.tensor([0.0, inf]).to_sparse(), False),
    "bad csr": (lambda: torch.tensor([[nan]]).to_sparse_csr(), False),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_alone_is_wrong_by_default(kind: str) -> None:
    """Promise: ids are integers, logits exceed 1, tensors are of every kind; a NaN is found in each that can hold one."""
    made, is_sound = KINDS[kind]
    assert guard.Contract().inspect(made()).ok is is_sound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "b ... c ..."}, "only one of its words"),
        ({"dtype": "float"}, "floating, integer, complex, bool"),
        ({"min": 2.0, "max": 1.0}, "nothing is between"),
        ({"max_norm": -1.0}, "a norm is 0 or more"),
        ({"min": nan}, "min is nan: a number"),
        ({"dtype": [torch.float32]}, "or a tuple of these"),
        ({"device": "gpu"}, "as torch.device takes it"),
        ({"shape": (-1, 3)}, "'-1' is no size"),
    ],
)
def test_nonsense_is_refused_when_it_is_written(arguments: dict[str, Any], message: str) -> None:
    """Promise: a contract that makes no sense is an error where it is made."""
    with pytest.raises(ValueError, match=message):
        guard.Contract(**arguments)


def test_names_have_one_size_in_all_tensors_of_a_check() -> None:
    """Promise: inputs and targets of different batches are refused together with everything else."""
    inputs = {"x": torch.zeros(4, 7), "y": torch.zeros(5), "z": torch.tensor([nan])}
    contracts = {"x": guard.Contract("batch features"), "y": guard.Contract("batch")}
    with pytest.raises(guard.ContractError) as caught:
        guard.validate_inputs(inputs, contracts)
    assert [(found.where, found.kind) for found in caught.value.problems] == [("y", "shape"), ("z", "finite")]
    guard.validate_inputs({"x": (inputs["x"], contracts["x"]), "y": (torch.zeros(4), contracts["y"])})
    with pytest.raises(TypeError, match="a dictionary of tensors by name"):
        guard.validate_inputs([inputs["x"]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x has str for a contract: guard\.Contract"):
        guard.validate_inputs({"x": inputs["x"]}, {"x": "batch"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no input w; there is x"):
        guard.validate_inputs({"x": inputs["x"]}, {"w": guard.Contract()})


def test_values_are_looked_at_within_transformations_that_have_them() -> None:
    """A gradient or a directional derivative of a function: an infinity is as wrong there."""

    def function(x: torch.Tensor) -> torch.Tensor:
        guard.Contract().check(x / 0.0)
        return x.sum()

    for derive in (torch.func.grad(function), lambda x: torch.func.jvp(function, (x,), (x,))):
        with pytest.raises(guard.ContractError, match="3 Inf among 3 values"):
            derive(torch.ones(3))


def test_no_graph_break() -> None:
    """Promise: a checked function compiles as a whole; nothing is checked in the graph."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        IMAGES.check(x)
        return x * 2

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_complex_numbers_are_in_no_order() -> None:
    """Promise: a range of complex numbers is refused with what to use instead."""
    with pytest.raises(ValueError, match="max_norm"):
        guard.Contract(min=0.0).check(torch.tensor([1j]))


def test_unsigned_integers_have_a_range() -> None:
    """Promise: tokens and pixels of 16 bits and more are compared with the limits."""
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        x = torch.tensor([1, 40_000], dtype=dtype)
        guard.Contract(min=0, max=40_000, max_norm=40_001).check(x)
        with pytest.raises(guard.ContractError, match="max: 40000, and 1 of 2 values"):
            guard.Contract(max=255).check(x)
