"""Plans beside a training that is recorded: what changed the model is in the flight file."""

import pytest
import torch
from torch import nn

from tests.training import Recording
from torchobs import tune


def test_plans_are_events(run: Recording) -> None:
    """Promise: that a plan was applied, undone or refused is recorded with its mode, level and techniques."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    tune.optimize(model, mode="amp", level="advanced", amp_dtype=torch.bfloat16).apply().undo()
    with pytest.raises(tune.NumericalDifferenceError):
        tune.optimize(model, mode="amp", amp_dtype=torch.bfloat16).check(x, tolerance=0.0)
    run.whole_round()
    found = run.attributes("torchobs.tune.plan")
    assert [event["action"] for event in found] == ["applied", "undone", "refused"]
    assert found[0]["mode"] == "amp"
    assert found[0]["level"] == "advanced"
    assert found[0]["techniques"] == "autocast, fused_optimizer, loader"
    assert found[2]["difference"] > 0
