"""Detect a loss that has left its start and does not come back: a learning rate that is too high from the first step on.

Its own recent past does not show that, for there is none: :mod:`torchobs.detect.spikes` learns the new level. The measure is
the first loss, which is that of an untrained model.

That loss proves nothing by itself, either. A contrastive one begins near 0 against a queue of random keys, and rises a
thousandfold as the queue fills (MoCo, He et al. 2020); the weight of a term may be raised. So the steps must have been long
enough to take it there: to first order a step of SGD lowers the loss by the learning rate times the square of the norm, and
Adam's moves no weight by more than about the rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.detect.spikes import LEAST_SCALE, ORDERS, START, WARM_UP, leaves_start

if TYPE_CHECKING:
    from collections.abc import Sequence

LEFT, NEAR, RAMP = 10.0, 2.0, 3.0
"""Factors on the first loss: at the one, within the first ``WARM_UP`` losses, a loss has left its start; below the other it has
come back. A policy gradient's loss is as long as its episodes: it may leave its start, and comes back with each short one. A
loss whose weight is ramped up grows with the steps' number: it has to be so many times that"""
LEAST_FIRST = 1e-3
"""A loss below that is none of an untrained model: of a batch in which all is masked, or a policy's in its first step"""
LEAST_AFTER = 50
"""Losses after that without a return"""
LEAST_AT_END, LAST = 20, 10
"""Of a run that ended before that: losses after that without a return, and the last of them, which are all as far away"""
LEAST_SHARE = 0.01
"""Of the loss, that a step lowers it by to first order. Of 180 random trainings with a rate that was too high from the start 32
stayed away for so long, with 0.39 or more (of SGD; of AdamW 24); MoCo's has 3e-5 to 9e-4 (SGD, queues of 1,024 to 65,536)"""
LEAST_RATE = 0.01
"""Half of the deviation of weights that transformers begin with, which Adam's first step of that rate takes. Its share of the
loss grows with the loss's scale: MoCo's by Adam at 1e-3 has 1.5, summed over a batch of 128"""
AT_START, BACK = 0, (1 << 63) - 1
"""The two states besides the number of the loss that left: it has not, or it has come back and is not judged any more"""


def follow(loss: float, first: float, number: int, left: int) -> int:
    """Return the state ``left`` after one more finite loss, the ``number``-th of its model. ``first``: the first one."""
    if left == BACK:
        return BACK
    start = max(abs(first), LEAST_SCALE)
    if left != AT_START:
        return left if loss >= NEAR * start else BACK
    away = loss >= max(LEFT * start, RAMP * number * abs(first))
    return number if 1 < number <= WARM_UP and away else AT_START


def stays_away(number: int, left: int) -> bool:
    """Return True if the loss has been away for long enough."""
    return AT_START < left < BACK and number - left >= LEAST_AFTER


def ended_away(losses: Sequence[float]) -> bool:
    """Return True if a run was too short for :func:`stays_away`, and its loss did not come back before it ended.

    ``losses``: finite, all of its model's.
    """
    left, first = AT_START, losses[0] if losses else 0.0
    if abs(first) < LEAST_FIRST:
        return False
    for number, loss in enumerate(losses[1:], 2):
        left = follow(loss, first, number, left)
    away = AT_START < left < BACK and LEAST_AT_END <= len(losses) - left < LEAST_AFTER
    return away and min(losses[-LAST:]) >= LEFT * max(abs(first), LEAST_SCALE)


def are_long(loss: float, rate: float | None, square: float | None) -> bool:
    """Return True if steps can have taken a loss so far.

    ``rate``: their mean. ``square``: that of the last quarter of squared norms, since the first steps of a contrastive loss may
    be as long. ``None`` if unknown.
    """
    if rate is None:
        return True
    return rate >= LEAST_RATE and (square is None or rate * square >= LEAST_SHARE * loss)


class Divergence:
    """Whether one model's loss has grown without end, for who judges each loss as it comes and knows no learning rate.

    The growth may be so smooth that no loss is far above those before it. A loss has diverged that is ``ORDERS`` above the
    first ones, and ``RAMP`` times what a weight that is ramped up could have made of them, ``LEAST_AFTER`` times in a row.
    """

    __slots__ = ("_away", "_number", "start")

    def __init__(self) -> None:
        self._away = self._number = 0
        self.start = 0.0
        """The greatest magnitude among the first losses, as :func:`torchobs.detect.spikes.leaves_start` takes it"""

    def add(self, loss: float) -> bool:
        """Add a finite loss; return True if the model's has diverged."""
        if self._number < START and not leaves_start(loss, self.start, self._number):
            self.start = max(self.start, abs(loss))
        self._number += 1
        least = max(ORDERS * max(self.start, LEAST_SCALE), RAMP * self._number * self.start)
        self._away = self._away + 1 if loss > least else 0
        return self._away >= LEAST_AFTER
