"""Spikes: what is one, and what the baseline learns from it."""

import random
from collections.abc import Callable
from math import exp, inf, isfinite, nan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobs.detect.spikes import START, WARM_UP, judge, leaves_start, skewed_reach

Baseline = tuple[float, float, int]
FRESH: Baseline = (0.0, 0.0, 0)


def feed(
    values: list[float], baseline: Baseline = FRESH, least_excess: float = 0.25, *, skewed: bool = False
) -> tuple[list[bool], Baseline]:
    """Judge the values in turn."""
    verdicts = []
    for value in values:
        is_spike, *rest = judge(value, *baseline, least_excess, skewed=skewed)
        mean, variance, seen = rest
        baseline = (float(mean), float(variance), int(seen))
        verdicts.append(is_spike)
    return verdicts, baseline


def noise(count: int, mean: float, deviation: float) -> list[float]:
    """Normal values, the same in every run."""
    chance = random.Random(count)
    return [chance.gauss(mean, deviation) for _ in range(count)]


def test_nothing_is_a_spike_before_twenty_values_were_seen() -> None:
    """A first loss of a thousand is no news: there is no past to compare it with."""
    verdicts, _ = feed([2.0] * (WARM_UP - 1) + [1e9])
    assert verdicts == [False] * WARM_UP


def test_a_value_far_above_its_past_is_a_spike_and_the_next_ordinary_one_is_not() -> None:
    """One outlier, one verdict."""
    verdicts, _ = feed([*noise(100, 2.0, 0.1), 20.0, 2.0])
    assert verdicts[-2:] == [True, False]
    assert not any(verdicts[:-2])


def test_a_spike_does_not_hide_the_next_one() -> None:
    """The baseline moves only as far as the limit lets it: a second outlier of the same height is found, too."""
    verdicts, _ = feed([*noise(100, 2.0, 0.1), 50.0, 2.0, 2.0, 50.0])
    assert verdicts[-4:] == [True, False, False, True]


def test_a_lasting_new_level_becomes_the_usual_one() -> None:
    """A loss that stays at five times its old level is reported for some tens of steps, not for the rest of the run."""
    verdicts, (mean, _, _) = feed([*noise(100, 2.0, 0.1), *noise(300, 10.0, 0.1)])
    assert verdicts[100]
    assert not any(verdicts[200:])
    assert mean == pytest.approx(10.0, abs=0.1)


def test_a_value_far_below_its_past_is_no_spike() -> None:
    """A loss that falls is good news."""
    verdicts, _ = feed([*noise(100, 2.0, 0.1), -50.0])
    assert not any(verdicts)


def test_what_is_certain_but_small_does_not_matter() -> None:
    """A constant loss has no variance: a rise by less than the least excess is not a spike, however many deviations it is."""
    assert feed([2.0] * 100 + [2.2])[0][-1] is False
    assert feed([2.0] * 100 + [2.3])[0][-1] is True


def test_ordinary_noise_is_hardly_ever_a_spike() -> None:
    """Six standard deviations: ten thousand normal values give no verdict."""
    verdicts, (mean, variance, _) = feed(noise(10_000, 5.0, 2.0), least_excess=0.0)
    assert not any(verdicts)
    assert mean == pytest.approx(5.0, abs=1.5)
    assert variance == pytest.approx(4.0, rel=0.7)


def test_the_mean_of_the_first_values_is_the_plain_mean() -> None:
    """Finch's weights with 1/n are the arithmetic mean and the population's variance."""
    values = noise(15, 3.0, 1.0)
    _, (mean, variance, seen) = feed(values)
    assert mean == pytest.approx(sum(values) / 15)
    assert variance == pytest.approx(sum((value - mean) ** 2 for value in values) / 15)
    assert seen == 15


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
def test_no_finite_values_spoil_the_baseline(values: list[float]) -> None:
    """However large: an infinite variance would find no spike ever again, so the baseline begins anew."""
    _, (mean, variance, seen) = feed(values)
    assert isfinite(mean)
    assert isfinite(variance)
    assert variance >= 0.0
    assert 1 <= seen <= len(values)


def test_after_an_overflow_spikes_are_found_again() -> None:
    """Two values whose squares are infinite, then an ordinary run with one outlier."""
    _, baseline = feed([1e200, -1e200])
    verdicts, _ = feed([*noise(100, 2.0, 0.1), 20.0], baseline)
    assert verdicts[-1]


def test_the_verdict_of_a_non_finite_value_is_the_caller_s() -> None:
    """The fold counts NaN and infinities before it asks; the formula itself calls NaN no spike."""
    _, baseline = feed(noise(100, 2.0, 0.1))
    assert not judge(nan, *baseline, 0.25)[0]
    assert judge(inf, *baseline, 0.25)[0]


def tail(count: int, deviation: float) -> list[float]:
    """Log-normal values around 0.1, the same in every run: a loss near its floor, where a few samples make all of it."""
    chance = random.Random(count)
    return [0.1 * exp(chance.gauss(0.0, deviation)) for _ in range(count)]


def test_the_long_tail_of_a_loss_near_its_floor_is_no_spike() -> None:
    """A classifier that has learned its task has a batch of tenfold loss now and then, for as long as it trains."""
    values = tail(5000, 1.0)
    assert sum(feed(values)[0]) > 5, "the normal limit alone would call them spikes"
    assert not any(feed(values, skewed=True)[0])


def test_a_loss_that_blows_up_from_its_floor_is_a_spike() -> None:
    """However long the tail: what has left it is found, and is found again."""
    verdicts, _ = feed([*tail(500, 1.0), *[1000.0] * 5], skewed=True)
    assert verdicts[-5:] == [True] * 5


def test_a_narrow_loss_is_judged_as_if_it_were_normal() -> None:
    """A language model's loss deviates by a few percent: there both limits are one, and a half more of it is a spike."""
    assert skewed_reach(2.5, 0.05**2) == pytest.approx(6 * 0.05, rel=0.1)
    assert feed([*noise(100, 2.5, 0.05), 3.75], skewed=True)[0][-1]


def test_a_constant_has_the_normal_limit_alone() -> None:
    """Nothing spreads, so that there is no tail."""
    assert skewed_reach(2.0, 0.0) == skewed_reach(0.0, 0.0) == 0.0


def test_a_loss_of_both_signs_has_the_tail_of_its_magnitude() -> None:
    """A narrow one (a density's likelihood) is judged as if it were normal; one around zero reaches 104 deviations."""
    assert skewed_reach(-3.0, 0.1**2) == skewed_reach(3.0, 0.1**2) == pytest.approx(0.6, rel=0.15)
    assert skewed_reach(0.0, 1.0) == skewed_reach(-0.5, 1.0) == skewed_reach(1.0, 1.0) == pytest.approx(103.5, abs=1.0)
    assert feed([*noise(100, -2.5, 0.05), -1.25], skewed=True)[0][-1]


def student(chance: random.Random, freedom: float) -> float:
    """Student's t: three degrees of freedom have a variance, but no fourth moment."""
    return chance.gauss(0.0, 1.0) / sqrt(chance.gammavariate(freedom / 2, 2 / freedom))


def policy_gradient(chance: random.Random) -> float:
    """Minus log-probabilities times advantages, of eight actions."""
    return sum(chance.expovariate(1.0) * student(chance, 3.0) for _ in range(8)) / 8


HEAVY: dict[str, Callable[[random.Random], float]] = {
    "a policy gradient": policy_gradient,
    "rewards over many orders": lambda chance: chance.choice((-1, 1)) * exp(chance.gauss(0.0, 1.5)),
    "Student's t": lambda chance: student(chance, 3.0),
    "Student's t, shifted": lambda chance: student(chance, 3.0) - 1.0,
    "Laplace": lambda chance: chance.choice((-1, 1)) * chance.expovariate(1.0),
    "normal": lambda chance: chance.gauss(0.0, 1.0),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_loss_that_is_heavy_tailed_by_nature_has_hardly_a_spike(name: str) -> None:
    """Ten runs of 2,000 steps each, 120,000 values in all; the normal limit alone finds dozens in most."""
    chance = random.Random(11)
    runs = [[HEAVY[name](chance) for _ in range(2000)] for _ in range(10)]
    assert sum(sum(feed(run, skewed=True)[0]) for run in runs) <= 1
    if name not in {"Laplace", "normal"}:
        assert sum(sum(feed(run)[0]) for run in runs) > 20


def test_a_policy_gradient_that_blows_up_is_found() -> None:
    """However heavy its tails: ten thousand times what is usual."""
    chance = random.Random(3)
    verdicts, _ = feed([*(policy_gradient(chance) for _ in range(300)), 10_000.0], skewed=True)
    assert verdicts[-1]
    assert not any(verdicts[:-1])


@given(st.floats(1e-308, 1e308), st.floats(0.0, 1e308))
def test_the_reach_of_a_tail_is_a_number_whatever_the_baseline(mean: float, variance: float) -> None:
    """A fold raises at no loss: neither where the variation overflows nor where there is nearly none."""
    assert skewed_reach(mean, variance) >= 0.0


def early(values: list[float]) -> list[bool]:
    """Which of a run's first values are orders of magnitude above how it began, as the fold asks."""
    start, verdicts = 0.0, []
    for seen, value in enumerate(values):
        verdicts.append(leaves_start(value, start, seen))
        if seen < START and not verdicts[-1]:
            start = max(start, abs(value))
    return verdicts


@pytest.mark.parametrize(
    "values",
    [
        [2.18, 61.2, 8.2e29],
        [2.3, 1e8],
        [2.3 * 3.1**n for n in range(20)],
        [0.0, 0.0, 1e5],
        [1.0] * 19 + [1e10],
        [-3.0, -2.0, 1e5],
    ],
    ids=["two steps", "one", "by and by", "from nothing", "the last", "from below zero"],
)
def test_a_run_that_diverges_from_its_first_steps_is_found(values: list[float]) -> None:
    """Warm-up is no reason to be silent about orders of magnitude, be it one leap or a threefold growth in each step."""
    assert any(early(values))


@pytest.mark.parametrize(
    "values",
    [
        [1e6 * 0.5**n for n in range(20)],
        [1e6, 3.0, 900.0, 2.0, 2500.0, 1.0],
        [1e-7, 1e-5, 1e-3, 0.1, 1.0, 10.0, 100.0],
        [0.01 * (-1) ** n for n in range(20)],
        [11.0, 10.5, 9.8, 14.0, 8.0, 30.0, 7.5],
        [0.0] * 10 + [500.0] * 10,
        [0.5, 3.0, 900.0, 1.0, 1500.0, 12.0],
    ],
    ids=["falling", "falling and tailed", "a head of zeros", "around zero", "a language model", "a reward at last", "critic"],
)
def test_a_healthy_start_is_none(values: list[float]) -> None:
    """Losses fall from large values, grow from nothing, cross zero, and differ a thousandfold in reinforcement learning."""
    assert not any(early(values))


@pytest.mark.parametrize(("spread", "most"), [(1.0, 0), (1.5, 1), (2.0, 12)])
def test_heavy_tails_leave_their_start_as_seldom_as_computed(spread: float, most: int) -> None:
    """Of 1,000 runs whose values are log-normal around 10: the probabilities that stand beside the threshold."""
    chance = random.Random(7)
    runs = ([10.0 * exp(chance.gauss(0.0, spread)) for _ in range(WARM_UP)] for _ in range(1000))
    assert sum(any(early(values)) for values in runs) <= most


def test_after_warm_up_the_baseline_judges() -> None:
    """The start is a measure of the first steps only."""
    assert not leaves_start(1e30, 1.0, WARM_UP)
    assert not leaves_start(1e30, 0.0, 0)
