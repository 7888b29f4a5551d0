"""A loss that grows without end has diverged, however smoothly; one that only varies, or is ramped up, has not."""

from collections.abc import Iterable
from random import Random

import pytest

from torchobs.detect.divergence import Divergence


def first_told(losses: Iterable[float]) -> int | None:
    """The number of the loss at which it is told."""
    divergence = Divergence()
    return next((number for number, loss in enumerate(losses, 1) if divergence.add(loss)), None)


@pytest.mark.parametrize("growth", [1.002, 1.01, 1.05, 1.3])
@pytest.mark.parametrize("start", [0.01, 2.0, 500.0])
def test_smooth_growth_is_told_in_time(growth: float, start: float) -> None:
    """After 300 sound steps; before it is a hundred thousand times what it was, or what counts as a start."""
    chance = Random(1)
    losses = [start * chance.uniform(0.9, 1.1) for _ in range(300)]
    while losses[-1] < 1e5 * max(start, 1.0):
        losses.append(start * growth ** (len(losses) - 300) * chance.uniform(0.9, 1.1))
    losses += losses[-1:] * 50
    told = first_told(losses)
    assert told is not None
    assert min(losses[told - 50 : told]) > 900 * max(start, 1.0)


def test_a_rate_that_is_wrong_from_the_start_is_told() -> None:
    """Before any baseline is learned."""
    assert first_told([2.3, 1.5e7, *[1.5e10] * 60]) == 51
    assert first_told([2.3, 9.0, 400.0, *[1.5e10] * 60]) == 53


HEALTHY = {
    "falls": [10.0 * 0.99**number for number in range(2000)],
    "begins_near_zero": [0.0, 1e-6, *[10.8] * 2000],
    "both_signs": [(-1) ** number * 10.0 ** (number % 3) for number in range(2000)],
    "ramped_up": [50.0 * min(number, 5000) for number in range(1, 9000)],
    "bursts": [1.0 if number % 40 else 1e5 for number in range(2000)],
    "critic": [400.0 * Random(number).lognormvariate(1.0, 1.0) for number in range(3000)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_courses_are_not_told(name: str) -> None:
    """What a training does that goes well, of whatever kind."""
    assert first_told(HEALTHY[name]) is None
