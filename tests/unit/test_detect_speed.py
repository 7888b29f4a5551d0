"""Slow steps, slowdowns, stragglers, starvation, and the steps that are sampled."""

from __future__ import annotations

import itertools
import random
from math import exp, inf
from typing import TYPE_CHECKING

import pytest

from torchobs.catalog import LATE_PHASES, PHASES
from torchobs.detect import speed
from torchobs.detect.speed import BEGINS, ENDS, LEAST_STEPS, WINDOW_S, DataCounters, Spent, Starvation, compare, slowed_from

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_from_where_a_step_is_slow_and_when_steps_have_become_so() -> None:
    """Three times the median, which a few do not move; steps have become slow when they are so for ten seconds."""
    assert speed.slow_from([0.1] * 60 + [50.0] * 4) == pytest.approx(0.3)
    assert speed.slow_from([0.001] * 64) == pytest.approx(0.006)
    assert speed.slow_from([0.1] * (speed.LEAST_SEEN - 1)) == inf
    assert [slowed_from([0.1] * count + [0.3] * 34) for count in (290, 310)] == [None, 310]
    assert slowed_from([0.1] * 3_000 + [0.3] * 500) is not None
    assert slowed_from([0.001] * 60_000 + [0.003] * 3_334) in range(59_990, 60_001)
    assert slowed_from([2.0] * 60 + [6.0] * 8) == 60
    assert slowed_from([2.0] * 60 + [6.0] * 3) is None


def test_what_is_no_slowdown() -> None:
    """Ten slow steps of 1 ms, a stopped machine, a neighbour that comes and goes, two loader workers, one of them late."""
    assert slowed_from([0.001] * 4_000 + [0.03] * 10) is None
    assert slowed_from([0.1] * 600 + [15.0] + [0.1] * 20) is None
    assert slowed_from([0.1] * 300 + [0.3] * 40 + [0.1] * 300 + [0.3] * 40) is None
    for seed in range(20):
        chance = random.Random(seed)
        steps = [chance.choice((0.002, 0.1)) * chance.uniform(0.8, 1.3) for _ in range(2_000)]
        assert slowed_from(steps) is None
        assert slowed_from([*steps, *([0.1] * 10)]) is None


def durations(step_s: float, seconds: float, seed: int, *, workers: bool = False, slow: float = 1.0) -> Iterator[float]:
    """Steps on a machine with neighbours: a load that waxes and wanes over seconds, and one step in a hundred is held up.

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


@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_no_healthy_run_has_become_slow_wherever_it_ends(number: int) -> None:
    """Each run is judged as if it had ended after its hundredth, two hundredth, three hundredth … step."""
    for seed, workers in itertools.product(range(3), (False, True)):
        steps = list(durations(*LENGTHS[number], seed, workers=workers))
        assert [end for end in range(100, len(steps), 100) if slowed_from(steps[:end]) is not None] == []


def test_a_run_that_slows_down_at_its_end_is_found_on_a_busy_machine() -> None:
    """With steps five times as long. A run of twenty seconds has not the thirty to compare with."""
    for (step_s, seconds), seed in itertools.product(LENGTHS[3:], range(3)):
        steps = list(durations(step_s, seconds, seed, slow=5.0))
        begin = slowed_from(steps)
        assert begin is not None
        assert sum(steps[:begin]) > 0.6 * seconds


FAST = (0.01, 0.15, 0.69, 0.10, 0.05, 0.0)
"""data, forward, backward with 0.39 s of waiting in it, optimizer, other, between: one second"""
LATE = (0.40, 0.15, 0.30, 0.10, 0.05, 0.0)


def fleet(count: int, **others: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    """As many ranks, all alike but some."""
    return {str(rank): FAST for rank in range(count)} | {name.removeprefix("r"): times for name, times in others.items()}


def test_who_is_late_in_data_is_found_though_all_steps_take_the_same() -> None:
    """The others' own work is 0.61 s, its own is the whole second; nobody else is slow."""
    slowness = compare(fleet(8, r3=LATE))
    assert slowness["3"].phase == 0
    assert slowness["3"].factor == pytest.approx(1 / 0.61)
    assert all(slowness[str(rank)].factor == pytest.approx(1.0) for rank in range(8) if rank != 3)


def test_the_slow_rank_is_named_or_nobody() -> None:
    """In the phase in which it is late, wherever but in data the others wait, unless these may be at work; never another."""
    for ranks, waiting, late in itertools.product((2, 3, 4, 8), range(1, 5), range(5)):
        slow, waits = list(FAST), list(FAST)
        slow[late] += 0.3
        waits[waiting] += 0.3
        others = {f"r{rank}": tuple(waits) for rank in range(ranks - 1)}
        slowness = compare(fleet(ranks, **others, **{f"r{ranks - 1}": tuple(slow)}))
        assert {compared.factor for rank, compared in slowness.items() if rank != str(ranks - 1)} == {1.0}
        told_apart = ranks > 2 and PHASES[late] in LATE_PHASES and PHASES[waiting] not in LATE_PHASES
        last = slowness[str(ranks - 1)]
        if PHASES[late] == "data" or told_apart:
            assert PHASES[last.phase] == PHASES[late], (ranks, waiting)
            assert last.factor == pytest.approx(1.3)
            assert sum(last.excess_s) == pytest.approx(0.3)
        else:
            assert last.factor == 1.0, (ranks, waiting, late)


def test_forward_and_between_are_one_and_half_of_the_ranks_are_slow_in_data_alone() -> None:
    """One rank has no forward stamps yet, or has them already; in other phases than data one half may wait for the other."""
    both = (0.0, 0.0, 0.3, 0.1, 0.05, 0.6), (0.0, 0.4, 0.3, 0.1, 0.25, 0.0)
    for ranks, (first, others) in itertools.product((2, 3, 8), (both, both[::-1])):
        slowness = compare({str(rank): others if rank else first for rank in range(ranks)})
        assert [rank.factor for rank in slowness.values()] == pytest.approx([1.0] * ranks)
    for phase, slow in itertools.product((0, 4), (1, 4)):
        late = list(FAST)
        late[phase] += 0.3
        late[2] -= 0.3
        slowness = compare(fleet(2 * slow, **{f"r{rank}": tuple(late) for rank in range(slow)}))
        assert [slowness[str(rank)].factor > 1.2 for rank in range(2 * slow)] == [phase == 0] * slow + [False] * slow


def test_who_waits_for_nobody_or_for_a_peer_s_evaluation_is_not_slow() -> None:
    """Twice as long in everything, while its peers go on; wherever others wait: an evaluation or a save is in no phase."""
    comparisons = [compare(fleet(4, r1=tuple(2 * value for value in FAST)))]
    for ranks, waiting in itertools.product((2, 3, 8), range(5)):
        waits = [value + 20.0 * (phase == waiting) for phase, value in enumerate(FAST)]
        comparisons.append(compare({str(rank): tuple(waits) for rank in range(1, ranks)} | {"0": FAST}))
    assert {slowness.factor for compared in comparisons for slowness in compared.values()} == {1.0}


def test_a_fraction_of_a_second_makes_no_rank_slow() -> None:
    """Less than a second of waiting for data in 150 steps; and the same mean over ten more of them."""
    usual, late = (0.002, 0.0, 0.0125, 0.001, 0.0, 0.0), (0.0085, 0.0, 0.006, 0.001, 0.0, 0.0)
    for steps, is_slow in ((150, False), (160, True)):
        assert speed.slowness({"0": Spent(steps, late), "1": Spent(steps, usual)})["0"].is_slow is is_slow


def verdicts(*shares: float, steps: int = 100) -> list[bool]:
    """The verdict after each window; training waited for that share of it."""
    judge, now_s, data_s = Starvation(), 0.0, 0.0
    changes = []
    judge.judge(DataCounters(0.0, 0, 0.0, 0.0))
    for number, share in enumerate(shares, 1):
        now_s, data_s = now_s + WINDOW_S, data_s + share * WINDOW_S
        if judge.judge(DataCounters(now_s, number * steps, data_s, now_s)):
            changes.append(judge.starved)
    return changes


def test_a_fifth_of_waiting_is_starvation_until_it_is_half_of_that() -> None:
    """A tenth is none; what varies around the limit is one finding; it takes ten steps and a minute of training."""
    assert verdicts(0.0, 0.01, 0.1, BEGINS - 0.01) == [False] * 4
    assert verdicts(BEGINS + 0.01, BEGINS - 0.05, BEGINS + 0.05, ENDS + 0.01, ENDS - 0.01, 0.15) == [True] * 4 + [False] * 2
    assert verdicts(0.9, steps=LEAST_STEPS - 1) == []
    assert verdicts(0.9, 0.9, steps=LEAST_STEPS // 2 + 1) == [True]
    judge, hangs = Starvation(), Starvation()
    for starvation in (judge, hangs):
        starvation.judge(DataCounters(0.0, 0, 0.0, 0.0))
    assert not judge.judge(DataCounters(WINDOW_S / 2, 1000, 30.0, 30.0))
    assert judge.judge(DataCounters(WINDOW_S, 2000, 31.0, 60.0))
    assert (judge.starved, judge.share) == (True, 31 / 60)
    assert not hangs.judge(DataCounters(WINDOW_S, 149, 0.1, 0.3))
    assert not hangs.starved
    phases_s = dict.fromkeys(PHASES, 0.0) | {"forward": 79.0, "between": 10.0}
    assert [speed.between_share({**phases_s, "other": other_s}) for other_s in (9.0, 11.0)] == [None, 0.21]


def test_ranks_that_measure_differently_take_the_same() -> None:
    """What the slower samples less often, the faster samples as well; the first powers of two come in any case."""
    mine, other = speed.alike_interval(0.0101, 10.0), speed.alike_interval(0.0097, 10.0)
    assert mine != other
    fewer, more = (set(speed.taken(range(100_000), interval)) for interval in sorted((mine, other), reverse=True))
    assert fewer < more
    assert {1, 2, 4, 8, 512} <= fewer
    assert len([number for number in fewer if number > max(mine, other)]) >= 47
