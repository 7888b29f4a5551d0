"""The soak's verdict: what grows is told from what is only restless."""

from __future__ import annotations

import random

import pytest

from bench.scraping import percentile
from tests.long.soak import trend


def test_a_leak_is_found_under_noise() -> None:
    """A byte a second for an hour is 3,600 of them, whatever single samples say."""
    dice = random.Random(1)
    points = [(float(second), 1e6 + second + dice.gauss(0, 200)) for second in range(0, 3600, 5)]
    found = trend(points, allowed=1000)
    assert found.grows
    assert found.grown == pytest.approx(3600, rel=0.05)
    assert found.level == pytest.approx(1e6 + 1800, rel=0.01)


def test_a_fifth_of_wild_samples_is_no_growth() -> None:
    """Late in the run, too, where they would tilt a line by least squares."""
    points = [(float(second), 5e6 if second > 480 and second % 3 == 0 else 1e6) for second in range(600)]
    assert sum(value > 1e6 for _, value in points) > 30
    assert trend(points, allowed=1.0).grown == 0


def test_what_shrinks_does_not_grow() -> None:
    """And what stays within what is allowed does not, either."""
    assert not trend([(0.0, 10.0), (1.0, 9.0), (2.0, 8.0)], allowed=0.5).grows
    assert not trend([(0.0, 10.0), (10.0, 10.4)], allowed=0.5).grows


def test_one_point_has_no_trend() -> None:
    """A soak that was too short fails instead of passing."""
    with pytest.raises(ValueError, match="two points"):
        trend([(0.0, 1.0)], allowed=1.0)


def test_percentiles_are_within_what_was_measured() -> None:
    """The 99th of a hundred even values, of one value, and never beyond the slowest."""
    assert percentile([float(value) for value in range(101)], 99) == 99
    assert percentile([3.0], 99) == 3
    assert percentile([1.0, 2.0], 99) <= 2
