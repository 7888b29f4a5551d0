"""A step of the loss is a new level, an excursion is a spike, and a single batch is neither."""

from __future__ import annotations

import random
from math import exp, nan

import pytest

from torchobs.detect.spikes import CALM, SETTLED
from torchobs.flight.format.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.metrics.fold import fold
from torchobs.flight.metrics.totals import SIZE, Anomaly, Totals

BEFORE, AFTER = 150, 150
NOISES = (0.01, 0.03, 0.1, 0.3)
RATE = 1e-3


def anomalies(
    losses: list[float], norms: list[float] | None = None, rates: list[float] | None = None, cut: int = 64
) -> list[Anomaly]:
    """What the fold says of a run, whose records come in batches of ``cut``."""
    flags = StepFlag.LOSS | StepFlag.LEARNING_RATE | (StepFlag.GRAD_NORM if norms else 0)
    records = [
        StepRecord(
            number + 1, number + 1, number * 1_000_000, RecordKind.STEP, int(flags), 1, 0.001, loss,
            norms[number] if norms else 0.0, rates[number] if rates else RATE, (0.0,) * 9, 0, 0, 1.0,
        )
        for number, loss in enumerate(losses)
    ]  # fmt: skip
    totals, found = Totals(bytearray(SIZE)), list[Anomaly]()
    for begin in range(0, len(records), cut):
        fold(totals, records[begin : begin + cut], found)
    return found


def around(level: float, noise: float, count: int, chance: random.Random) -> list[float]:
    """Values with noise in proportion to their level."""
    return [level * exp(noise * chance.gauss(0.0, 1.0)) for _ in range(count)]


def test_a_step_up_that_stays_is_no_spike() -> None:
    """1.2 to 10 times the loss, noise of 1 to 30 %: 288 runs, of which one may be called a spike by chance."""
    wrong = []
    for factor in (1.2, 1.5, 2.0, 3.0, 5.0, 10.0):
        for noise in NOISES:
            for seed in range(12):
                chance = random.Random(f"{factor} {noise} {seed}")
                losses = around(2.0, noise, BEFORE, chance) + around(2.0 * factor, noise, AFTER, chance)
                wrong += [(factor, noise, seed)] if anomalies(losses) else []
    assert len(wrong) <= 1, wrong


def test_a_curriculum_of_several_stages_is_quiet_as_is_a_loss_that_falls_from_each() -> None:
    """Four levels of which each is three to six times the last; tasks that are learned within some tens of steps."""
    chance = random.Random(1)
    assert anomalies([loss for level in (0.1, 0.6, 2.7, 18.0) for loss in around(level, 0.2, 125, chance)]) == []
    tasks = [0.1 + 2.2 * exp(-(step % 100) / 15) for step in range(500)]
    assert anomalies([loss * exp(0.1 * chance.gauss(0.0, 1.0)) for loss in tasks]) == []


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
        known = next(end for end in range(BEFORE, len(losses)) if anomalies(losses[:end], cut=1000))
        assert losses[known - 1] < 2000.0


def test_what_no_data_explains_is_a_spike_at_once() -> None:
    """A thousandfold loss; one that is not finite after one that was far above; a level after the learning rate has jumped."""
    usual = around(2.0, 0.1, BEFORE, random.Random(1))
    assert [anomaly.step for anomaly in anomalies([*usual, 5e3])] == [BEFORE + 1]
    assert [anomaly.kind for anomaly in anomalies([*usual, 30.0, nan])] == ["loss_spike", "nonfinite_loss"]
    level = around(10.0, 0.1, 20, random.Random(2))
    rates = [RATE] * BEFORE + [50 * RATE] * 20
    assert anomalies(usual + level) == []
    assert anomalies(usual + level, rates=rates)[0].step == BEFORE + 1


def test_a_term_whose_weight_is_ramped_up_is_no_spike() -> None:
    """Five times the loss within fifty steps or more; so fast a growth as that of an explosion is one."""
    for steps in (50, 100, 300):
        for noise in (0.01, 0.1, 0.3):
            chance = random.Random(f"{steps} {noise}")
            ramp = [2.0 * (1 + 4 * min(1.0, max(0, step - 100) / steps)) for step in range(200 + steps)]
            assert anomalies([loss * exp(noise * chance.gauss(0.0, 1.0)) for loss in ramp]) == []


@pytest.mark.parametrize("tail", [2.5, 3.0, 4.0])
def test_single_batches_of_a_heavy_tail_are_no_explosion(tail: float) -> None:
    """Pareto: with 2.5 one batch in 1,800 has twenty times the norm; 10 runs of 500 steps, the loss is as usual."""
    chance = random.Random(f"{tail}")
    runs = [[chance.paretovariate(tail) for _ in range(500)] for _ in range(10)]
    assert sum(bool(anomalies([1.0] * 500, norms)) for norms in runs) <= 1


def test_a_batch_with_one_sample_far_from_all_others_is_no_spike() -> None:
    """Means of 16 samples with Pareto's tail (4), 500 steps: 2 runs of 20 have a spike, and 5 where each such batch is one."""
    chance = random.Random(4)
    runs = [[sum(chance.paretovariate(4.0) for _ in range(16)) / 16 for _ in range(500)] for _ in range(20)]
    assert sum(bool(anomalies(losses)) for losses in runs) <= 2


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
        [1.0] + [0.0] * 24000 + [0.5] * 5,
        [1.0] * 5 + [0.0] * 30000 + [0.5, 0.6, 0.5],
        [1e306 * (1 + step % 2 / 9) for step in range(BEFORE)] + [1.7e308, 1.5e308] * SETTLED,
        [1e250 * (1 + step % 2 / 9) for step in range(BEFORE)] + [3e252, 2e252] * SETTLED,
    ],
    ids=["decayed", "decayed from five", "near the largest", "squares"],
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
    """Promise: a device may deliver both in records of their own, some steps at once, and not each step's norm is measured.

    A loss that comes back, or that was high before, explains no norm that stays high.
    """
    chance = random.Random(1)
    losses, norms = around(2.0, 0.05, 900, chance), around(1.0, 0.1, 900, chance)

    def kinds(lasts: int, since: int = 300) -> set[str]:
        records, last = list[StepRecord](), len(losses)
        for begin in range(1, last + 1, rounds):
            steps = range(begin, min(begin + rounds, last + 1))
            for flags, step in ((flags, step) for flags in order for step in steps):
                if step % every and flags & NORM:
                    flags &= ~NORM  # noqa: PLW2901
                loss = losses[step - 1] * (4.0 if 300 <= step < 300 + lasts else 1.0)
                norm = norms[step - 1] * (20.0 if step >= since else 1.0)
                seq = len(records) + 1
                kind = RecordKind.STEP if flags & LOSS else RecordKind.LATE
                records.append(StepRecord(seq, step, seq, kind, flags, 1, 0.001, loss, norm, RATE, (0.0,) * 9, 0, 0, 1.0))
        totals, found = Totals(bytearray(SIZE)), list[Anomaly]()
        for begin in range(0, len(records), cut):
            fold(totals, records[begin : begin + cut], found)
        return {anomaly.kind for anomaly in found}

    assert kinds(lasts=600) == set()
    assert "gradient_explosion" in kinds(lasts=0)
    assert kinds(lasts=3) == {"loss_spike", "gradient_explosion"}
    assert kinds(lasts=600, since=500) == {"gradient_explosion"}
