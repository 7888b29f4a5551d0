"""torchobs.tune.auto: recommends what was measured to be faster, and nothing where nothing was."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import Tensor, nn

from tests.tune.models import SlowUnlessAutocast, blocks
from torchobs import tune


def test_a_plan_is_recommended_with_its_evidence() -> None:
    """Promise: the plan is of the caller's own model, not applied, checkable, and the benchmark is beside it."""
    model, x = SlowUnlessAutocast(), torch.ones(2, 4)
    found = tune.auto(model, x, budget_s=1, modes=("amp",), amp_dtype=torch.bfloat16)
    assert found.plan is not None
    assert (found.plan.mode, found.plan.applied) == ("amp", False)
    assert found.evidence is not None
    assert found.evidence.recommended == "amp"
    assert "times as fast as none" in found.reason
    assert found.plan.check().accepted
    with found.plan:
        assert model(x).dtype is torch.bfloat16
    assert json.loads(json.dumps(found.to_dict()))["plan"]["mode"] == "amp"


def test_what_changes_nothing_is_not_timed() -> None:
    """Promise: a mode of which nothing can be used here is left out with that reason, and without another there is no plan."""
    found = tune.auto(blocks(), torch.ones(2, 16), modes=("amp",), level="none")
    assert found.plan is None
    assert found.evidence is None
    assert found.reason == "no mode changes anything here"
    assert [(each.mode, each.reason) for each in found.left_out] == [("amp", "nothing of it can be used here")]


def test_the_same_is_not_timed_twice_and_noise_is_no_recommendation() -> None:
    """Promise: equal modes are measured once; channels-last weights of a model that sleeps are no gain."""

    class Sleeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.002)
            return x + self.layer.weight

    def same(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    batch = torch.ones(1), torch.ones(1)
    options: dict[str, Any] = {"amp_dtype": torch.bfloat16}
    found = tune.auto(Sleeping(), batch, None, same, budget_s=2.0, modes=("amp", "memory_efficient"), **options)
    assert [(each.mode, each.reason) for each in found.left_out] == [("memory_efficient", "the same as amp here")]
    assert found.evidence is not None
    if found.evidence["amp"].is_noise:  # as it is but once in twenty runs
        assert found.plan is None
        assert "within the noise" in found.reason
