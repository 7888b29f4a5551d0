"""Detect a loss that is back at the one of the untrained model. Pure.

A level of the loss proves nothing by itself (:mod:`torchobs.detect.excursions`): where a curriculum's next stage has longer
sequences, it is three to six times the loss of the first steps. But the very loss of an untrained model, after much of it had
been learned, and for many steps in a row, is what is left where weights were lost, or where targets belong to other samples.
"""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchobs.detect.spikes import LEAST_LOSS_EXCESS, START

if TYPE_CHECKING:
    from collections.abc import Sequence

LASTING = 50
"""Losses of the lowest level, and the newest ones: a new task is being learned by then"""


class Collapse(NamedTuple):
    """Losses before and after; ``lowest_at``: the middle of the lowest ``LASTING`` of them."""

    first: float
    lowest: float
    last: float
    lowest_at: int


def collapse(losses: Sequence[float]) -> Collapse | None:
    """Return the collapse, if there is one. ``losses``: all of a model's since its first step."""
    if len(losses) < START + 2 * LASTING or not all(map(isfinite, losses)):
        return None
    first, last = median(losses[:START]), median(losses[-LASTING:])
    lowest, index = min((median(losses[at : at + LASTING]), at) for at in range(0, len(losses) - 2 * LASTING + 1, LASTING))
    fall = first - lowest
    if fall < LEAST_LOSS_EXCESS * max(1.0, abs(first)) or abs(last - first) > LEAST_LOSS_EXCESS * fall:
        return None
    return Collapse(first, lowest, last, index + LASTING // 2)
