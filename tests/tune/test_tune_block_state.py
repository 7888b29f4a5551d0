"""torchobs.tune.optimize: which blocks are not recomputed, since a second forward pass of them would not be the first again."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tune.models import blocks
from torchobs import tune


class Counting(nn.Module):
    """Has a state that no class of torch tells: a moving average, in training alone."""

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


def old_spectral_norm(layer: nn.Module) -> nn.Module:
    """Return it with the hook that torch had before parametrizations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(layer)


LAYERS: dict[str, Any] = {
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "old_spectral_norm": lambda: old_spectral_norm(nn.Linear(8, 8)),
    "instance_norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "observer": torch.ao.quantization.MovingAverageMinMaxObserver,
    "counting": Counting,
    "frozen_counting": lambda: Counting().eval(),
}


def decision(plan: tune.Plan) -> Any:
    """The one on recomputation."""
    return next(each for each in plan.decisions if each.technique == "checkpointing")


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
