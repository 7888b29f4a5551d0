"""torchobs.tune.optimize: quantisation, checkpointing by a budget of bytes."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tune.models import blocks
from tests.tune.test_tune_plan import fingerprint
from torchobs import tune
from torchobs.tune.techniques import Kept


def quantized() -> tuple[nn.Module, Tensor, tune.Plan]:
    """A model, an input, and a plan that quantises."""
    model, x = blocks().eval(), torch.randn(8, 16)
    return model, x, tune.optimize(model, mode="inference", quantize="dynamic", example=x)


def test_quantised_and_back() -> None:
    """Promise: outputs change within the tolerance; undone, the weights are the same objects with the same bits."""
    model, x, plan = quantized()
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
    assert all(weight is other for weight, other in zip(weights, model.parameters(), strict=True))


def test_weights_that_were_trained_since_are_quantised_anew() -> None:
    """Promise: a plan that is applied again has the weights of now; with gradients the model is the float32 one."""
    model, x, plan = quantized()
    with plan:
        assert torch.equal(model(x), model(x))
        assert model(x).requires_grad
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        with plan:
            assert not model(x).any()


def test_quantisation_is_skipped_where_it_cannot_be() -> None:
    """Promise: training and a model without linear layers are reasons; computed weights are left alone."""
    assert "not part of mode 'amp'" in str(tune.optimize(blocks(), mode="amp", quantize="dynamic"))
    plan = tune.optimize(nn.Sequential(nn.ReLU()), mode="inference", quantize="dynamic")
    assert "- quantization    the model has no nn.Linear" in str(plan)
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 2)))  # its weight is computed before each call
    plan = tune.optimize(model, mode="inference", quantize="dynamic", example=torch.randn(3, 4))
    assert "1 × Linear in 8-bit integers" in str(plan)
    assert plan.inspect().ok


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
    (reason,) = [row.reason for row in plan.decisions if row.technique == "checkpointing"]
    count = int(reason.split(" of 8 blocks")[0].split()[-1])
    assert 2 <= count < 8
    with plan:
        assert kept_bytes(model, x) < whole // 2
    roomy = tune.optimize(model, activation_budget=2 * whole, **options)
    assert "checkpointing" not in roomy.used
    assert "are allowed" in str(roomy)
    assert "is not reached" in str(tune.optimize(model, activation_budget=1, **options))
    assert "pass example=" in str(tune.optimize(model, mode="memory_efficient", activation_budget=1))


class Counting(nn.Module):
    """Has a state in a plain buffer: a moving average, in training alone."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(dim=0)
        return y - self.average


class Table(nn.Module):
    """Fills a table in its first forward pass, as rotary embeddings do."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not len(self.table):
            self.table = torch.arange(8.0)
        return self.layer(x) + self.table  # type: ignore[no-any-return]


LAYERS: dict[str, Any] = {
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "instance_norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "counting": Counting,
    "frozen_counting": lambda: Counting().eval(),
}


def decision(plan: tune.Plan) -> Any:
    """The one on recomputation."""
    return next(row for row in plan.decisions if row.technique == "checkpointing")


@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_that_a_forward_pass_changes_are_not_recomputed(kind: str) -> None:
    """Promise: such a block is left as it is, which is said; what is tried for that leaves no trace."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(LAYERS[kind](), nn.Tanh()) for _ in range(2)))
    planned, x = copy.deepcopy(plain), torch.randn(3, 4, 8) if "norm" in kind else torch.randn(3, 8)
    state = torch.get_rng_state()
    plan = tune.optimize(planned, mode="memory_efficient", example=x)
    assert not decision(plan).used
    assert decision(plan).reason.startswith("the blocks have ")
    assert torch.equal(state, torch.get_rng_state())
    assert [part.training for part in plain.modules()] == [part.training for part in planned.modules()]
    assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))


def test_blocks_without_state_are_recomputed() -> None:
    """Promise: constants, tables that the first pass fills and norms without statistics are no obstacle."""
    x = torch.randn(2, 4, 8)
    for make in (Table, lambda: nn.InstanceNorm1d(4)):
        model = nn.Sequential(*(nn.Sequential(make(), nn.Tanh()) for _ in range(2)))
        assert decision(tune.optimize(model, mode="memory_efficient", example=x)).used
    assert decision(tune.optimize(blocks(), mode="memory_efficient", example=torch.randn(2, 16))).used


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


def test_weights_that_share_their_memory_keep_it() -> None:
    """Promise: neither other processes nor another parameter lose sight of a weight because its layout is changed."""
    shared = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).share_memory()
    plan = tune.optimize(shared, mode="compile", level="advanced")
    assert "- channels_last   the weights share their memory" in str(plan)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    model[1].weight.data = model[0].weight.data
    with tune.optimize(model, mode="compile", level="advanced"):
        assert model.get_parameter("1.weight").data_ptr() == model.get_parameter("0.weight").data_ptr()
        assert model.get_parameter("2.weight").is_contiguous(memory_format=torch.channels_last)


class ForInferenceAlone(nn.Sequential):
    """Takes no input in training, as detectors without their targets."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("targets are missing")
        return super().forward(x)  # type: ignore[no-any-return]


def test_what_cannot_be_tried_is_said() -> None:
    """Promise: an example that is none of training is no error of the plan, and the decision says what is not known."""
    model = ForInferenceAlone(*blocks()).eval()
    checkpointing = decision(tune.optimize(model, mode="memory_efficient", example=torch.randn(2, 16)))
    assert checkpointing.used
    assert "not known, a forward pass in training mode failed: ValueError: targets are missing" in checkpointing.reason
    assert not any(part.training for part in model.modules())
    lazy = nn.Sequential(*(nn.Sequential(nn.LazyLinear(4), nn.Tanh()) for _ in range(2)))
    checkpointing = decision(tune.optimize(lazy, mode="memory_efficient", example=torch.randn(2, 16)))
    assert "not initialised yet" in checkpointing.reason
    assert isinstance(next(lazy.children())[0], nn.LazyLinear)  # type: ignore[index]
