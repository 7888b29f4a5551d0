"""A model's weights: sound ones have no problem, and each kind of damage is named."""

from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchobs import guard

if TYPE_CHECKING:
    from collections.abc import Callable

    Damage = Callable[[torch.nn.Module], object]


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


def test_buffers_that_are_ill_are_named() -> None:
    """Promise: a NaN in a mask is a finding, and anything that is not finite in a norm's statistics."""
    model = layer_with(mask=torch.tensor([0.0, -inf, nan]), running_mean=torch.tensor([1.0, -inf]))
    everything = {"module." + name: tensor for name, tensor in model.state_dict().items()}
    for given in (model, everything):
        assert [layer.where for layer in guard.check_model(given).problems] == ["mask", "running_mean"]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:torch.ao.quantization")
def test_tensors_of_every_kind_are_looked_at() -> None:
    """Promise: complex, sparse, quantized, float8, float64 beyond float32, empty, scalar and meta tensors."""
    bad = torch.tensor([[1.0, float("nan")]])
    kinds = {
        "complex": bad.to(torch.complex64), "coo": bad.to_sparse(), "csr": bad.to_sparse_csr(),
        "float8": bad.to(torch.float8_e5m2),
    }  # fmt: skip
    assert {layer.where for layer in guard.check_model(kinds).problems} == kinds.keys()
    sound = {
        "empty": torch.empty(0, 3), "scalar": torch.tensor(2.0),
        "bool": torch.tensor([[True, True]]), "quantized": torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8),
        "text": "not a tensor",
    }  # fmt: skip
    assert guard.check_model(sound).ok  # type: ignore[arg-type]
    (layer,) = guard.check_model({"wide": torch.tensor([1e39, 0.0], dtype=torch.float64)}).problems
    assert layer.text == "a magnitude of 1e+39"
    with pytest.raises(ValueError, match=r"weight has no values before the first forward pass"):
        guard.check_model(torch.nn.LazyLinear(3))


def test_a_model_without_values_is_not_sound() -> None:
    """Promise: on the device meta nothing can be looked at, which is an error, or beside a reference a remark."""
    real, meta = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")
    for given in (meta, torch.nn.Sequential(real, meta)):
        with pytest.raises(ValueError, match="weight is on the device meta, where it has no values"):
            guard.check_model(given)
    report = guard.check_model(meta, real)
    assert report.ok
    assert [(each.kind, each.where) for each in report.remarks] == [("meta", "weight"), ("meta", "bias")]


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
    """Promise: layers that were added, lost or reshaped are named."""
    reference = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}
    report = guard.check_model({"a": torch.ones(2), "b": torch.ones(5), "d": torch.ones(1)}, reference)
    assert [(each.kind, each.where) for each in report.problems] == [("shape", "b"), ("missing", "c"), ("added", "d")]
    assert report.problems[0].text == "its shape is (5,), and the reference has (3,)"
    assert guard.check_model(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).ok
    with pytest.raises(TypeError, match="state_dict"):
        guard.check_model([1])  # type: ignore[arg-type]


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


def test_a_tied_weight_is_not_missed() -> None:
    """Promise: files hold a weight that two layers share once, and load whole; one that is another's copy is missed."""
    for device in ("cpu", "meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)).to(device)
        saved = {"0.weight": torch.randn(9, 4)}
        assert [str(each) for each in guard.check_model(saved, model).problems] == ["1.weight: only the reference has it"]
        model[1].weight = model[0].weight
        for reference in (model, model.state_dict()):
            assert guard.check_model(saved, reference=reference).ok
            assert guard.check_model(reference, reference=saved).ok


def test_zeros_are_remarked_as_what_is_common() -> None:
    """Promise: a zero convolution or LoRA's B is no problem, and is said; a bias of zeros is not worth a word."""
    (remark,) = guard.check_model(MODELS["adapter"]()).remarks
    assert (remark.where, remark.text[:27]) == ("weight", "every value is 0: common be")
    assert not guard.check_model(torch.nn.LayerNorm(8)).remarks
    assert [each.where for each in guard.check_model(torch.nn.LayerNorm([4, 8])).remarks] == ["weight", "bias"]
