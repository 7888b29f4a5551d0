"""Anomalies become events as long as that tells something."""

from __future__ import annotations

from torchobs.detect.event_rate_limit import BURST, REFILL_S, anomaly_limiter
from torchobs.support.rate_limit import RateLimiter


def taken(limiter: RateLimiter, kind: str, now_s: float) -> int | None:
    """How many were left out before, or None if this one is, too."""
    return limiter.held_back(kind) if limiter.take(now_s, kind) else None


def test_a_flood_leaves_its_beginning_and_says_what_it_left_out() -> None:
    """10,000 steps of NaN at ten a second: the first 32 are events, then one in ten minutes, with the number in between."""
    limiter = anomaly_limiter()
    told = {step: taken(limiter, "nonfinite_loss", step / 10) for step in range(10_000)}
    events = {step: omitted for step, omitted in told.items() if omitted is not None}
    assert list(events)[:BURST] == list(range(BURST))
    (later,) = list(events)[BURST:]
    assert abs(later - 10 * REFILL_S) <= 10
    assert events[later] == later - BURST
    assert set(list(events.values())[:BURST]) == {0}


def test_what_comes_now_and_then_is_told_always() -> None:
    """A spike every quarter of an hour for a week; another kind's flood takes nothing from it."""
    limiter = anomaly_limiter()
    for _ in range(1000):
        limiter.take(0.0, "nonfinite_loss")
    assert {taken(limiter, "loss_spike", number * 900.0) for number in range(672)} == {0}


def test_a_clock_that_goes_back_is_no_credit() -> None:
    """Nothing is won by it."""
    limiter = anomaly_limiter()
    assert [limiter.take(-float(number), "loss_spike") for number in range(BURST + 1)] == [True] * BURST + [False]
