"""A leak is not warming up, a saw's teeth or noise; a limit is foretold as far as the past allows.

A leak that leaves minutes is told of within half of one; the ramps with which trainings begin are not.
"""

import itertools
import math
import random
from collections.abc import Callable

import pytest

from torchobs.detect import growth
from torchobs.detect.growth import LEAST, MOST, YOUNG, FastWindow, Growth, MemoryPoint, grows, soonest, time_to_limit_s

MIB = 1024**2
GIB = 1024**3


def course(used: Callable[[int], float], count: int = 48, steps: int = 100, seconds: float = 10.0) -> list[MemoryPoint]:
    """Points `steps` steps and `seconds` apart."""
    return [MemoryPoint(index * steps, index * seconds, used(index)) for index in range(count)]


def noise(spread: float, seed: int = 1) -> Callable[[], float]:
    """Numbers around 0, the same for the same seed."""
    generator = random.Random(seed)
    return lambda: generator.gauss(0.0, spread)


def test_a_leak_is_measured_in_bytes_a_step_and_a_second() -> None:
    """100 KiB a step is 1 MiB a second at ten steps a second, whatever noise is on it."""
    jitter = noise(3 * MIB)
    growth = grows(course(lambda index: 4 * GIB + index * 10 * MIB + jitter()))
    assert growth is not None
    assert growth.sustained
    assert growth.per_step == pytest.approx(0.1 * MIB, rel=0.05)
    assert growth.per_second == pytest.approx(MIB, rel=0.05)


Courses = dict[str, Callable[[int], float]]
NO_LEAKS: Courses = {
    "logarithmic warm-up": lambda index: 3 * GIB + 300 * MIB * math.log(index + 1),
    "one leap": lambda index: 4 * GIB + 2 * GIB * (index > 30),
    "a saw's teeth": lambda index: 4 * GIB + (index % 12) * 100 * MIB,
    "small change": lambda index: 400 * MIB + index * 0.1 * MIB,
    "what has just begun": lambda index: 4 * GIB + max(0, index - 32) * 20 * MIB,
}


def test_what_is_no_leak() -> None:
    """It is not sustained, so no limit is foretold, however near; of 1,000 runs that only fluctuate, hardly one is a leak."""
    for name, used in NO_LEAKS.items():
        for count in (LEAST, 36, MOST):
            growth = grows(course(used, count))
            assert growth is not None, name
            assert (growth.sustained, time_to_limit_s(growth, MIB)) == (False, None), name
    jitter = noise(100 * MIB)
    growths = [grows(course(lambda _: 2 * GIB + jitter())) for _ in range(1000)]
    assert sum(growth is not None and growth.sustained for growth in growths) <= 2


def test_the_limit_is_foretold_by_a_straight_line() -> None:
    """Not beyond sixty times what was seen of it, nor a week; after a day without growth four minutes of a leak are enough."""
    steady = Growth(1.0, 1e6, 300.0, sustained=True)
    assert [time_to_limit_s(steady, room) for room in (3.6e9, 18e9, 18.1e9, -5.0)] == [3600.0, 18_000.0, None, 0.0]
    assert [time_to_limit_s(steady._replace(seconds=1e9), days * 86_400e6) for days in (7, 8)] == [7 * 86_400, None]
    assert time_to_limit_s(steady._replace(sustained=False), 1.0) is None
    assert time_to_limit_s(steady._replace(per_second=-1.0), 1.0) is None
    assert soonest([None, steady, steady._replace(per_second=2e6)], 3.6e9) == 1800.0
    growths = [grows(course(lambda index, rate=rate: 400 * MIB + index * rate * MIB)) for rate in (0.25, 0.27)]  # type: ignore[misc]
    assert [soonest([None, growth], 0.0) for growth in growths] == [None, 0.0], "8 MiB in two thirds of the points"
    history = growth.MemoryHistory()
    for index in range(8640 + LEAST):
        history.add(MemoryPoint(index * 100, index * 10.0, 4 * GIB + max(0, index - 8640) * 100 * MIB))
    whole, recent = history.growths()
    assert whole is not None
    assert not whole.sustained
    assert soonest([whole, recent], 10 * GIB) == pytest.approx(1024.0)


LIMIT = 64.0 * GIB


def verdicts(used: Callable[[int], float], seconds: int = 300, steps_a_second: float = 4.0) -> list[tuple[int, float]]:
    """When there was one, and the seconds that it foretold then."""
    window, moments = FastWindow(), []
    for second in range(seconds):
        level = used(second)
        if level > LIMIT:
            break
        window.see(MemoryPoint(int(second * steps_a_second), float(second), level), LIMIT - level, LIMIT)
        if window.growth is not None:
            moments.append((second, (LIMIT - level) / window.growth.per_second))
    return moments


def test_who_dies_within_four_minutes_is_told_of_before() -> None:
    """At the latest when two thirds of the time are over, and the time foretold is what is left."""
    for death_s, steps_a_second in itertools.product((40, 60, 120, 240), (0.5, 4.0, 100.0)):
        rate = 60 * GIB / death_s
        first, foretold = verdicts(lambda second, rate=rate: 4 * GIB + second * rate, steps_a_second=steps_a_second)[0]  # type: ignore[misc]
        assert YOUNG - 1 <= first <= max(LEAST, death_s * 2 / 3)
        assert foretold == pytest.approx(death_s - first, rel=0.25)


NO_FAST_LEAKS: Courses = {
    "a data set that is cached, and fits": lambda second: 4 * GIB + min(second, 40) * 0.6 * GIB,
    "a logarithm": lambda second: 30 * GIB + 5 * GIB * math.log1p(second),
    "a leap": lambda second: 33 * GIB + 29 * GIB * (second >= 30),
    "a saw's teeth, as evaluations make them": lambda second: 50 * GIB + (second % 20) * 0.6 * GIB,
    "a slow leak, which is another's to tell": lambda second: 40 * GIB + second * 0.02 * GIB,
}


def test_what_is_no_fast_leak() -> None:
    """However fast for a while, or near the limit; hardly ever an hour at 95 % that fluctuates; nor growth without steps."""
    assert [name for name, used in NO_FAST_LEAKS.items() if verdicts(used)] == []
    generator = random.Random(3)
    assert len(verdicts(lambda _: 60 * GIB + generator.uniform(0, 2) * GIB, seconds=3600)) <= 4
    assert verdicts(lambda second: 30 * GIB + second * 0.5 * GIB, steps_a_second=0.02) == []


def test_another_model_begins_with_a_ramp_of_its_own() -> None:
    """What was seen of the former one is forgotten, a verdict included; and looks between two seconds add no points."""
    window = FastWindow()
    for tenth in range(MOST * 10):
        level = 32 * GIB + tenth * 0.05 * GIB
        window.see(MemoryPoint(tenth, tenth / 10, level), LIMIT - level, LIMIT)
    grown = window.growth
    assert grown is not None
    assert grown.per_second == pytest.approx(0.5 * GIB, rel=0.1)
    window.begin()
    assert (window.growth, window.is_steep) == (None, False)
    assert not window.see(MemoryPoint(10_000, 1000.0, LIMIT - 1), 1.0, LIMIT)


def begins(
    used: Callable[[int], float], seconds: int = 15, rate: float = 300.0, *, limit: float = 8 * GIB, caching: bool
) -> int:
    """Return after how many seconds a run with so many steps a second has its first verdict; -1: never."""
    window = FastWindow()
    for second in range(seconds):
        level = min(used(second), limit)
        window.see(MemoryPoint(int(second * rate), float(second), level), limit - level, limit, caching=caching)
        if window.growth is not None:
            return second
    return -1


def leak(rate: float, spread: float) -> Callable[[int], float]:
    """150 KiB a step."""
    jitter = noise(spread)
    return lambda second: GIB + second * rate * 150 * 1024 + jitter()


def test_a_leak_of_a_short_run_is_told_of_if_minutes_are_left() -> None:
    """150 KiB a step in a run of 15 s: said if the next five minutes would fill the machine, and not else."""
    for rate, limit in ((300.0, 8 * GIB), (1000.0, 32 * GIB), (300.0, 2.5 * GIB)):
        assert YOUNG - 1 <= begins(leak(rate, 2 * MIB), rate=rate, limit=limit, caching=False) < 15
        assert begins(leak(rate, 2 * MIB), rate=rate, limit=GIB + 400 * rate * 150 * 1024, caching=False) == -1
        assert begins(leak(rate, 2 * MIB), rate=rate, limit=limit, caching=True) == -1, "a data set may be cached"
        assert begins(leak(2.0, 2 * MIB), rate=2.0, limit=limit, caching=False) == -1, "a few steps are no trend"


YOUNG_RUNS: Courses = {
    "arenas that fill ever more slowly": lambda second: 5 * GIB - 3 * GIB * math.exp(-second / 20),
    "a logarithm": lambda second: 2 * GIB + GIB * math.log1p(second),
    "a root": lambda second: 2 * GIB + GIB / 2 * math.sqrt(second),
    "a leap": lambda second: 2 * GIB + 3 * GIB * (second > 8),
    "a saw's teeth": lambda second: 2 * GIB + (second % 10) * 0.1 * GIB,
    "a ramp of some seconds": lambda second: 2 * GIB + min(second, 8) * 0.3 * GIB,
}


def test_what_a_young_run_does_is_no_leak() -> None:
    """Near the limit, at a hundred steps a second."""
    assert {begins(used, 23, 100.0, caching=False) for used in YOUNG_RUNS.values()} == {-1}
