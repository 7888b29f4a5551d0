"""A loss that leaves its start for good, as the fold follows it."""

from __future__ import annotations

from math import nan

import pytest

from tests import flights
from torchobs.flight.format.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.metrics import fold
from torchobs.flight.metrics.totals import DIVERGED, Anomaly, is_active

HEADER = flights.header()


def step(number: int, loss: float, flags: int = StepFlag.LOSS) -> StepRecord:
    """A record of one."""
    return flights.step_record(HEADER, number, step=number, loss=loss, flags=flags)


def folded(batches: list[list[StepRecord]]) -> tuple[bool, list[Anomaly]]:
    """Whether it is away in the end, and what was found."""
    totals, found = flights.totals(HEADER), list[Anomaly]()
    for batch in batches:
        fold.fold(totals, batch, found)
    return is_active(totals, DIVERGED), found


@pytest.mark.parametrize(
    ("losses", "at"),
    [
        ([4.1, 60.0, 271.0, *[100.0] * 100], 52),
        ([0.2] * 19 + [12.0] * 60, 70),
        ([2.0] * 300, None),
        ([4.1, 271.0, *[100.0] * 20], None),
        ([4.1, 271.0, *[100.0] * 30, 5.0, *[100.0] * 100], None),
        ([4.1, 5.0, *[5.0 + number for number in range(300)]], None),
        ([0.01, 0.9, *[1.9] * 200], None),
        ([-4.0, 50.0, *[-3.0, 60.0] * 60], None),
        ([*[2.0] * 30, *[200.0] * 100], None),
        ([4.1, 271.0, *[100.0] * 30, nan, *[100.0] * 100], None),
        ([18.0 * min(number, 100) for number in range(1, 300)], None),
        ([0.0, 1e-6, *[10.8 - number / 100 for number in range(300)]], None),
        ([0.0, 4.0, 271.0, *[100.0] * 100], 53),
    ],
    ids=[
        "at once", "in the twentieth step", "healthy", "too early to say", "came back once", "grows", "begins near zero",
        "both signs", "later", "not finite: another anomaly", "a weight that is ramped up", "a first batch of nothing",
        "a first batch of nothing, and then away",
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_a_loss_that_leaves_its_start_for_good_has_diverged(losses: list[float], at: int | None, batch: int) -> None:
    """Told once, beside its first value; twenty times that is no spike by its own past, which is too short."""
    records = [step(number, loss) for number, loss in enumerate(losses, 1)]
    is_away, found = folded([records[begin : begin + batch] for begin in range(0, len(records), batch)])
    told = [(one.step, one.baseline) for one in found if one.kind == "diverged"]
    assert told == ([] if at is None else [(at, next(loss for loss in losses if loss))])
    assert is_away == (at is not None)


def test_a_diverged_loss_is_active_until_it_comes_back_or_another_model_begins() -> None:
    """Late values of earlier steps change nothing."""
    away = [step(1, 4.0), *(step(number, 90.0) for number in range(2, 62))]
    late = flights.step_record(HEADER, 62, step=5, loss=1.0, flags=StepFlag.LOSS, kind=RecordKind.LATE)
    assert folded([away, [late]])[0]
    assert not folded([away, [step(62, 7.0)]])[0]
    assert not folded([away, [step(62, 90.0, StepFlag.LOSS | StepFlag.NEW_MODEL)]])[0]


def measured(losses: list[float], rate: float, norm: float) -> list[StepRecord]:
    """Steps with a learning rate, and norms of which every third is known."""
    rated, normed = StepFlag.LOSS | StepFlag.LEARNING_RATE, StepFlag.LOSS | StepFlag.LEARNING_RATE | StepFlag.GRAD_NORM
    return [
        flights.step_record(
            HEADER, number, step=number, loss=loss, learning_rate=rate, grad_norm=norm, flags=rated if number % 3 else normed
        )
        for number, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("rate", "norm", "is_away"),
    [(5e-4, 22.0, False), (1e-3, 330.0, False), (0.03, 0.3, False), (18.0, 0.85, True), (1.2, 300.0, True), (0.1, 1e5, True)],
    ids=["SGD on a sum", "Adam on a sum", "SGD on a mean", "hot SGD", "hot AdamW", "explodes"],
)
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_steps_too_short_to_have_taken_the_loss_away_have_not(rate: float, norm: float, batch: int, *, is_away: bool) -> None:
    """A contrastive loss rises as its queue fills, and a term's weight may be raised."""
    records = measured([0.4, 180.0, 300.0, *[360.0] * 100], rate, norm)
    away, found = folded([records[begin : begin + batch] for begin in range(0, len(records), batch)])
    assert (away, [one.step for one in found if one.kind == "diverged"]) == (is_away, [52] * is_away)


def test_steps_that_become_long_are_told_then() -> None:
    """The rate of a warm-up that goes on to where the loss stays away."""
    records = measured([2.0, *[90.0] * 300], 0.001, 40.0)
    later = [record._replace(learning_rate=1.0) if record.step > 100 else record for record in records]
    for batch in (1, 50):
        _, found = folded([later[begin : begin + batch] for begin in range(0, len(later), batch)])
        assert [one.step for one in found if one.kind == "diverged"] == [101]


def test_long_first_steps_prove_nothing_of_a_loss_that_stays_where_it_is() -> None:
    """MoCo's norm is 30 in its first steps, and then 0.25."""
    first, then = measured([0.2, 10.5, 10.5, 10.1], 0.03, 30.0), measured([10.0] * 200, 0.03, 0.25)
    records = [*first, *(one._replace(seq=number, step=number) for number, one in enumerate(then[4:], 5))]
    assert folded([records]) == (False, [])
