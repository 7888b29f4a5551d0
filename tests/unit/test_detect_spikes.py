"""Spikes, explosions and divergence, the layer that blew up, recovery; and a step of the loss, which is a new level."""

from __future__ import annotations

import itertools
import random
from math import exp, inf, isfinite, nan, sqrt
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobs.detect import spikes
from torchobs.detect.spikes import (
    CALM,
    HEALTHY,
    SETTLED,
    WARM_UP,
    BlownLayer,
    LastAnomaly,
    UsualValues,
    blown_layer,
    healthy_steps,
)
from torchobs.flight.fold import fold
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.totals import SIZE, Anomaly, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def spikes_in(values: list[float], *, learns: bool = True) -> list[int]:
    """Return which losses are spikes for who cannot wait for the losses after them."""
    usual = UsualValues()
    return [place for place, value in enumerate(values) if usual.judge(value, learns=learns)]


def student(chance: random.Random, freedom: float) -> float:
    """Student's t: three degrees of freedom have a variance, but no fourth moment."""
    return chance.gauss(0.0, 1.0) / sqrt(chance.gammavariate(freedom / 2, 2 / freedom))


def policy_gradient(chance: random.Random) -> float:
    """Minus log-probabilities times advantages, of eight actions."""
    return sum(chance.expovariate(1.0) * student(chance, 3.0) for _ in range(8)) / 8


CHANCE = random.Random(3)
USUAL = [CHANCE.gauss(2.0, 0.1) for _ in range(100)]
TAIL = [0.1 * exp(CHANCE.gauss(0.0, 1.0)) for _ in range(500)]
"""A loss near its floor, where a few samples make all of it"""


def test_what_is_a_spike_of_the_last_values() -> None:
    """Promise: six deviations above twenty values or more, and an excess that matters; a spike does not hide the next one."""
    cases: list[tuple[list[float], dict[float, bool]]] = [
        ([2.0] * (WARM_UP - 1), {1e9: False}),  # no past
        (USUAL, {50.0: True, 2.0: False, 49.9: True}),
        (USUAL, {-50.0: False}),  # good news
        ([2.0] * 100, {2.2: False}),  # certain, and small
        ([2.0] * 100, {2.6: True}),
        ([1e200, -1e200, *USUAL], {20.0: True}),  # after squares that overflow
        (TAIL, {1000.0: True, 1000.1: True, 1000.2: True, 1000.3: True, 1000.4: True}),
        ([policy_gradient(CHANCE) for _ in range(300)], {10_000.0: True}),
    ]
    for before, last in cases:
        assert spikes_in([*before, *last]) == [place for place, is_spike in enumerate(last.values(), len(before)) if is_spike]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
def test_no_finite_values_spoil_the_baseline(values: list[float]) -> None:
    """However large: an infinite variance would find no spike ever again, so the baseline begins anew."""
    usual = UsualValues()
    for value in values:
        usual.judge(value)
    assert isfinite(usual.mean)
    assert 0.0 <= usual.variance < inf


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
    assert sum(len(spikes_in([HEAVY[name](chance) for _ in range(2000)])) for _ in range(10)) <= 1


STARTS: dict[str, list[float]] = {
    "falling": [1e6 * 0.5**n for n in range(20)],
    "falling and tailed": [1e6, 3.0, 900.0, 2.0, 2500.0, 1.0],
    "a head of zeros": [1e-7, 1e-5, 1e-3, 0.1, 1.0, 10.0, 100.0],
    "around zero": [0.01 * (-1) ** n for n in range(20)],
    "a language model": [11.0, 10.5, 9.8, 14.0, 8.0, 30.0, 7.5],
    "a reward at last": [0.0] * 10 + [500.0] * 10,
    "critic": [0.5, 3.0, 900.0, 1.0, 1500.0, 12.0],
}


def test_a_healthy_start_is_none() -> None:
    """Losses fall from large values, grow from nothing, cross zero, and differ a thousandfold in reinforcement learning."""
    assert [name for name, values in STARTS.items() if anomalies(values)] == []


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
    """Some hundred bursts of a healthy run; fewer are spikes than make a finding."""
    values = episodic(seed)
    assert len(spikes_in(values)) < spikes.LEAST_LOSS_SPIKES
    assert len(spikes_in(values, learns=False)) < spikes.LEAST_LOSS_SPIKES  # as guard.Recovery, which undoes spikes
    assert len(anomalies([1.0] * len(values), values)) < spikes.LEAST_EXPLOSIONS


def test_single_bad_batches_far_apart_are_each_told_and_one_far_beyond_the_usual_bursts() -> None:
    """One in four hundred; or one a hundred times as large as those of each thirty steps."""
    chance = random.Random(1)
    values = [2.0 * chance.lognormvariate(0.0, 0.1) for _ in range(4000)]
    values[100::400] = [60.0] * 10
    assert spikes_in(values) == list(range(100, 4000, 400))
    values[100:1000:30] = [60.0] * 30
    values[700] = 6000.0
    assert spikes_in(values[:1000])[-1] == 700


USUAL_NORMS = [{"a": 1.0, "b": 0.1, "c": 3.0, "big": 10.0}] * 4


def test_the_layer_that_has_grown_most_is_named_and_not_the_largest() -> None:
    """Of those that have grown together the last, from where a gradient is carried back; none without growth or a past."""
    layer = blown_layer({"a": 90.0, "b": 80.0, "c": 60.0, "big": 100.0}, USUAL_NORMS)
    assert layer == BlownLayer("b", 80.0, 0.1)
    assert blown_layer({"a": 90.0, "b": 12.0, "c": 3.0, "big": 100.0}, USUAL_NORMS) == BlownLayer("a", 90.0, 1.0)
    before = [{"stem": 1.0, "first": 2.0, "second": 0.1, "third": 1.0, "head": 5.0}] * 4
    layer = blown_layer({"stem": 1300.0, "first": 1700.0, "second": 400.0, "third": 1.5, "head": 9.0}, before)
    assert layer == BlownLayer("second", 400.0, 0.1)
    for norms in (USUAL_NORMS[0], {"new": 90.0, "a": 1.0}, {"a": inf, "b": nan}):
        assert blown_layer(norms, USUAL_NORMS) is None
    assert blown_layer({"a": 90.0}, USUAL_NORMS[:2]) is blown_layer({}, []) is None


def first_told(losses: Iterable[float]) -> int | None:
    """The number of the loss that is reported."""
    divergence = spikes.Divergence()
    return next((number for number, loss in enumerate(losses, 1) if divergence.add(loss)), None)


def test_smooth_growth_is_told_in_time() -> None:
    """After 300 sound steps; before it is a hundred thousand times what it was, or what counts as a start."""
    for growth, start in itertools.product((1.002, 1.01, 1.05, 1.3), (0.01, 2.0, 500.0)):
        chance = Random(1)
        losses = [start * chance.uniform(0.9, 1.1) for _ in range(300)]
        while losses[-1] < 1e5 * max(start, 1.0):
            losses.append(start * growth ** (len(losses) - 300) * chance.uniform(0.9, 1.1))
        losses += losses[-1:] * 50
        number = first_told(losses)
        assert number is not None
        assert min(losses[number - 50 : number]) > 900 * max(start, 1.0)


HEALTHY_LOSSES = {
    "falls": [10.0 * 0.99**number for number in range(2000)],
    "begins_near_zero": [0.0, 1e-6, *[10.8] * 2000],
    "both_signs": [(-1) ** number * 10.0 ** (number % 3) for number in range(2000)],
    "ramped_up": [50.0 * min(number, 5000) for number in range(1, 9000)],
    "bursts": [1.0 if number % 40 else 1e5 for number in range(2000)],
    "critic": [400.0 * Random(number).lognormvariate(1.0, 1.0) for number in range(3000)],
}


def test_healthy_courses_are_not_told() -> None:
    """What a training does that goes well, of whatever kind."""
    assert {name: first_told(losses) for name, losses in HEALTHY_LOSSES.items()} == dict.fromkeys(HEALTHY_LOSSES)


LOSSES = dict.fromkeys(range(1, 201), 1.0)
NORMS = dict.fromkeys(range(1, 201, 10), 2.0)


def test_an_anomaly_is_past_after_fifty_healthy_steps() -> None:
    """Since the last anomaly; with values since, all finite, and at a level near the usual one."""
    for kind in ("nonfinite_loss", "nonfinite_gradient", "loss_spike", "gradient_explosion", "diverged"):
        for step, healthy in ((100, 100), (200 - HEALTHY, HEALTHY), (201 - HEALTHY, 0)):
            assert healthy_steps(kind, 1, LastAnomaly(step, 1.0, 1), LOSSES, NORMS) == healthy
    unproven: list[tuple[str, dict[int, float], dict[int, float]]] = [
        ("nonfinite_loss", {}, {}),
        ("nonfinite_loss", {**LOSSES, 160: nan}, NORMS),
        ("nonfinite_gradient", LOSSES, {**NORMS, 161: inf}),
        ("loss_spike", dict.fromkeys(LOSSES, 1.3), NORMS),
        ("gradient_explosion", LOSSES, dict.fromkeys(NORMS, 20.0)),
        ("gradient_vanishing", LOSSES, dict.fromkeys(NORMS, 0.005)),
    ]
    for kind, losses, norms in unproven:
        assert healthy_steps(kind, 1, LastAnomaly(100, 1.0, 1), losses, norms) == 0


BEFORE, AFTER = 150, 150
RATE = 1e-3


def record(seq: int, step: int, flags: int, loss: float, norm: float, rate: float = RATE) -> StepRecord:
    """One of a step, or of values that come late."""
    kind = RecordKind.STEP if flags & StepFlag.LOSS else RecordKind.LATE
    return StepRecord(seq, step, seq * 1_000_000, kind, flags, 1, 0.001, loss, norm, rate, (0.0,) * 9, 0, 0, 1.0)


def found_in(records: list[StepRecord], cut: int) -> list[Anomaly]:
    """What the fold says of records that come in batches of ``cut``."""
    totals, reported = Totals(bytearray(SIZE)), list[Anomaly]()
    for begin in range(0, len(records), cut):
        fold(totals, records[begin : begin + cut], reported)
    return reported


def anomalies(
    losses: Sequence[float], norms: Sequence[float] = (), rates: Sequence[float] = (), cut: int = 64
) -> list[Anomaly]:
    """What the fold says of a run."""
    flags = int(StepFlag.LOSS | StepFlag.LEARNING_RATE | (StepFlag.GRAD_NORM if norms else 0))
    rows = zip(losses, norms or itertools.repeat(0.0), rates or itertools.repeat(RATE), strict=False)
    return found_in([record(seq, seq, flags, *row) for seq, row in enumerate(rows, 1)], cut)


def around(level: float, noise: float, count: int, chance: random.Random) -> list[float]:
    """Values with noise in proportion to their level."""
    return [level * exp(noise * chance.gauss(0.0, 1.0)) for _ in range(count)]


def test_a_step_up_that_stays_or_is_ramped_is_no_spike() -> None:
    """1.2 to 10 times the loss, noise of 1 to 30 %: one of 288 may be one by chance; a ramp of fifty steps or more is none."""
    wrong = []
    for factor, noise, seed in itertools.product((1.2, 1.5, 2.0, 3.0, 5.0, 10.0), (0.01, 0.03, 0.1, 0.3), range(12)):
        chance = random.Random(f"{factor} {noise} {seed}")
        losses = around(2.0, noise, BEFORE, chance) + around(2.0 * factor, noise, AFTER, chance)
        wrong += [(factor, noise, seed)] if anomalies(losses) else []
    assert len(wrong) <= 1, wrong
    for steps, noise in itertools.product((50, 100, 300), (0.01, 0.1, 0.3)):
        chance = random.Random(f"{steps} {noise}")
        ramp = [2.0 * (1 + 4 * min(1.0, max(0, step - 100) / steps)) for step in range(200 + steps)]
        assert anomalies([loss * exp(noise * chance.gauss(0.0, 1.0)) for loss in ramp]) == []


@pytest.mark.parametrize("lasts", [1, 3, 5])
def test_what_returns_is_a_spike_from_its_first_step_on(lasts: int) -> None:
    """However the records were cut; it is known once the loss has come back."""
    chance = random.Random(lasts)
    losses = around(2.0, 0.1, BEFORE, chance) + around(20.0, 0.1, lasts, chance) + around(2.0, 0.1, AFTER, chance)
    for cut in (1, 7, 64):
        assert [anomaly.step for anomaly in anomalies(losses, cut=cut)] == list(range(BEFORE + 1, BEFORE + lasts + 1))
    assert anomalies(losses[: BEFORE + lasts]) == []


@pytest.mark.parametrize(("growth", "noise"), [(1.1, 0.01), (1.3, 0.01), (1.3, 0.1), (2.0, 0.1), (2.0, 0.3)])
def test_what_goes_on_growing_is_a_spike(growth: float, noise: float) -> None:
    """Before it is a thousand times as large, whatever the noise."""
    for seed in range(6):
        chance = random.Random(f"{growth} {seed}")
        losses = around(2.0, noise, BEFORE, chance)
        losses += [2.0 * growth**step * exp(noise * chance.gauss(0.0, 1.0)) for step in range(1, 60)]
        end_at = next(end for end in range(BEFORE, len(losses)) if anomalies(losses[:end], cut=1000))
        assert losses[end_at - 1] < 2000.0


def test_what_no_data_explains_is_a_spike_at_once() -> None:
    """A thousandfold loss; one that is not finite after one that was far above; a level after the learning rate has jumped."""
    usual = around(2.0, 0.1, BEFORE, random.Random(1))
    assert [anomaly.step for anomaly in anomalies([*usual, 5e3])] == [BEFORE + 1]
    assert [anomaly.kind for anomaly in anomalies([*usual, 30.0, nan])] == ["loss_spike", "nonfinite_loss"]
    level = around(10.0, 0.1, 20, random.Random(2))
    rates = [RATE] * BEFORE + [50 * RATE] * 20
    assert anomalies(usual + level) == []
    assert anomalies(usual + level, rates=rates)[0].step == BEFORE + 1


@pytest.mark.parametrize("tail", [2.5, 3.0, 4.0])
def test_single_batches_of_a_heavy_tail_are_no_explosion(tail: float) -> None:
    """Pareto: with 2.5 one batch in 1,800 has twenty times the norm; 10 runs of 500 steps, the loss is as usual."""
    chance = random.Random(f"{tail}")
    runs = [[chance.paretovariate(tail) for _ in range(500)] for _ in range(10)]
    assert sum(bool(anomalies([1.0] * 500, norms)) for norms in runs) <= 1


@pytest.mark.parametrize("lasts", [1, 2])
def test_one_batch_or_two_are_a_spike_at_four_times_the_distance_of_three(lasts: int) -> None:
    """Promise: 1.4 times the loss is one for three steps, where 1.25 times is the least; for one or two, 1.8 times is none."""
    chance = random.Random(lasts)

    def steps(factor: float, count: int) -> list[int]:
        losses = around(2.0, 0.01, BEFORE, chance) + around(2.0 * factor, 0.01, count, chance)
        return [anomaly.step for anomaly in anomalies(losses + around(2.0, 0.01, CALM, chance))]

    assert steps(1.8, lasts) == []
    assert steps(1.4, 3) == [BEFORE + 1, BEFORE + 2, BEFORE + 3]
    assert len(steps(2.3, lasts)) == lasts


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_of_twenty_times_the_norm_is_none_and_what_lasts_is(seed: int) -> None:
    """Three steps or more; or a level, unless the loss has one as well; and a single step of a hundred times at once."""
    chance = random.Random(seed)
    losses, norms = around(2.0, 0.1, 300, chance), around(1.0, 0.2, 300, chance)

    def with_(factor: float, count: int, harder: float = 1.0) -> list[Anomaly]:
        raised = [norm * factor if BEFORE <= step < BEFORE + count else norm for step, norm in enumerate(norms)]
        return anomalies([loss * harder if step >= BEFORE else loss for step, loss in enumerate(losses)], raised)

    assert with_(20.0, 1) == with_(20.0, 2) == []
    assert {anomaly.step for anomaly in with_(20.0, 4)} == set(range(BEFORE + 1, BEFORE + 5))
    assert len(with_(20.0, 150)) >= SETTLED
    assert with_(20.0, 150, harder=10.0) == []
    assert [anomaly.step for anomaly in with_(120.0, 1)] == [BEFORE + 1]


def test_the_norm_of_a_batch_with_a_loss_far_above_is_no_explosion() -> None:
    """Promise: one sample far from all others makes both; what it does to the weights would last for longer."""
    chance = random.Random(5)
    losses, norms = around(2.0, 0.1, 300, chance), around(1.0, 0.2, 300, chance)
    losses[BEFORE] *= 3.0
    norms[BEFORE] *= 300.0
    assert anomalies(losses, norms) == []
    assert [anomaly.kind for anomaly in anomalies(around(2.0, 0.1, 300, chance), norms)] == ["gradient_explosion"]


@pytest.mark.parametrize(
    "losses",
    [
        [1.0] * 5 + [0.0] * 30000 + [0.5, 0.6, 0.5],
        [1e306 * (1 + step % 2 / 9) for step in range(BEFORE)] + [1.7e308, 1.5e308] * SETTLED,
        [1e250 * (1 + step % 2 / 9) for step in range(BEFORE)] + [3e252, 2e252] * SETTLED,
    ],
    ids=["decayed", "near the largest", "squares"],
)
def test_no_finite_losses_are_beyond_the_fold(losses: list[float]) -> None:
    """Promise: a mean and a variance that have decayed to nearly 0, or values near the largest float, raise nothing."""
    for end in (len(losses), len(losses) - 3):
        assert {anomaly.kind for anomaly in anomalies(losses[:end], cut=1000)} <= {"loss_spike", "diverged"}


LOSS, NORM = StepFlag.LOSS, StepFlag.GRAD_NORM


@pytest.mark.parametrize("cut", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("rounds", "order"),
    [(1, (LOSS | NORM,)), (1, (LOSS, NORM)), (1, (NORM, LOSS)), (3, (NORM, LOSS)), (40, (LOSS, NORM))],
    ids=["one record", "loss first", "norm first", "three norms first", "forty losses first"],
)
@pytest.mark.parametrize("every", [1, 10])
def test_a_norm_is_explained_by_the_loss_whichever_arrives_first(
    cut: int, rounds: int, order: tuple[int, ...], every: int
) -> None:
    """Promise: also in records of their own; a loss that comes back, or was high before, explains no norm that stays high."""
    chance = random.Random(1)
    losses, norms = around(2.0, 0.05, 500, chance), around(1.0, 0.1, 500, chance)

    def kinds(lasts: int, since: int = 250) -> set[str]:
        records, last = list[StepRecord](), len(losses)
        for begin in range(1, last + 1, rounds):
            steps = range(begin, min(begin + rounds, last + 1))
            for flags, step in ((flags, step) for flags in order for step in steps):
                if step % every and flags & NORM:
                    flags &= ~NORM  # noqa: PLW2901
                loss = losses[step - 1] * (4.0 if 250 <= step < 250 + lasts else 1.0)
                norm = norms[step - 1] * (20.0 if step >= since else 1.0)
                records.append(record(len(records) + 1, step, flags, loss, norm))
        return {anomaly.kind for anomaly in found_in(records, cut)}

    assert kinds(lasts=250) == set()
    assert "gradient_explosion" in kinds(lasts=0)
    assert kinds(lasts=3) == {"loss_spike", "gradient_explosion"}
    assert kinds(lasts=250, since=380) == {"gradient_explosion"}
