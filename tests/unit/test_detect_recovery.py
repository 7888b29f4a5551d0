"""A training has recovered after fifty healthy steps, near what was usual before."""

from __future__ import annotations

import math

import pytest

from torchobs.detect.recovery import HEALTHY, LastAnomaly, healthy_steps

NAN = math.nan
LOSSES = dict.fromkeys(range(1, 201), 1.0)
NORMS = dict.fromkeys(range(1, 201, 10), 2.0)


@pytest.mark.parametrize("kind", ["nonfinite_loss", "nonfinite_gradient", "loss_spike", "gradient_explosion", "diverged"])
def test_fifty_steps_must_have_passed(kind: str) -> None:
    """Since the last anomaly; then their number is what is said."""
    for step, healthy in ((100, 100), (200 - HEALTHY, HEALTHY), (201 - HEALTHY, 0)):
        assert healthy_steps(kind, 1, LastAnomaly(step, 1.0, 1), LOSSES, NORMS) == healthy


@pytest.mark.parametrize("kind", ["nonfinite_loss", "nonfinite_gradient", "loss_spike"])
def test_what_was_not_reported_may_have_come_later(kind: str) -> None:
    """Anomalies that follow each other closely are counted alone: then the values of the last fifty steps decide."""
    last = LastAnomaly(100, 1.0, 32)
    assert healthy_steps(kind, 40, last, LOSSES, NORMS) == HEALTHY
    assert healthy_steps(kind, 40, last, dict.fromkeys(range(170, 201), 1.0), {191: 2.0}) == 0
    assert healthy_steps("loss_spike", 40, last, {**LOSSES, 170: 5.0}, NORMS) == 0
    assert healthy_steps("loss_spike", 32, last, {**LOSSES, 170: 5.0}, NORMS) == 100  # an ordinary value: none was counted


@pytest.mark.parametrize(
    ("kind", "losses", "norms"),
    [
        ("nonfinite_loss", {}, {}),
        ("nonfinite_loss", {**LOSSES, 160: NAN}, NORMS),
        ("nonfinite_gradient", {**LOSSES, 160: NAN}, NORMS),
        ("nonfinite_gradient", LOSSES, {**NORMS, 161: math.inf}),
        ("nonfinite_gradient", LOSSES, {91: 2.0}),
        ("loss_spike", dict.fromkeys(range(1, 201), 1.3), NORMS),
        ("gradient_explosion", LOSSES, dict.fromkeys(range(1, 201, 10), 20.0)),
        ("gradient_vanishing", LOSSES, dict.fromkeys(range(1, 201, 10), 0.005)),
    ],
)
def test_what_is_not_proven_is_not_past(kind: str, losses: dict[int, float], norms: dict[int, float]) -> None:
    """No values since, one that is not finite, or a level that stays far from the usual one."""
    assert healthy_steps(kind, 1, LastAnomaly(100, 1.0, 1), losses, norms) == 0


def test_what_was_usual_must_be_known() -> None:
    """Where the event is gone nobody knows what the loss has to come back to; that it is finite is seen."""
    for kind, healthy in (("loss_spike", 0), ("gradient_explosion", 0), ("nonfinite_loss", HEALTHY)):
        assert healthy_steps(kind, 1, None, LOSSES, NORMS) == healthy
