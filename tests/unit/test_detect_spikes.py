"""Spikes, explosions and divergence, the layer that blew up, and recovery."""

from __future__ import annotations

import math
import random
from math import exp, inf, isfinite, log, nan, sqrt
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobs.detect.spikes import (
    CALM,
    HEALTHY,
    LEAST_EXPLOSIONS,
    LEAST_LOSS_SPIKES,
    START,
    WARM_UP,
    BlownLayer,
    Bursts,
    Divergence,
    LastAnomaly,
    LossBaseline,
    blown_layer,
    healthy_steps,
    judge,
    leaves_start,
    skewed_reach,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


def tail(count: int, deviation: float) -> list[float]:
    """Log-normal values around 0.1, the same in every run: a loss near its floor, where a few samples make all of it."""
    chance = random.Random(count)
    return [0.1 * exp(chance.gauss(0.0, deviation)) for _ in range(count)]


def student(chance: random.Random, freedom: float) -> float:
    """Student's t: three degrees of freedom have a variance, but no fourth moment."""
    return chance.gauss(0.0, 1.0) / sqrt(chance.gammavariate(freedom / 2, 2 / freedom))


def policy_gradient(chance: random.Random) -> float:
    """Minus log-probabilities times advantages, of eight actions."""
    return sum(chance.expovariate(1.0) * student(chance, 3.0) for _ in range(8)) / 8


USUAL, CHANCE = noise(100, 2.0, 0.1), random.Random(3)


@pytest.mark.parametrize(
    ("before", "last", "skewed"),
    [
        ([2.0] * (WARM_UP - 1), {1e9: False}, False),  # no past
        (USUAL, {20.0: True, 2.0: False}, False),
        (USUAL, {50.0: True, 2.0: False, 49.9: True}, False),
        (USUAL, {-50.0: False}, False),  # good news
        ([2.0] * 100, {2.2: False}, False),  # certain, and small
        ([2.0] * 100, {2.3: True}, False),
        ([1e200, -1e200, *USUAL], {20.0: True}, False),  # after squares that overflow
        (tail(500, 1.0), {1000.0: True, 1000.1: True, 1000.2: True, 1000.3: True, 1000.4: True}, True),
        ([policy_gradient(CHANCE) for _ in range(300)], {10_000.0: True}, True),
    ],
)
def test_what_is_a_spike_of_the_last_values(before: list[float], last: dict[float, bool], skewed: bool) -> None:  # noqa: FBT001  # parametrized
    """Promise: six deviations above twenty values or more, and an excess that matters; a spike does not hide the next one."""
    verdicts, _ = feed([*before, *last], skewed=skewed)
    assert verdicts[len(before) :] == [*last.values()]
    assert not any(verdicts[: len(before)])


def test_a_lasting_new_level_becomes_the_usual_one() -> None:
    """A loss that stays at five times its old level is reported for some tens of steps, not for the rest of the run."""
    verdicts, (mean, _, _) = feed([*noise(100, 2.0, 0.1), *noise(300, 10.0, 0.1)])
    assert verdicts[100]
    assert not any(verdicts[200:])
    assert mean == pytest.approx(10.0, abs=0.1)


def test_ordinary_noise_is_hardly_ever_a_spike() -> None:
    """Six standard deviations: ten thousand normal values give no verdict."""
    verdicts, (mean, variance, _) = feed(noise(10_000, 5.0, 2.0), least_excess=0.0)
    assert not any(verdicts)
    assert mean == pytest.approx(5.0, abs=1.5)
    assert variance == pytest.approx(4.0, rel=0.7)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
def test_no_finite_values_spoil_the_baseline(values: list[float]) -> None:
    """However large: an infinite variance would find no spike ever again, so the baseline begins anew."""
    _, (mean, variance, seen) = feed(values)
    assert isfinite(mean)
    assert isfinite(variance)
    assert variance >= 0.0
    assert 1 <= seen <= len(values)


def test_the_long_tail_of_a_loss_near_its_floor_is_no_spike() -> None:
    """A classifier that has learned its task has a batch of tenfold loss now and then, for as long as it trains."""
    values = tail(5000, 1.0)
    assert sum(feed(values)[0]) > 5, "the normal limit alone would call them spikes"
    assert not any(feed(values, skewed=True)[0])


def test_a_loss_of_both_signs_has_the_tail_of_its_magnitude() -> None:
    """A narrow one (a density's likelihood) is judged as if it were normal; one around zero reaches 104 deviations."""
    assert skewed_reach(-3.0, 0.1**2) == skewed_reach(3.0, 0.1**2) == pytest.approx(0.6, rel=0.15)
    assert skewed_reach(0.0, 1.0) == skewed_reach(-0.5, 1.0) == skewed_reach(1.0, 1.0) == pytest.approx(103.5, abs=1.0)
    assert feed([*noise(100, -2.5, 0.05), -1.25], skewed=True)[0][-1]


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


BEFORE = [{"a": 1.0, "b": 0.1, "c": 3.0, "big": 10.0}] * 4


def test_the_layer_that_has_grown_most_is_named_and_not_the_largest() -> None:
    """All have grown behind it; one that grew by more in a hair's breadth of the whole is no cause."""
    found = blown_layer({"a": 90.0, "b": 80.0, "c": 60.0, "big": 100.0}, BEFORE)
    assert found == BlownLayer("b", 80.0, 0.1)
    assert blown_layer({"a": 90.0, "b": 12.0, "c": 3.0, "big": 100.0}, BEFORE) == BlownLayer("a", 90.0, 1.0)


def test_of_layers_that_have_grown_together_the_last_is_named() -> None:
    """From where a gradient blows up it is carried back to all layers before, of which one has grown most by chance."""
    before = [{"stem": 1.0, "first": 2.0, "second": 0.1, "third": 1.0, "head": 5.0}] * 4
    found = blown_layer({"stem": 1300.0, "first": 1700.0, "second": 400.0, "third": 1.5, "head": 9.0}, before)
    assert found == BlownLayer("second", 400.0, 0.1)


def test_nothing_is_named_without_growth_or_a_past() -> None:
    """A loss that leaps with the gradients of always, a first step, a layer that is new, values that are not finite."""
    assert blown_layer(BEFORE[0], BEFORE) is None
    assert blown_layer({"a": 90.0}, BEFORE[:2]) is None
    assert blown_layer({"new": 90.0, "a": 1.0}, BEFORE) is None
    assert blown_layer({"a": inf, "b": nan}, BEFORE) is None
    assert blown_layer({}, []) is None


def test_the_culprit_is_found_among_noise() -> None:
    """Of 48 layers whose norms vary by half, one that is 30 times its own: in each of 500 trials."""
    chance = random.Random(2)
    for _ in range(500):
        sizes = {f"layer{number}": chance.lognormvariate(0.0, 1.0) for number in range(48)}
        before = [{name: size * chance.lognormvariate(0.0, 0.2) for name, size in sizes.items()} for _ in range(8)]
        culprit = chance.choice(list(sizes))
        norms = {name: size * (30.0 if name == culprit else chance.lognormvariate(0.0, 0.2)) for name, size in sizes.items()}
        found = blown_layer(norms, before)
        if sizes[culprit] > 0.1:  # else the rest's noise is as much
            assert found is not None
            assert found.layer == culprit


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


HEALTHY_LOSSES = {
    "falls": [10.0 * 0.99**number for number in range(2000)],
    "begins_near_zero": [0.0, 1e-6, *[10.8] * 2000],
    "both_signs": [(-1) ** number * 10.0 ** (number % 3) for number in range(2000)],
    "ramped_up": [50.0 * min(number, 5000) for number in range(1, 9000)],
    "bursts": [1.0 if number % 40 else 1e5 for number in range(2000)],
    "critic": [400.0 * Random(number).lognormvariate(1.0, 1.0) for number in range(3000)],
}


@pytest.mark.parametrize("name", HEALTHY_LOSSES)
def test_healthy_courses_are_not_told(name: str) -> None:
    """What a training does that goes well, of whatever kind."""
    assert first_told(HEALTHY_LOSSES[name]) is None


NAN = math.nan
LOSSES = dict.fromkeys(range(1, 201), 1.0)
NORMS = dict.fromkeys(range(1, 201, 10), 2.0)


@pytest.mark.parametrize("kind", ["nonfinite_loss", "nonfinite_gradient", "loss_spike", "gradient_explosion", "diverged"])
def test_fifty_steps_must_have_passed(kind: str) -> None:
    """Since the last anomaly; then their number is what is said."""
    for step, healthy in ((100, 100), (200 - HEALTHY, HEALTHY), (201 - HEALTHY, 0)):
        assert healthy_steps(kind, 1, LastAnomaly(step, 1.0, 1), LOSSES, NORMS) == healthy


@pytest.mark.parametrize("kind", ["nonfinite_loss", "nonfinite_gradient", "loss_spike"])
def test_what_was_not_reported_may_have_come_later(kind: str) -> None:
    """Anomalies that follow each other closely are counted alone: then the values of the last fifty steps decide."""
    last = LastAnomaly(100, 1.0, 32)
    assert healthy_steps(kind, 40, last, LOSSES, NORMS) == HEALTHY
    assert healthy_steps(kind, 40, last, dict.fromkeys(range(170, 201), 1.0), {191: 2.0}) == 0
    assert healthy_steps("loss_spike", 40, last, {**LOSSES, 170: 5.0}, NORMS) == 0
    assert healthy_steps("loss_spike", 32, last, {**LOSSES, 170: 5.0}, NORMS) == 100  # an ordinary value: none was counted


@pytest.mark.parametrize(
    ("kind", "losses", "norms"),
    [
        ("nonfinite_loss", {}, {}),
        ("nonfinite_loss", {**LOSSES, 160: NAN}, NORMS),
        ("nonfinite_gradient", {**LOSSES, 160: NAN}, NORMS),
        ("nonfinite_gradient", LOSSES, {**NORMS, 161: math.inf}),
        ("nonfinite_gradient", LOSSES, {91: 2.0}),
        ("loss_spike", dict.fromkeys(range(1, 201), 1.3), NORMS),
        ("gradient_explosion", LOSSES, dict.fromkeys(range(1, 201, 10), 20.0)),
        ("gradient_vanishing", LOSSES, dict.fromkeys(range(1, 201, 10), 0.005)),
    ],
)
def test_what_is_not_proven_is_not_past(kind: str, losses: dict[int, float], norms: dict[int, float]) -> None:
    """No values since, one that is not finite, or a level that stays far from the usual one."""
    assert healthy_steps(kind, 1, LastAnomaly(100, 1.0, 1), losses, norms) == 0


def test_what_was_usual_must_be_known() -> None:
    """Where the event is gone nobody knows what the loss has to come back to; that it is finite is seen."""
    for kind, healthy in (("loss_spike", 0), ("gradient_explosion", 0), ("nonfinite_loss", HEALTHY)):
        assert healthy_steps(kind, 1, None, LOSSES, NORMS) == healthy
