"""What the loss did since a model's first step, a part of the fold: whether it has diverged, and whether it falls."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from torchobs.detect.divergence import AT_START, BACK, LEAST_FIRST, are_long, follow, stays_away
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
    floats, ints, losses = totals.floats, totals.ints, _Losses(totals)
    rate_sum, rates, late, top = floats[Word.RATE_SUM], ints[Word.RATES], floats[Word.LATE_RATE], floats[Word.TOP_RATE]
    norms, squares, number = floats[Word.NORMS_SUM], floats[Word.SQUARES_SUM], ints[Word.NORMS]
    late_square = floats[Word.LATE_SQUARE]
    for record in records:
        flags, rate, norm = record.flags, record.learning_rate, record.grad_norm
        if flags & StepFlag.LEARNING_RATE and record.kind == RecordKind.STEP and isfinite(rate_sum + rate):
            rate_sum += rate
            rates += 1
            late += (rate - late) / max(1.0, LATE_SHARE * rates)
            top = max(top, rate)
        if flags & StepFlag.GRAD_NORM and isfinite(squares + norm * norm):
            norms += norm
            squares += norm * norm
            number += 1
            late_square += (norm * norm - late_square) / max(1.0, LATE_SHARE * number)
        if flags & StepFlag.LOSS and record.step >= losses.newest and losses.stays_away_with(record):
            losses.judge(record, rate_sum / rates if rates else None, late_square if number else None, found)
    floats[Word.RATE_SUM], ints[Word.RATES], floats[Word.LATE_RATE], floats[Word.TOP_RATE] = rate_sum, rates, late, top
    floats[Word.NORMS_SUM], floats[Word.SQUARES_SUM], ints[Word.NORMS] = norms, squares, number
    floats[Word.LATE_SQUARE] = late_square
    losses.store(totals)


def begin_course(totals: Totals) -> None:
    """Reset: another model is trained."""
    for word in (Word.LOSSES, Word.LOSS_LEFT, Word.RATES, Word.NORMS):
        totals.ints[word] = 0
    for word in (Word.FIRST_LOSS, Word.START_LOSS, Word.LATE_LOSS, Word.NORMS_SUM, Word.SQUARES_SUM):
        totals.floats[word] = 0.0
    for word in (Word.RATE_SUM, Word.LATE_RATE, Word.TOP_RATE, Word.LATE_SQUARE):
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
        late_rate=floats[Word.LATE_RATE],
        top_rate=floats[Word.TOP_RATE],
        norm=floats[Word.NORMS_SUM] / norms if norms else None,
        square=floats[Word.SQUARES_SUM] / norms if norms else 0.0,
    )


class _Losses:
    """A model's losses while records are added: whether they have left their start."""

    __slots__ = ("diverged", "first", "known", "least_known", "left", "newest", "number", "times", "values")

    def __init__(self, totals: Totals) -> None:
        ints = totals.ints
        self.newest, self.number, self.left = ints[Word.LOSS_STEP], ints[Word.LOSSES], ints[Word.LOSS_LEFT]
        self.first, self.diverged = totals.floats[Word.FIRST_LOSS], is_active(totals, DIVERGED)
        self.least_known, self.known = max(ints[Word.MODEL_STEP], 1) + _NEAR_FIRST, True
        self.times = 0
        self.values: list[float] = []

    def stays_away_with(self, record: StepRecord) -> bool:
        """Add the loss of a record that is none of an earlier step's; return True if it stays away and was not yet told."""
        loss, left = record.loss, self.left
        self.newest = record.step  # a device may deliver an earlier one later
        self.values.append(loss)
        if not isfinite(loss):
            self.left, self.diverged = BACK if left != AT_START else left, False  # another anomaly
            return False
        self.number = number = self.number + 1
        if number == 1:
            self.first, self.known = loss, record.step <= self.least_known
            self.left = left if self.known else BACK
        elif abs(self.first) < LEAST_FIRST and number <= WARM_UP:
            self.first = loss
        elif left != BACK and (left != AT_START or number <= WARM_UP):
            self.left = follow(loss, self.first, number, left)
        stays = stays_away(number, self.left)
        self.diverged = self.diverged and stays
        return stays and not self.diverged

    def judge(self, record: StepRecord, rate: float | None, square: float | None, found: list[Anomaly]) -> None:
        """Add the anomaly if the steps were long enough for it, by the mean learning rate and that of late squared norms."""
        if are_long(record.loss, rate, square):
            self.diverged, self.times = True, self.times + 1
            add_anomaly(found, DIVERGED, record, record.loss, self.first)

    def store(self, totals: Totals) -> None:
        """Write all into the fold's state."""
        _fold_means(totals, self.values, known=self.known)
        totals.ints[Word.LOSSES], totals.ints[Word.LOSS_LEFT] = self.number, self.left
        totals.floats[Word.FIRST_LOSS] = self.first
        count(totals, DIVERGED, self.times, active=self.diverged)


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
