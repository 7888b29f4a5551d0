"""Contracts, models, outputs and resources: what the guard refuses, in which words, and that it refuses nothing else."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import UserDict, defaultdict
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
import torch
from transformers.utils import ModelOutput

from tests.unit.test_cgroup import GIB, plant, v2_group
from torchobs import guard
from torchobs.guard.resource_usage import LEAST_CPU_S, ResourceGuard

if TYPE_CHECKING:
    from collections.abc import Callable

    Damage = Callable[[torch.nn.Module], object]

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
    assert "max: 1.0000001192092896, and 3 of" in str(IMAGES.inspect(torch.full((1, 3, 1, 1), 1 + 2**-23)).problems[0])
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
    make, is_sound = KINDS[kind]
    assert guard.Contract().inspect(make()).ok is is_sound


def test_nonsense_is_refused_when_it_is_written() -> None:
    """Promise: a contract that makes no sense is an error where it is made."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"shape": "b ... c ..."}, "only one of its words"),
        ({"dtype": "float"}, "floating, integer, complex, bool"),
        ({"min": 2.0, "max": 1.0}, "nothing is between"),
        ({"max_norm": -1.0}, "a norm is 0 or more"),
        ({"device": "gpu"}, "as torch.device takes it"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            guard.Contract(**arguments)


def test_names_have_one_size_in_all_tensors_of_a_check() -> None:
    """Promise: inputs and targets of different batches are refused together with everything else."""
    inputs = {"x": torch.zeros(4, 7), "y": torch.zeros(5), "z": torch.tensor([nan])}
    contracts = {"x": guard.Contract("batch features"), "y": guard.Contract("batch")}
    with pytest.raises(guard.ContractError) as caught:
        guard.validate_inputs(inputs, contracts)
    assert [(problem.where, problem.kind) for problem in caught.value.problems] == [("y", "shape"), ("z", "finite")]
    guard.validate_inputs({"x": (inputs["x"], contracts["x"]), "y": (torch.zeros(4), contracts["y"])})
    with pytest.raises(TypeError, match="a dictionary of tensors by name"):
        guard.validate_inputs([inputs["x"]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x has str for a contract: guard\.Contract"):
        guard.validate_inputs({"x": inputs["x"]}, {"x": "batch"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no input w; there is x"):
        guard.validate_inputs({"x": inputs["x"]}, {"w": guard.Contract()})


def test_values_are_looked_at_within_transformations_that_have_them() -> None:
    """Promise: an infinity is as wrong within a derivative; a compiled function stays whole, and nothing is checked in it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        guard.Contract().check(x / 0.0)
        return x.sum()

    for derive in (torch.func.grad(function), lambda x: torch.func.jvp(function, (x,), (x,))):
        with pytest.raises(guard.ContractError, match="3 Inf among 3 values"):
            derive(torch.ones(3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        IMAGES.check(x)
        return x * 2

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_unsigned_integers_have_a_range_and_complex_numbers_none() -> None:
    """Promise: tokens and pixels of 16 bits and more are compared with the limits; of the others it says what to use."""
    with pytest.raises(ValueError, match="max_norm"):
        guard.Contract(min=0.0).check(torch.tensor([1j]))
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        x = torch.tensor([1, 40_000], dtype=dtype)
        guard.Contract(min=0, max=40_000, max_norm=40_001).check(x)
        with pytest.raises(guard.ContractError, match="max: 40000, and 1 of 2 values"):
            guard.Contract(max=255).check(x)


def layer_with(**tensors: torch.Tensor) -> torch.nn.Module:
    """A layer with these parameters and buffers: a weight, a scale of one value as ConvNeXt's and Swin's begin, masks."""
    layer = torch.nn.Linear(32, 64)
    for name, tensor in tensors.items():
        if name in {"weight", "scale"}:
            setattr(layer, name, torch.nn.Parameter(tensor))
        else:
            layer.register_buffer(name, tensor)
    return layer


def masks() -> torch.nn.Module:
    """Masks of all kinds: -inf, a type's lowest number, one of distances."""
    causal = torch.triu(torch.full((1, 1, 20, 20), -inf), 1)
    lowest = torch.finfo(torch.float32).min
    return layer_with(
        causal=causal, lowest=causal.clamp(lowest), one=torch.tensor(lowest), short=torch.tensor(-65504.0).half(),
        distances=causal + torch.arange(20.0),
    )  # fmt: skip


def statistics() -> torch.nn.Module:
    """Statistics of data in large units, the least and largest value of nothing yet, a window, a bank of filters."""
    return layer_with(
        mean=torch.tensor([50_000.0, 3.0]), running_var=torch.tensor([1.6e9, 1.0]), least=torch.tensor(inf),
        largest=torch.tensor([-inf, -inf]), window=torch.full((4, 4), 0.5),
        bank=torch.logspace(0, 3, 20)[:, None].repeat(1, 4),
    )  # fmt: skip


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 2)),
    "cnn": lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.Conv2d(32, 8, 3)),
    "embedding": lambda: torch.nn.Embedding(500, 256, padding_idx=0),
    "adapter": lambda: layer_with(weight=torch.zeros(64, 32)),
    "rnn": lambda: torch.nn.LSTM(32, 64, 2),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(64, 4, 128),
    "norm over an image": lambda: torch.nn.LayerNorm([4, 8, 8]),
    "scale of channels": lambda: layer_with(scale=torch.full((96, 1, 1), 1e-6)),
    "scale of heads": lambda: layer_with(scale=torch.full((3, 1, 1), 2.3)),
    "masks": masks,
    "statistics": statistics,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:torch.ao.quantization")
def test_tensors_of_every_kind_are_looked_at() -> None:
    """Promise: also float64 beyond float32, lazy ones, a NaN in a mask, and anything not finite in a norm's statistics."""
    model = layer_with(mask=torch.tensor([0.0, -inf, nan]), running_mean=torch.tensor([1.0, -inf]))
    everything = {"module." + name: tensor for name, tensor in model.state_dict().items()}
    for weights in (model, everything):
        assert [layer.where for layer in guard.check_model(weights).problems] == ["mask", "running_mean"]
    tensors: dict[str, Any] = {kind: make() for kind, (make, _) in KINDS.items() if kind not in {"meta", "nested"}}
    bad = {kind for kind, (_, is_sound) in KINDS.items() if not is_sound}
    assert {layer.where for layer in guard.check_model(tensors).problems} == bad
    (layer,) = guard.check_model({"wide": torch.tensor([1e39, 0.0], dtype=torch.float64)}).problems
    assert layer.text == "a magnitude of 1e+39"
    with pytest.raises(ValueError, match=r"weight has no values before the first forward pass"):
        guard.check_model(torch.nn.LazyLinear(3))


def test_a_model_without_values_is_not_sound() -> None:
    """Promise: on the device meta nothing can be looked at, which is an error, or beside a reference a remark."""
    real, meta = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")
    for model in (meta, torch.nn.Sequential(real, meta)):
        with pytest.raises(ValueError, match="weight is on the device meta, where it has no values"):
            guard.check_model(model)
    report = guard.check_model(meta, real)
    assert report.ok
    assert [(remark.kind, remark.where) for remark in report.remarks] == [("meta", "weight"), ("meta", "bias")]


@pytest.mark.parametrize("name", MODELS)
def test_fresh_models_are_sound(name: str) -> None:
    """Promise: no initialisation of torch's layers is a finding: norms of ones, zero biases, padding."""
    for seed in range(5):
        torch.manual_seed(seed)
        assert guard.check_model(MODELS[name]()).ok


def test_a_trained_model_is_sound() -> None:
    """Promise: what training does to weights is no finding."""
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert guard.check_model(model).ok


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda weight: weight[3, 1].fill_(float("nan")), "1 of 2,048 values are not finite"),
        (lambda weight: weight[0, 0].fill_(-1e5), "a magnitude of 100000"),
        (lambda weight: weight.fill_(0.5), "every value is 0.5"),
        (lambda weight: weight[7].mul_(50), "the norm of neuron 7 is "),
    ],
)
def test_damage_is_named(damage: Damage, problem: str) -> None:
    """Promise: layer and problem are in the report."""
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    with torch.no_grad():
        damage(model.get_parameter("0.weight"))  # type: ignore[arg-type]
    (layer,) = guard.check_model(model).problems
    assert (layer.where, layer.text[: len(problem)]) == ("0.weight", problem)


def test_differences_from_a_reference() -> None:
    """Promise: layers that were added, lost or reshaped are named; of a weight that layers share a file has one copy."""
    reference = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}
    report = guard.check_model({"a": torch.ones(2), "b": torch.ones(5), "d": torch.ones(1)}, reference)
    assert [(problem.kind, problem.where) for problem in report.problems] == [("shape", "b"), ("missing", "c"), ("added", "d")]
    assert report.problems[0].text == "its shape is (5,), and the reference has (3,)"
    assert guard.check_model(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).ok
    for device in ("cpu", "meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)).to(device)
        saved = {"0.weight": torch.randn(9, 4)}
        assert [str(problem) for problem in guard.check_model(saved, model).problems] == ["1.weight: only the reference has it"]
        model[1].weight = model[0].weight
        for tied in (model, model.state_dict()):
            assert guard.check_model(saved, reference=tied).ok
            assert guard.check_model(tied, reference=saved).ok


def test_a_checkpoint_is_looked_into() -> None:
    """Promise: weights within a training's checkpoint are judged, its optimizer's state is not; of nothing is an error."""
    model = MODELS["mlp"]()
    optimizer = {"state": {0: {"step": torch.tensor(1e6)}}, "param_groups": []}
    state: Any = {"epoch": 3, "model": {"net": model.state_dict()}, "optimizer": optimizer}
    assert guard.check_model(state).ok
    state["model"]["net"]["0.weight"].fill_(float("nan"))
    (layer,) = guard.check_model(state).problems
    assert layer.where == "model.net.0.weight"
    for nothing in ({}, {"epoch": 3}):
        with pytest.raises(ValueError, match=r"there is no tensor in it: it has (epoch|nothing)"):
            guard.check_model(nothing)  # type: ignore[arg-type]
    assert guard.check_model(torch.nn.ReLU()).ok


def test_zeros_are_remarked_as_what_is_common() -> None:
    """Promise: a zero convolution or LoRA's B is no problem, and is said; a bias of zeros is not worth a word."""
    (remark,) = guard.check_model(MODELS["adapter"]()).remarks
    assert (remark.where, remark.text[:27]) == ("weight", "every value is 0: common be")
    assert not guard.check_model(torch.nn.LayerNorm(8)).remarks
    assert [layer.where for layer in guard.check_model(torch.nn.LayerNorm([4, 8])).remarks] == ["weight", "bias"]


class Pair(NamedTuple):
    """Outputs as some models return them."""

    logits: torch.Tensor
    hidden: torch.Tensor | None


def test_refuse_is_the_default_and_finite_outputs_are_the_same_objects() -> None:
    """Promise: a NaN is never hidden unless somebody asks for it; the message names the part. Nothing else is copied."""
    with pytest.raises(guard.NonFiniteOutputError, match=r"answer\.a\[1\]: 1 NaN and 1 Inf among 3 values"):
        guard.sanitize_outputs({"a": [torch.ones(1), torch.tensor([nan, inf, 0.0])]}, name="answer")
    outputs = {"logits": torch.randn(3), "ids": torch.tensor([1]), "more": (Pair(torch.zeros(2), None), "text")}
    policies: Any = ("refuse", "clamp", "nan_to_num")
    assert all(guard.sanitize_outputs(outputs, policy) is outputs for policy in policies)


def test_clamp_and_nan_to_num() -> None:
    """Promise: values become what was said; structures keep their class; clamp does not hide a NaN; float8 is looked at."""
    clamped = guard.sanitize_outputs(Pair(torch.tensor([inf, -inf, 5.0, 0.5]), None), "clamp", low=-1.0, high=1.0)
    assert clamped == Pair(logits=clamped.logits, hidden=None)
    assert clamped.logits.tolist() == [1.0, -1.0, 1.0, 0.5]
    with pytest.raises(guard.NonFiniteOutputError, match="use nan_to_num"):
        guard.sanitize_outputs(torch.tensor([nan]), "clamp")
    assert guard.sanitize_outputs(torch.tensor([nan, inf]), "nan_to_num", nan=0.25, high=9.0).tolist() == [0.25, 9.0]
    assert guard.sanitize_outputs(torch.tensor([inf], dtype=torch.float16), "nan_to_num").item() == 65504.0
    outputs: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(1), logits=torch.tensor([nan, 3.0]))
    replaced = guard.sanitize_outputs(outputs, "nan_to_num", low=0.0, high=1.0, nan=-1.0)
    assert type(replaced) is defaultdict
    assert replaced["logits"].tolist() == [-1.0, 1.0]
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


@pytest.mark.parametrize("output_class", [_Output, _ModelOutput])
def test_dataclasses_of_tensors_are_looked_into(output_class: Any) -> None:
    """Promise: a NaN in a dataclass, or in transformers' outputs, is found by each function and replaced in a copy."""
    output = output_class(logits=torch.tensor([nan, 3.0]))
    with pytest.raises(guard.NonFiniteOutputError, match=r"output\.logits: 1 NaN"):
        guard.sanitize_outputs(output)
    assert not guard.safe_inference(lambda _: output, torch.ones(1)).ok
    report = guard.check_outputs(output)
    assert [(problem.kind, problem.where) for problem in report.problems] == [("nonfinite", "output.logits")]
    assert (report["output.logits"].nan_count, report["output.logits"].numel) == (1, 2)
    with pytest.raises(KeyError, match=r"there is output\.logits"):
        report["output.text"]
    assert not guard.check_outputs([torch.tensor([1j * nan]), torch.eye(2).to_sparse(), torch.tensor([1])])
    with pytest.raises(ValueError, match="on the device meta"):
        guard.check_outputs(torch.empty(2, device="meta"))
    sanitized = guard.sanitize_outputs(output, "nan_to_num")
    assert type(sanitized) is output_class
    assert sanitized.logits.tolist() == [0.0, 3.0]
    assert output.logits.isnan().any()
    assert guard.sanitize_outputs(sanitized) is sanitized


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


def test_each_sickness_is_told() -> None:
    """Promise: what is wrong is said in words; a violation of a contract is listed, not raised."""
    cases: list[tuple[torch.Tensor, str]] = [
        (torch.tensor([[nan, 1.0]]), "1 of 2 values are not finite"),
        (torch.zeros(8, 5), "predictions prefer no class"),
        (torch.full((8, 5), 0.2), "predictions prefer no class"),
        (torch.tensor([[1.0, 2.0]]).repeat(8, 1), "the same output for every sample"),
        (torch.tensor([[0.5, 3.0]]), "max: 3, and 1 of 2 values are beyond, the first at [0, 1]; expected 2 or less"),
    ]
    for outputs, problem in cases:
        report = guard.check_outputs(outputs, classes=1, contract=guard.Contract(max=2.0))
        assert any(sickness.text.startswith(problem) for sickness in report.problems), report


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
    assert "TypeError: wrong" in str(guard.safe_inference(Flaky(TypeError("wrong")), x))
    for model, batch, attempts, category in (
        (Flaky(TypeError("wrong")), x, 1, guard.Category.DATA),
        (Flaky(*[torch.OutOfMemoryError() for _ in range(9)]), x, 3, guard.Category.MEMORY),
        (Flaky(), torch.tensor([nan]), 1, guard.Category.NUMERICS),
    ):
        failed = guard.safe_inference(model, batch, max_retries=2, backoff_s=0.0)
        assert (failed.ok, failed.attempts, failed.category) == (False, attempts, category)
    for arguments in ({"a": x, "b": x}, (x, x)):
        assert guard.safe_inference(lambda a, b: a + b, arguments).data.tolist() == [2.0, 2.0]
    for wrong in ({"max_retries": -1}, {"max_retries": 2.5}, {"backoff_s": nan}, {"backoff_s": "1"}):
        with pytest.raises(ValueError, match="0 or more"):
            guard.safe_inference(Flaky(), x, **wrong)
    with pytest.raises(TypeError, match="cannot be called"):
        guard.safe_inference("model", x)  # type: ignore[arg-type]


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


PROC = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}


def container(root: Path, *, used_s: float, memory_limit: int = 2 * GIB) -> str:
    """A container with half a core, which has used that much of it, and 1.25 GiB that cannot be reclaimed."""
    files = v2_group("", limit=str(memory_limit), cpu="50000 100000")
    stat = files["sys/fs/cgroup/cpu.stat"].replace("5000000", str(int(used_s * 1e6)))
    return plant(root, {**files, **PROC, "sys/fs/cgroup/cpu.stat": stat})


def test_percent_is_of_the_container_s_limits(tmp_path: Path) -> None:
    """Promise: half a core and 2 GiB are what counts, not the machine; a threshold may be in bytes."""
    root = container(tmp_path, used_s=1.0)
    watched = ResourceGuard({"cpu": 90.0, "memory": GIB}, None, ".", 10.0, root)
    container(tmp_path, used_s=1e9)
    time.sleep(LEAST_CPU_S)
    report = watched.check()
    cpu = report["cpu"]
    assert (cpu.where, cpu.limit_cores, cpu.percent, cpu.ok) == ("container", 0.5, 100.0, False)
    memory = report["memory"]
    assert (memory.where, memory.percent, memory.threshold, memory.ok) == ("container", 62.5, 50.0, False)
    assert "container: memory is at 62 %, above 50 %" in map(str, report.problems)
    assert ResourceGuard({"memory": 1.5 * GIB}, None, ".", 10.0, root).check().ok


def test_without_a_container_it_is_the_machine() -> None:
    """Promise: on a laptop the figures are psutil's; a process that is held to one core has one."""
    report = guard.resources(cpu=None).check()
    assert {usage.resource for usage in report.usages} == {"memory", "disk"}
    disk = psutil.disk_usage(".")
    assert report["disk"].percent == pytest.approx(100 * disk.used / (disk.used + disk.free), abs=1)
    assert (report["memory"].limit_bytes or 0) <= psutil.virtual_memory().total
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        cpu = guard.resources().check()["cpu"]
    finally:
        os.sched_setaffinity(0, allowed)
    assert (cpu.limit_cores or 0.0) <= 1.0


def test_one_call_for_each_time_that_it_is_too_much(tmp_path: Path) -> None:
    """Promise: while it stays above nothing is repeated; after it was below it counts again."""
    calls: list[guard.ResourceReport] = []
    watched = ResourceGuard({"memory": 60.0}, calls.append, ".", 10.0, container(tmp_path, used_s=1.0))
    assert not watched.check()
    assert not watched.check()
    assert len(calls) == 1
    container(tmp_path, used_s=1.0, memory_limit=4 * GIB)
    assert watched.check()
    container(tmp_path, used_s=1.0)
    assert not watched.check()
    assert len(calls) == 2


def test_it_watches_in_a_thread_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Promise: the callback comes while the training goes on; one that raises ends the watch alone, which is logged."""
    called = threading.Event()
    with guard.resources(disk=0, on_exceed=lambda _: called.set(), interval_s=0.01) as watched:
        assert called.wait(30)
        assert watched._thread is not None
        assert watched._thread.is_alive()
    assert not watched._thread.is_alive()

    def fail(_: object) -> None:
        raise KeyError("mine")

    with guard.resources(disk=0, on_exceed=fail, interval_s=0.01) as watched:
        assert watched._thread is not None
        watched._thread.join(30)
    assert "resources are watched no more: KeyError" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cpu": 900}, "from 0 to 100, or None"),
        ({"memory": 900}, r"or bytes, from 1 MiB \(2\*\*20\) on"),
        ({"cpu": 0.9}, "less than one percent: as a share it is 90 percent"),
        ({"interval_s": 0}, "a time in seconds"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Promise: a threshold that is no percentage is an error where it is written."""
    with pytest.raises(ValueError, match=message):
        guard.resources(**arguments)
    with pytest.raises(FileNotFoundError):
        guard.resources(path=os.path.join("not", "there"))  # noqa: PTH118  # as users give it
