"""What the loss did since a model's first step, a part of the fold: whether it has diverged, and whether it falls."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from torchobs.detect.divergence import AT_START, BACK, LEAST_FIRST, follow, has_diverged
from torchobs.detect.no_progress import FIRST_LOSSES, LATE_SHARE, Course
from torchobs.detect.spikes import WARM_UP
from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.flight.metrics.totals import DIVERGED, Totals, Word, add_anomaly, count, is_active

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.metrics.totals import Anomaly

_NEAR_FIRST = 10
"""Steps after a model's first one in which its first loss is that of an untrained model"""
_NOT_JUDGED = -1.0
"""A mean of losses of which one was not above zero"""


def fold_course(totals: Totals, records: Sequence[StepRecord], found: list[Anomaly]) -> None:
    """Follow loss, learning rate and norm; before the newest step's number is moved by the losses themselves."""
    _fold_losses(totals, [record for record in records if record.flags & StepFlag.LOSS], found)
    floats, ints = totals.floats, totals.ints
    rate_sum, rates = floats[Word.RATE_SUM], ints[Word.RATES]
    norms, squares, number = floats[Word.NORMS_SUM], floats[Word.SQUARES_SUM], ints[Word.NORMS]
    for record in records:
        flags, rate, norm = record.flags, record.learning_rate, record.grad_norm
        if flags & StepFlag.LEARNING_RATE and record.kind == RecordKind.STEP and isfinite(rate_sum + rate):
            rate_sum += rate
            rates += 1
        if flags & StepFlag.GRAD_NORM and isfinite(squares + norm * norm):
            norms += norm
            squares += norm * norm
            number += 1
    floats[Word.RATE_SUM], ints[Word.RATES] = rate_sum, rates
    floats[Word.NORMS_SUM], floats[Word.SQUARES_SUM], ints[Word.NORMS] = norms, squares, number


def begin_course(totals: Totals) -> None:
    """Reset: another model is trained."""
    for word in (Word.LOSSES, Word.LOSS_LEFT, Word.RATES, Word.NORMS):
        totals.ints[word] = 0
    for word in (Word.FIRST_LOSS, Word.START_LOSS, Word.LATE_LOSS, Word.RATE_SUM, Word.NORMS_SUM, Word.SQUARES_SUM):
        totals.floats[word] = 0.0


def course(totals: Totals) -> Course:
    """Return the course of the present model."""
    floats, ints = totals.floats, totals.ints
    start, rates, norms = floats[Word.START_LOSS], ints[Word.RATES], ints[Word.NORMS]
    return Course(
        losses=ints[Word.LOSSES] if start > 0.0 else 0,
        first=start,
        late=floats[Word.LATE_LOSS],
        steps=max(0, ints[Word.LAST_STEP] - max(0, ints[Word.MODEL_STEP] - 1)),
        rate=floats[Word.RATE_SUM] / rates if rates else 0.0,
        last_rate=floats[Word.LEARNING_RATE],
        norm=floats[Word.NORMS_SUM] / norms if norms else None,
        square=floats[Word.SQUARES_SUM] / norms if norms else 0.0,
    )


def _fold_losses(totals: Totals, records: Sequence[StepRecord], found: list[Anomaly]) -> None:
    ints, floats = totals.ints, totals.floats
    newest, number, left, first = ints[Word.LOSS_STEP], ints[Word.LOSSES], ints[Word.LOSS_LEFT], floats[Word.FIRST_LOSS]
    diverged, times, values, known = is_active(totals, DIVERGED), 0, list[float](), True
    for record in records:
        loss = record.loss
        if record.step < newest:
            continue  # delivered by a device after a newer step's value
        newest = record.step
        values.append(loss)
        if not isfinite(loss):
            left, diverged = BACK if left != AT_START else left, False  # another anomaly
            continue
        number += 1
        if number == 1:
            first, known = loss, record.step <= max(ints[Word.MODEL_STEP], 1) + _NEAR_FIRST
            left = left if known else BACK
        elif abs(first) < LEAST_FIRST and number <= WARM_UP:
            first = loss
        elif left != BACK and (left != AT_START or number <= WARM_UP):
            left = follow(loss, first, number, left)
        if has_diverged(number, left) != diverged:
            diverged = not diverged
            if diverged:
                times += 1
                add_anomaly(found, DIVERGED, record, loss, first)
    _fold_means(totals, values, known=known)
    ints[Word.LOSSES], ints[Word.LOSS_LEFT], floats[Word.FIRST_LOSS] = number, left, first
    count(totals, DIVERGED, times, active=diverged)


def _fold_means(totals: Totals, losses: Sequence[float], *, known: bool) -> None:
    """Add losses to the mean of the first ones and to that of the last ones. ``known``: the model's first losses are."""
    number, start, late = totals.ints[Word.LOSSES], totals.floats[Word.START_LOSS], totals.floats[Word.LATE_LOSS]
    for loss in losses:
        number += 1
        if not 0.0 < loss < inf or start < 0.0 or not known:
            start = _NOT_JUDGED
        elif number <= FIRST_LOSSES:
            start += (loss - start) / number
            late = start
        else:
            late += (loss - late) / max(1.0, LATE_SHARE * number)
    totals.floats[Word.START_LOSS], totals.floats[Word.LATE_LOSS] = start, late
