"""From which gradient norm on a step is called exploding or vanishing: the caller's threshold, or the model's own past."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from math import nan
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from torchobs import debug
from torchobs.detect.spikes import ORDERS, WARM_UP, NormBaseline


def graded(norm: float) -> nn.Module:
    """A model whose gradients have this norm each."""
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, norm / parameter.numel() ** 0.5)
    return model


CHECKS: dict[str, Callable[..., Any]] = {
    "check_gradients": debug.check_gradients,
    "monitor_step": lambda model, **limits: debug.monitor_step(model, 1.0, **limits),
    "backward_pass": lambda model, **limits: debug.backward_pass(_no_loss(), model, **limits),
}


def _no_loss() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("name", CHECKS)
def test_a_caller_s_threshold_holds_for_the_whole_verdict(name: str) -> None:
    """Promise: nothing that it allows is an anomaly, of the step or of a parameter, and what it does not allow is one."""
    check = CHECKS[name]
    assert check(graded(300.0)).anomalies
    assert check(graded(300.0), exploding=1e6).anomalies == ()
    assert check(graded(3.0), exploding=1.0).anomalies
    assert check(graded(1e-8)).anomalies
    assert check(graded(1e-8), vanishing=1e-20).anomalies == ()
    assert check(graded(1e-3), vanishing=0.1).anomalies
    for limits in ({"exploding": 0.0}, {"vanishing": nan}):
        with pytest.raises(ValueError, match="a threshold of a norm is above 0"):
            check(graded(1.0), **limits)


def test_a_large_norm_that_is_usual_is_no_explosion() -> None:
    """Promise: of a loss that is a sum over the batch, from the 20th step on; ten times as much is one, and so is its drift."""
    chance, model = Random(0), nn.Linear(4, 4)

    def step(norm: float) -> bool:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, norm)
        found = debug.monitor_step(model, 1.0)
        assert found.gradient_explosion == found.anomaly_detected == any("exploding" in text for text in found.anomalies)
        return found.gradient_explosion

    told = [step(chance.lognormvariate(5.0, 0.2)) for _ in range(100)]
    assert told == [True] * WARM_UP + [False] * (100 - WARM_UP)
    assert step(15e3)
    assert not step(150.0)


def test_a_norm_that_grows_smoothly_explodes_at_last() -> None:
    """Promise: a recent past that grows along does not hide it; one that is far from finite is judged, too."""
    norms, norm = NormBaseline(), 1.0
    for _ in range(WARM_UP):
        assert norms.limit == 0.0
        norms.add(norm)
    limit = norms.limit
    assert limit == pytest.approx(8.0)
    while norm <= norms.limit:
        assert norm < 1.1 * ORDERS
        norms.add(norm)
        norm *= 1.01
    assert norm == pytest.approx(ORDERS, rel=0.02)
    before = norms.limit
    for odd in (nan, 0.0, float("inf")):
        norms.add(odd)
    assert norms.limit == before


def test_a_loss_that_grows_smoothly_is_told() -> None:
    """Promise: where each is near the last, the model's first losses tell; sound again, it is sound."""
    model, told, chance, texts = graded(1.0), [], Random(0), list[str]()
    for number in range(400):
        found = debug.monitor_step(model, 2.0 * 1.03 ** max(0, number - 50) * chance.uniform(0.8, 1.2))
        assert found.loss_anomaly == found.anomaly_detected == bool(found.anomalies)
        told.append(found.loss_anomaly)
        texts += found.anomalies
    assert told.index(True) == pytest.approx(340, abs=30)
    assert all(told[told.index(True) :])
    assert texts[-1].endswith("stays far above the first ones, 2.276 (diverged)")
    assert debug.monitor_step(model, 2.0).anomalies == ()
