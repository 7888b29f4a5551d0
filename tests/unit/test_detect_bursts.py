"""Spikes that come again and again and are over at once are told twice, and others always."""

from __future__ import annotations

import random
from math import log

import pytest

from torchobs.detect.spikes import CALM, LEAST_EXPLOSIONS, LEAST_LOSS_SPIKES, Bursts, LossBaseline, judge

LEAST_NORM = log(8.0)


def losses_told(values: list[float], *, learns: bool = True) -> list[int]:
    """Which of them are spikes."""
    baseline = LossBaseline()
    return [index for index, value in enumerate(values) if baseline.is_spike(value, learns=learns)]


def norms_told(values: list[float]) -> list[int]:
    """The same of gradient norms."""
    mean, variance, seen, bursts, told = 0.0, 0.0, 0, Bursts(), list[int]()
    for index, value in enumerate(values):
        likely = bursts.peak + log(2.0)
        spike, mean, variance, seen = judge(log(value), mean, variance, seen, LEAST_NORM)
        if bursts.judge(log(value), likely, is_spike=spike):
            told.append(index)
    return told


def episodic(seed: int, steps: int = 3000) -> list[float]:
    """Losses of a critic: an episode ends every few tens of steps, and the longer ones come later."""
    chance = random.Random(seed)
    left, values = 20, list[float]()
    for step in range(steps):
        left -= 1
        ends = left <= 0
        left = chance.randrange(12, 50) if ends else left
        grown = 1.0 + step / 300
        values.append(grown * (chance.uniform(60.0, 100.0) if ends else 2.0 * chance.lognormvariate(0.0, 0.3)))
    return values


@pytest.mark.parametrize("seed", range(10))
def test_what_an_actor_critic_does_when_episodes_end(seed: int) -> None:
    """Some hundred bursts of a healthy run; fewer are told than are a finding."""
    values = episodic(seed)
    assert len(losses_told(values)) < LEAST_LOSS_SPIKES
    assert len(losses_told(values, learns=False)) < LEAST_LOSS_SPIKES  # as guard.Recovery, which undoes spikes
    assert len(norms_told(values)) < LEAST_EXPLOSIONS


def ordinary(steps: int, seed: int = 1) -> list[float]:
    """Values between the bursts."""
    chance = random.Random(seed)
    return [2.0 * chance.lognormvariate(0.0, 0.1) for _ in range(steps)]


def with_bursts(steps: int, every: int, lasting: int, height: float = 60.0) -> tuple[list[float], list[int]]:
    """Values with bursts, and where these are."""
    values = ordinary(steps)
    places = [at + more for at in range(100, steps - lasting, every) for more in range(lasting)]
    for at in places:
        values[at] = height
    return values, places


def test_single_bad_batches_far_apart_are_each_told() -> None:
    """One in four hundred."""
    values, places = with_bursts(4000, 400, 1)
    assert losses_told(values) == norms_told(values) == places


def test_what_lasts_is_told_each_time() -> None:
    """The weights have moved: the loss is high for some steps, however often."""
    values, places = with_bursts(1000, 60, 4)
    told = losses_told(values)
    assert {(at - 100) // 60 for at in told} == {(at - 100) // 60 for at in places}


def test_a_burst_far_beyond_the_usual_ones_is_told() -> None:
    """Once a hundred times as large."""
    values, _ = with_bursts(1000, 30, 1)
    values[700] = 6000.0
    assert losses_told(values)[-1] == norms_told(values)[-1] == 700


def test_what_goes_up_and_down_is_one_burst() -> None:
    """Every other value is a spike: an optimizer that jumps over its minimum, and no bursts that are over."""
    values = ordinary(130)
    for at in range(100, 120, CALM - 1):
        values[at] = 60.0
    assert len(norms_told(values)) >= LEAST_EXPLOSIONS
