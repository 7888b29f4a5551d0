"""Which steps are slow: numbers in, a verdict out."""

from __future__ import annotations

import random
from math import inf

import pytest

from torchobs.detect.slow_steps import LEAST_SEEN, SUPERIORITY, slow_from, slowed_from, superiority


def test_few_steps_tell_nothing() -> None:
    """The first ones warm up."""
    assert slow_from([0.1] * (LEAST_SEEN - 1)) == inf


def test_slow_is_three_times_as_long_as_usual() -> None:
    """The median is what is usual: a few slow ones do not move it."""
    assert slow_from([0.1] * 60 + [50.0] * 4) == pytest.approx(0.3)


def test_a_few_milliseconds_are_no_finding() -> None:
    """A step of 1 ms that another thread held up for one turn of the interpreter's lock is as it should be."""
    assert slow_from([0.001] * 64) == pytest.approx(0.006)


def test_steps_have_become_slow_when_they_are_so_for_ten_seconds() -> None:
    """Steps of any length: short ones by the hundred, long ones at least eight; and when it began some minutes ago."""
    assert slowed_from([0.1] * 600 + [0.3] * 34) == 600
    assert slowed_from([0.1] * 3_000 + [0.3] * 500) is not None
    assert slowed_from([0.001] * 60_000 + [0.003] * 3_334) in range(59_990, 60_001)
    assert slowed_from([2.0] * 60 + [6.0] * 8) == 60
    assert slowed_from([2.0] * 60 + [6.0] * 3) is None


def test_a_hiccup_is_no_slowdown() -> None:
    """Ten steps of 1 ms that took thirty times as long at the end, and two seconds of a stopped machine."""
    assert slowed_from([0.001] * 4_000 + [0.03] * 10) is None
    assert slowed_from([0.001] * 60_000 + [2.0] + [0.001] * 5) is None
    assert slowed_from([0.1] * 600 + [15.0] + [0.1] * 20) is None


def test_two_loader_workers_are_no_slowdown() -> None:
    """Every other batch is there already, and which comes last is chance; in twenty such runs."""
    for seed in range(20):
        chance = random.Random(seed)
        steps = [chance.choice((0.002, 0.1)) * chance.uniform(0.8, 1.3) for _ in range(2_000)]
        assert slowed_from(steps) is None
        assert slowed_from([*steps, *([0.1] * 10)]) is None


def test_what_was_as_slow_before_is_no_slowdown() -> None:
    """A neighbour on the machine comes and goes."""
    assert slowed_from([0.1] * 300 + [0.3] * 40 + [0.1] * 300 + [0.3] * 40) is None


def test_superiority_is_the_probability_of_a_greater_value() -> None:
    """Equals count half; nothing is greater than itself."""
    assert superiority([1, 2, 3], [1, 2, 3]) == pytest.approx(0.5)
    assert superiority([3], [1, 2, 3, 4]) == pytest.approx(2.5 / 4)
    assert superiority([9, 9], [1, 2]) == 1.0 > SUPERIORITY
