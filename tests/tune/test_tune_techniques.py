"""torchobs.tune.optimize: attention kernels, quantisation, checkpointing by a budget of bytes."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tune.models import blocks, convolutions
from tests.tune.test_tune_plan import fingerprint
from torchobs import tune
from torchobs.tune.activations import Kept, recomputed


class Attending(nn.Module):
    """One layer of self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(("kernel", "ran"), [("flash", "flash"), ("math", "math")])
def test_the_kernel_that_is_preferred_runs_and_is_told(kernel: str, ran: str) -> None:
    """Promise: which kernel of attention ran is what the profiler saw; undone, torch chooses as before."""
    model, x = Attending(), torch.randn(2, 5, 16)
    before = fingerprint(model)
    plan = tune.optimize(model, mode="amp", attention=kernel, example=x)
    assert "attention" in plan.used
    assert plan.attention_kernels() == {ran: 1}
    assert plan.check().accepted
    assert fingerprint(model) == before
    assert tune.optimize(model, mode="none").attention_kernels(x) == {"flash": 1}


def test_a_kernel_that_is_not_there_is_skipped() -> None:
    """Promise: a device without the kernel, and a model without attention, are told."""
    plan = tune.optimize(Attending(), mode="amp", attention="cudnn")
    assert "- attention       cpu has no kernel 'cudnn'" in str(plan)
    assert tune.optimize(blocks(), mode="none").attention_kernels(torch.ones(2, 16)) == {}
    with pytest.raises(ValueError, match="pass a batch here"):
        plan.attention_kernels()


def quantized(kind: str) -> tuple[nn.Module, Tensor, tune.Plan]:
    """A model, an input, and a plan that quantises."""
    model, x = blocks().eval(), torch.randn(8, 16)
    return model, x, tune.optimize(model, mode="inference", quantize=kind, example=x)


KINDS = ["dynamic", *(["torchao_int8", "torchao_int8_weights"] if importlib.util.find_spec("torchao") else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_and_back(kind: str) -> None:
    """Promise: outputs change within the tolerance; undone, the weights are the same objects with the same bits."""
    model, x, plan = quantized(kind)
    before, weights = fingerprint(model), list(model.parameters())
    with torch.no_grad():
        expected = model(x)
        with plan:
            got = model(x)
        assert not torch.equal(got, expected)
        difference = plan.check()
        assert 0 < difference.relative < difference.tolerance == 0.0625
        assert torch.equal(model(x), expected)
    assert fingerprint(model) == before
    assert all(one is other for one, other in zip(weights, model.parameters(), strict=True))


def test_weights_that_were_trained_since_are_quantised_anew() -> None:
    """Promise: a plan that is applied again has the weights of now; with gradients the model is the float32 one."""
    model, x, plan = quantized("dynamic")
    with plan:
        assert torch.equal(model(x), model(x))
        assert model(x).requires_grad
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        with plan:
            assert not model(x).any()


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_while_a_plan_is_applied_are_computed_with(*, assign: bool) -> None:
    """Promise: no plan answers with copied weights that the model has replaced."""
    model, other = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval() for _ in range(2))
    x = torch.ones(3, 8)
    with torch.no_grad(), tune.optimize(model, mode="inference", quantize="dynamic", example=x) as plan:
        model(x)
        model.load_state_dict(other.state_dict(), assign=assign)
        difference = (model(x).float() - other(x)).norm() / other(x).norm()
        assert difference < 0.0625
        model.get_parameter("2.bias").add_(100.0)
        assert (model(x) > 50).all()
    assert not plan.applied


@pytest.mark.parametrize("kind", KINDS[1:])
def test_weights_that_replaced_quantised_ones_stay(kind: str) -> None:
    """Promise: `undo` takes back what the plan did, and not what was loaded since."""
    model, x, plan = quantized(kind)
    other, _, _ = quantized(kind)
    with plan:
        model.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


class _OwnLinear(nn.Linear):
    """A linear layer with a class of its own."""


@pytest.mark.parametrize("kind", KINDS[1:])
def test_only_layers_that_the_plan_counts_are_quantised(kind: str) -> None:
    """Promise: one with a computed weight, or of a class of its own, stays as it is, also after `undo`."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 16)), _OwnLinear(16, 16), nn.Linear(16, 4)).eval()
    x, weight = torch.randn(8, 16), model[1].weight
    plan = tune.optimize(model, mode="inference", quantize=kind, example=x)
    assert "1 × Linear" in str(plan)
    with torch.no_grad():
        expected = model(x)
        assert plan.check().relative > 0
        with plan:
            assert model[1].weight is weight
        assert model[1].weight is weight
        assert torch.equal(model(x), expected)


def test_weights_that_share_their_memory_keep_it() -> None:
    """Promise: neither other processes nor another parameter lose sight of a weight because its layout is changed."""
    shared = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).share_memory()
    plan = tune.optimize(shared, mode="compile", level="advanced")
    assert "- channels_last   the weights share their memory" in str(plan)
    own = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    own[1].weight.data = own[0].weight.data
    with tune.optimize(own, mode="compile", level="advanced"):
        assert own.get_parameter("1.weight").data_ptr() == own.get_parameter("0.weight").data_ptr()
        assert own.get_parameter("2.weight").is_contiguous(memory_format=torch.channels_last)


def test_quantisation_is_skipped_where_it_cannot_be() -> None:
    """Promise: training, a model without linear layers, a missing torchao are reasons."""
    assert "not part of mode 'amp'" in str(tune.optimize(blocks(), mode="amp", quantize="dynamic"))
    plan = tune.optimize(nn.Sequential(nn.ReLU()), mode="inference", quantize="dynamic")
    assert "- quantization    the model has no nn.Linear" in str(plan)
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 2)))  # whose weight is computed before each call
    plan = tune.optimize(model, mode="inference", quantize="dynamic", example=torch.randn(3, 4))
    assert "1 × Linear in 8-bit integers" in str(plan)
    assert plan.measure().accepted
    if importlib.util.find_spec("torchao") is None:
        plan = tune.optimize(blocks(), mode="inference", quantize="torchao_int8")
        assert "torchao is not installed: pip install 'torchobs[torchao]'" in str(plan)
        assert plan.apply().undo().used == ("loader", "compile")


def test_a_torchao_that_does_not_fit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: one made for another torch is a reason, not a crash when the plan is applied."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise ImportError('needs another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    plan = tune.optimize(blocks(), mode="inference", quantize="torchao_int8")
    assert "this torchao does not fit this torch: ImportError: needs another torch" in str(plan)
    assert "quantization" not in plan.apply().undo().used


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, by the graph itself."""
    return Kept(model, x, ()).total


def test_no_more_is_recomputed_than_the_budget_asks_for() -> None:
    """Promise: the blocks are chosen by their measured bytes, and the graph then keeps less than the budget."""
    model, x = blocks(depth=8), torch.ones(256, 16)
    whole = kept_bytes(model, x)
    before = fingerprint(model)
    options: dict[str, Any] = {"mode": "memory_efficient", "example": x}
    plan = tune.optimize(model, activation_budget=whole // 2, **options)
    assert fingerprint(model) == before  # measuring draws no random number and leaves no hook
    (reason,) = [each.reason for each in plan.decisions if each.technique == "checkpointing"]
    count = int(reason.split(" of 8 blocks")[0].split()[-1])
    assert 2 <= count < 8
    with plan:
        assert kept_bytes(model, x) < whole // 2
    roomy = tune.optimize(model, activation_budget=2 * whole, **options)
    assert "checkpointing" not in roomy.used
    assert "are allowed" in str(roomy)
    assert "is not reached" in str(tune.optimize(model, activation_budget=1, **options))
    assert "pass example=" in str(tune.optimize(model, mode="memory_efficient", activation_budget=1))


def test_measuring_leaves_running_statistics() -> None:
    """Promise: batch normalisation's statistics are as before; each block's bytes are part of the whole."""
    model = convolutions()
    before = fingerprint(model)
    kept = Kept(model, torch.ones(4, 3, 8, 8), [model[0], model[2]])
    assert fingerprint(model) == before
    assert 0 < sum(kept.by_block) < kept.total


def test_the_largest_is_chosen_first() -> None:
    """Promise: recomputing one block alone gains nothing, since it is there again meanwhile; two gain the smaller."""
    kept = Kept(nn.Linear(1, 1), torch.ones(1, 1), ())
    kept.total, kept.by_block = 100, [10, 40, 30]
    assert recomputed(kept, 100) == ([], 100)
    assert recomputed(kept, 70) == ([1, 2], 70)
    assert recomputed(kept, 1) == ([0, 1, 2], 60)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "fast"}, "unknown attention 'fast': use one of flash"),
        ({"quantize": "int3"}, "unknown quantize 'int3': use one of dynamic"),
        ({"activation_budget": 0}, "bytes above 0"),
    ],
)
def test_wrong_arguments_say_what_to_do(options: dict[str, Any], words: str) -> None:
    """Promise: a wrong argument is an error of the call."""
    with pytest.raises(ValueError, match=words):
        tune.optimize(nn.Linear(2, 2), **options)
