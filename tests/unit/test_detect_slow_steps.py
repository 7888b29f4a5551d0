"""Which steps are slow: numbers in, a verdict out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import exp, inf

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


def durations(step_s: float, seconds: float, seed: int, *, workers: bool = False, slow: float = 1.0) -> Iterator[float]:
    """Steps on a machine with neighbours, whose load waxes and wanes over seconds and which holds up one step in a hundred.

    Medians, 99th percentiles and maxima are like those of fifty short trainings, recorded on two cores that eight programs
    shared. ``workers``: two loader workers keep up every other time; ``slow``: factor from 72 % of the time on.
    """
    chance, load, passed_s = random.Random(seed), 0.0, 0.0
    while passed_s < seconds:
        load = load * exp(-step_s / 2.0) + chance.gauss(0.0, 0.3) * (1 - exp(-step_s)) ** 0.5
        taken_s = step_s * exp(load + chance.gauss(0.0, 0.2))
        if workers:
            taken_s *= chance.choice((0.3, 2.0))
        if chance.random() < 0.01:
            taken_s += chance.expovariate(1 / 0.05)
        if passed_s > 0.72 * seconds:
            taken_s *= slow
        passed_s += taken_s
        yield taken_s


LENGTHS = ((0.001, 4), (0.002, 8), (0.005, 20), (0.012, 50), (0.02, 60), (0.03, 60), (0.05, 60), (0.2, 120))
"""Seconds a step, and seconds of training."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_no_healthy_run_has_become_slow_wherever_it_ends(number: int, seed: int) -> None:
    """Each run is judged as if it had ended after its hundredth, two hundredth, three hundredth … step."""
    for workers in (False, True):
        steps = list(durations(*LENGTHS[number], seed, workers=workers))
        assert [end for end in range(100, len(steps), 100) if slowed_from(steps[:end]) is not None] == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", range(3, len(LENGTHS)))
def test_a_run_that_slows_down_at_its_end_is_found_on_a_busy_machine(number: int, seed: int) -> None:
    """With steps five times as long. A run of twenty seconds has not the thirty to compare with."""
    steps = list(durations(*LENGTHS[number], seed, slow=5.0))
    begin = slowed_from(steps)
    assert begin is not None
    assert sum(steps[:begin]) > 0.6 * LENGTHS[number][1]


def test_superiority_is_the_probability_of_a_greater_value() -> None:
    """Equals count half; nothing is greater than itself."""
    assert superiority([1, 2, 3], [1, 2, 3]) == pytest.approx(0.5)
    assert superiority([3], [1, 2, 3, 4]) == pytest.approx(2.5 / 4)
    assert superiority([9, 9], [1, 2]) == 1.0 > SUPERIORITY
