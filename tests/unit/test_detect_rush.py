"""A leak that leaves minutes is told of within half of one; the ramps with which trainings begin are not."""

import math
import random
from collections.abc import Callable

import pytest

from torchobs.detect.growth import LEAST, MemoryPoint
from torchobs.detect.rush import FORESIGHT, MOST, Rush

GIB = 1024**3
LIMIT = 64.0 * GIB


def verdicts(used: Callable[[int], float], seconds: int = 300, steps_a_second: float = 4.0) -> list[tuple[int, float]]:
    """When there was one, and the seconds that it foretold then."""
    rush, found = Rush(), []
    for second in range(seconds):
        level = used(second)
        if level > LIMIT:
            break
        rush.see(MemoryPoint(int(second * steps_a_second), float(second), level), LIMIT - level, LIMIT)
        if rush.growth is not None:
            found.append((second, (LIMIT - level) / rush.growth.per_second))
    return found


@pytest.mark.parametrize("death_s", [40, 60, 120, 240])
@pytest.mark.parametrize("steps_a_second", [0.5, 4.0, 100.0])
def test_who_dies_within_four_minutes_is_told_of_before(death_s: int, steps_a_second: float) -> None:
    """At the latest when two thirds of the time are over, and the time foretold is what is left."""
    found = verdicts(lambda second: 4 * GIB + second * 60 * GIB / death_s, steps_a_second=steps_a_second)
    first, foretold = found[0]
    assert LEAST - 1 <= first <= max(LEAST, death_s * 2 / 3)
    assert foretold == pytest.approx(death_s - first, rel=0.25)


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("a data set that is cached, and fits", lambda second: 4 * GIB + min(second, 40) * 0.6 * GIB),
        ("arenas that fill ever more slowly", lambda second: 60 * GIB - 50 * GIB * math.exp(-second / 8)),
        ("a logarithm", lambda second: 30 * GIB + 5 * GIB * math.log1p(second)),
        ("a leap", lambda second: 33 * GIB + 29 * GIB * (second >= 30)),
        ("a saw's teeth, as evaluations make them", lambda second: 50 * GIB + (second % 20) * 0.6 * GIB),
        ("nearly full, and steady", lambda _: 63.5 * GIB),
        ("a slow leak, which is another's to tell", lambda second: 40 * GIB + second * 0.02 * GIB),
    ],
)
def test_what_is_no_rush(name: str, used: Callable[[int], float]) -> None:
    """However fast it is for a while, and however near the limit."""
    assert verdicts(used) == [], name


def test_a_nearly_full_machine_whose_use_fluctuates_is_hardly_ever_called_so() -> None:
    """An hour at 95 % where activations of 2 GiB come and go: no more than one second in a thousand has a verdict."""
    generator = random.Random(3)
    found = verdicts(lambda _: 60 * GIB + generator.uniform(0, 2) * GIB, seconds=3600)
    assert len(found) <= 4


def test_growth_without_steps_is_not_training_s() -> None:
    """A model that is loaded, a program that is compiled: nothing is told before the steps go on."""
    assert verdicts(lambda second: 30 * GIB + second * 0.5 * GIB, steps_a_second=0.02) == []


def test_another_model_begins_with_a_ramp_of_its_own() -> None:
    """What was seen of the former one is forgotten, a verdict included; and looks between two seconds add no points."""
    rush = Rush()
    for tenth in range(MOST * 10):
        level = 32 * GIB + tenth * 0.05 * GIB
        rush.see(MemoryPoint(tenth, tenth / 10, level), LIMIT - level, LIMIT)
    growth = rush.growth
    assert growth is not None
    assert growth.per_second == pytest.approx(0.5 * GIB, rel=0.1)
    assert growth.seconds * FORESIGHT == pytest.approx(155, rel=0.1)
    rush.begin()
    assert rush.growth is None
    assert not rush.see(MemoryPoint(10_000, 1000.0, LIMIT - 1), 1.0, LIMIT)
