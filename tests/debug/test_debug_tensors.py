"""``debug.inspect_tensor`` and ``inspect_parameters`` say of every kind of tensor what is in it."""

# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, comparison-overlap"
# a parameter may have no gradient, and here it has one; torch has no types for `backward`

import json
import warnings
from collections.abc import Callable
from math import isnan, nan
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.debug.models import texts
from tests.training import mlp
from torchobs import debug
from torchobs.debug import tensors
from torchobs.tensors import statistics


def nested(layout: torch.layout) -> torch.Tensor:
    """Two matrices of unequal length."""
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, nan]])]
    return torch.nested.nested_tensor(parts, layout=layout)


class Int8(torch.Tensor):
    """A quantised tensor as torchao has them: a class of its own, made of others, that knows few operators."""

    whole: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        """One of that shape."""
        tensor: Any = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        tensor.whole, tensor.scale = values, scale
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    def dequantize(self) -> torch.Tensor:
        return self.whole.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].whole, args[0].scale)
        return NotImplemented


FLOATS = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
QUANTISED = FLOATS.reshape(-1)
ODD: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "float8": (lambda: FLOATS.to(torch.float8_e4m3fn), {"dtype": "float8_e4m3fn", "mean": 0.75, "size_bytes": 4}),
    "complex": (
        lambda: torch.tensor([3 + 4j, complex(nan, 1)]),
        {"mean": 5.0, "nan_count": 1, "values": "magnitudes of elements"},
    ),
    "NaN beside Inf": (lambda: torch.tensor([complex(float("inf"), nan)]), {"nan_count": 1, "inf_count": 0}),
    "sparse": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (1000,), check_invariants=True),
        {"numel": 1000, "counted": 1, "mean": 3.0, "values": "stored elements", "layout": "sparse_coo", "size_bytes": 24},
    ),
    "CSR": (FLOATS.to_sparse_csr, {"numel": 4, "counted": 3, "mean": 1.0, "layout": "sparse_csr", "zero_count": 0}),
    "quantised": (
        lambda: torch.quantize_per_tensor(QUANTISED, 0.5, 0, torch.qint8),
        {"dtype": "qint8", "mean": 0.75, "size_bytes": 4, "values": "dequantised elements"},
    ),
    "quantised by a class": (
        lambda: Int8.of(torch.tensor([[2, -4], [0, 8]], dtype=torch.int8), torch.tensor(0.5)),
        {"dtype": "float32", "mean": 0.75, "min": -2.0, "zero_count": 1, "size_bytes": 8, "values": "dequantised elements"},
    ),
    "nested": (lambda: nested(torch.strided), {"shape": (2, "*", 2), "counted": 6, "mean": 3.0, "nan_count": 1}),
    "jagged": (lambda: nested(torch.jagged), {"shape": (2, "*", 2), "numel": 6, "mean": 3.0, "nan_count": 1}),
    "meta": (lambda: torch.empty(2, 3, device="meta"), {"shape": (2, 3), "counted": 0, "values": "no data", "size_bytes": 0}),
    "fake": (lambda: FakeTensorMode().from_tensor(FLOATS), {"shape": (2, 2), "counted": 0, "values": "no data"}),
    "uninitialised": (torch.nn.parameter.UninitializedParameter, {"shape": (), "counted": 0, "values": "no data"}),
    "empty": (lambda: torch.empty(0, 3), {"shape": (0, 3), "numel": 0, "has_nan": False, "zero_count": 0}),
    "transposed": (lambda: FLOATS.t()[::1, 1:], {"shape": (2, 1), "mean": 2.0}),
    "mkldnn": (FLOATS.to_mkldnn, {"layout": "_mkldnn", "mean": 0.75}),
    "packed": (lambda: torch.empty(4, dtype=torch.float4_e2m1fn_x2), {"counted": 0, "has_nan": False}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of its prototypes
def test_every_kind_of_tensor_is_analysed() -> None:
    """Whatever it is, the call returns what is known of it, and the result prints and becomes JSON."""
    results = {kind: debug.inspect_tensor(make(), kind) for kind, (make, _) in ODD.items()}
    said = {kind: {name: getattr(results[kind], name) for name in expected} for kind, (_, expected) in ODD.items()}
    assert said == {kind: expected for kind, (_, expected) in ODD.items()}
    for kind, stats in results.items():
        assert json.loads(json.dumps(stats.to_dict()))["name"] == kind
        assert kind in str(stats)
        assert stats._repr_html_().startswith("<div>")


def test_statistics_are_torch_s_own_of_the_finite_elements() -> None:
    """Mean, deviation, extremes, quantiles, histogram; one NaN does not hide the other elements, but it is in the norm."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.randn(10_001, generator=generator)
    stats = debug.inspect_tensor(clean, "clean")
    assert stats.mean == pytest.approx(clean.double().mean().item(), rel=1e-12)
    assert stats.std == pytest.approx(clean.double().std().item(), rel=1e-12)
    assert (stats.min, stats.max, stats.sampled) == (clean.min().item(), clean.max().item(), 10_001)
    assert stats.norm == pytest.approx(clean.double().norm().item(), rel=1e-12)
    for place, value in stats.quantiles.items():
        assert value == pytest.approx(clean.double().quantile(float(place)).item(), rel=1e-9, abs=1e-12)
    expected = clean.histc(20, clean.min().item(), clean.max().item())
    assert sum(stats.histogram) == 10_001
    assert all(abs(a - b) <= 1 for a, b in zip(stats.histogram, expected.tolist(), strict=True))  # an edge falls on either side
    spoiled = torch.cat([clean, torch.tensor([nan, float("inf"), -float("inf")])])
    other = debug.inspect_tensor(spoiled, "spoiled")
    assert (other.mean, other.std, other.min, other.max) == pytest.approx((stats.mean, stats.std, stats.min, stats.max))
    assert other.quantiles == pytest.approx(stats.quantiles)
    assert (other.nan_count, other.inf_count, other.has_nan, other.has_inf) == (1, 2, True, True)
    assert isnan(other.norm or 0)


def test_a_large_tensor_is_computed_in_parts_and_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are put together to the same figures; far from 0 the deviation loses no digits; quantiles are of a sample."""
    monkeypatch.setattr(statistics, "CHUNK", 1000)
    monkeypatch.setattr(tensors, "SAMPLE", 3000)
    x = torch.randn(10_500, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 1e6
    x[1507] = nan
    stats, finite = debug.inspect_tensor(x, "x"), x[~x.isnan()]
    assert (stats.mean, stats.std) == pytest.approx((finite.mean().item(), finite.std().item()), rel=1e-9)
    assert (stats.nan_count, stats.counted, stats.min, stats.max) == (1, 10_500, finite.min().item(), finite.max().item())
    assert stats.sampled == sum(stats.histogram) == 2863  # of at most 3000, without one NaN
    assert stats.quantiles["0.5"] == pytest.approx(1e6, abs=0.1)


class Reads(TorchDispatchMode):
    """Counts what reads a tensor's numbers: on a device each of them waits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_numbers_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All statistics are joined on the device and read by one copy, however many tensors there are; nothing else reads."""
    copies: list[int] = []
    to_list = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        copies.append(tensor.numel())
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    model = mlp()
    model(torch.ones(4, 8)).sum().backward()
    with Reads() as reads:
        debug.inspect_tensor(torch.randn(100), "x")
        debug.inspect_parameters(model)
        debug.check_gradients(model, torch.tensor(1.0))
    assert (len(copies), reads.names) == (3, [])


def test_the_tensor_and_its_graph_are_left_alone() -> None:
    """No version counter moves, no node is added, nothing is retained."""
    x = torch.randn(4, requires_grad=True)
    y = x * 2
    before = y.grad_fn, y._version, x._version
    debug.inspect_tensor(y, "y")
    assert (y.grad_fn, y._version, x._version) == before
    y.sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        assert debug.inspect_tensor(torch.ones(2), "inference").mean == 1.0


def test_parameters_of_a_model() -> None:
    """Each once, with those that are not finite in words."""
    model = mlp()
    model.register_module("again", model[0])
    model[2].bias.requires_grad_(False)  # noqa: FBT003  # torch takes no keyword
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = nan, float("inf")
    inspection = debug.inspect_parameters(model)
    assert [row.name for row in inspection.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (inspection.numel, inspection.trainable, inspection.size_bytes) == (161, 160, 644)
    assert texts(inspection) == ("0.weight: 1 NaN and 1 Inf of 128 elements",)
    assert (inspection.has_nan, inspection.has_inf, isnan(inspection.norm or 0)) == (True, True, True)
    assert debug.inspect_parameters(torch.nn.Module()).parameters == ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = debug.inspect_parameters(torch.nn.LazyLinear(3))
    assert [row.numel for row in lazy.parameters] == [0, 0]
