"""Which steps are slow: numbers in, a verdict out."""

from __future__ import annotations

from math import inf

import pytest

from torchobs.detect.slow_steps import LEAST_SEEN, slow_from


def test_few_steps_tell_nothing() -> None:
    """The first ones warm up."""
    assert slow_from([0.1] * (LEAST_SEEN - 1)) == inf


def test_slow_is_three_times_as_long_as_usual() -> None:
    """The median is what is usual: a few slow ones do not move it."""
    assert slow_from([0.1] * 60 + [50.0] * 4) == pytest.approx(0.3)


def test_a_few_milliseconds_are_no_finding() -> None:
    """A step of 1 ms that another thread held up for one turn of the interpreter's lock is as it should be."""
    assert slow_from([0.001] * 64) == pytest.approx(0.006)
