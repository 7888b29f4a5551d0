"""Which steps are slow: numbers in, a verdict out."""

from __future__ import annotations

from math import inf

import pytest

from torchobs.detect.slow import LEAST_SEEN, is_slow, usual


def test_few_steps_tell_nothing() -> None:
    """The first ones warm up."""
    assert usual([0.1] * (LEAST_SEEN - 1)) == inf
    assert not is_slow(1000.0, inf)


@pytest.mark.parametrize(("duration_s", "slow"), [(0.299, False), (0.301, True), (10.0, True), (0.0, False)])
def test_slow_is_three_times_as_long_as_usual(duration_s: float, slow: bool) -> None:  # noqa: FBT001  # a table
    """The median is what is usual."""
    assert is_slow(duration_s, usual([0.1] * 60 + [50.0] * 4)) == slow


def test_a_few_milliseconds_are_no_finding() -> None:
    """A step of 1 ms that another thread held up for one turn of the interpreter's lock is as it should be."""
    assert not is_slow(0.0059, 0.001)
    assert is_slow(0.0061, 0.001)
