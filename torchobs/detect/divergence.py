"""Detect a loss that has left its start and does not come back: a learning rate that is too high from the first step on.

Its own recent past does not show that, for there is none: :mod:`torchobs.detect.spikes` learns the new level. The measure is
the first loss, which is that of an untrained model.
"""

from __future__ import annotations

from torchobs.detect.spikes import LEAST_SCALE, WARM_UP

LEFT, NEAR, RAMP = 10.0, 2.0, 3.0
"""Factors on the first loss: at the one, within the first ``WARM_UP`` losses, a loss has left its start; below the other it has
come back. A policy gradient's loss is as long as its episodes: it may leave its start, and comes back with each short one. A
loss whose weight is ramped up grows with the steps' number: it has to be so many times that"""
LEAST_FIRST = 1e-3
"""A loss below that is none of an untrained model: of a batch in which all is masked, or a policy's in its first step"""
LEAST_AFTER = 50
"""Losses after that without a return"""
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


def has_diverged(number: int, left: int) -> bool:
    """Return True if the loss has been away for long enough."""
    return AT_START < left < BACK and number - left >= LEAST_AFTER
