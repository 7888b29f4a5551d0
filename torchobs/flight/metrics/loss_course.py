"""Follow a model's losses from its first step, a part of the fold: has the loss diverged?"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from torchobs.detect.spikes import AT_START, BACK, LEAST_FIRST, WARM_UP, are_long, follow, stays_away
from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.flight.metrics.totals import DIVERGED, Totals, Word, add_anomaly, count, is_active

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.metrics.totals import Anomaly

_NEAR_FIRST = 10
"""Steps after a model's first one in which its first loss is that of an untrained model"""
_LATE_SHARE = 0.25
"""The mean of the last squared norms has a memory of this share of all"""


def fold_course(totals: Totals, records: Sequence[StepRecord], found: list[Anomaly]) -> None:
    """Follow loss, learning rate and norm; before the newest step's number is moved by the losses themselves."""
    floats, ints, losses = totals.floats, totals.ints, _Losses(totals)
    rate_sum, rates, top = floats[Word.RATE_SUM], ints[Word.RATES], floats[Word.TOP_RATE]
    number, late_square = ints[Word.NORMS], floats[Word.LATE_SQUARE]
    for record in records:
        flags, rate, norm = record.flags, record.learning_rate, record.grad_norm
        if flags & StepFlag.LEARNING_RATE and record.kind == RecordKind.STEP and isfinite(rate_sum + rate):
            rate_sum += rate
            rates += 1
            top = max(top, rate)
        if flags & StepFlag.GRAD_NORM and isfinite(norm * norm):
            number += 1
            late_square += (norm * norm - late_square) / max(1.0, _LATE_SHARE * number)
        if flags & StepFlag.LOSS and record.step >= losses.newest and losses.stays_away_with(record):
            losses.judge(record, rate_sum / rates if rates else None, late_square if number else None, found)
    floats[Word.RATE_SUM], ints[Word.RATES], floats[Word.TOP_RATE] = rate_sum, rates, top
    ints[Word.NORMS], floats[Word.LATE_SQUARE] = number, late_square
    losses.store(totals)


def begin_course(totals: Totals) -> None:
    """Reset: another model is trained."""
    for word in (Word.LOSSES, Word.LOSS_LEFT, Word.RATES, Word.NORMS):
        totals.ints[word] = 0
    for word in (Word.FIRST_LOSS, Word.RATE_SUM, Word.TOP_RATE, Word.LATE_SQUARE):
        totals.floats[word] = 0.0


class _Losses:
    """A model's losses while records are added: whether they have left their start."""

    __slots__ = ("diverged", "first", "least_known", "left", "newest", "number", "times")

    def __init__(self, totals: Totals) -> None:
        ints = totals.ints
        self.newest, self.number, self.left = ints[Word.LOSS_STEP], ints[Word.LOSSES], ints[Word.LOSS_LEFT]
        self.first, self.diverged = totals.floats[Word.FIRST_LOSS], is_active(totals, DIVERGED)
        self.least_known = max(ints[Word.MODEL_STEP], 1) + _NEAR_FIRST
        self.times = 0

    def stays_away_with(self, record: StepRecord) -> bool:
        """Add the loss of a record that is none of an earlier step's; return True if it stays away and was not yet told."""
        loss, left = record.loss, self.left
        self.newest = record.step  # a device may deliver an earlier one later
        if not isfinite(loss):
            self.left, self.diverged = BACK if left != AT_START else left, False  # another anomaly
            return False
        self.number = number = self.number + 1
        if number == 1:
            self.first = loss
            self.left = left if record.step <= self.least_known else BACK
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
        totals.ints[Word.LOSSES], totals.ints[Word.LOSS_LEFT] = self.number, self.left
        totals.floats[Word.FIRST_LOSS] = self.first
        count(totals, DIVERGED, self.times, active=self.diverged)
