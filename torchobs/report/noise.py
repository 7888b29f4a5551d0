"""Judgment whether two runs differ by more than each varies within itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

BLOCKS = 20
LEAST_BLOCKS = 5
LEAST_IN_BLOCK = 4
LEAST_CHANGE = 0.02
"""A smaller relative difference is noise whatever its quartiles: machines of one type differ by as much."""


class Judgment(NamedTuple):
    """A difference. ``change``: of the medians, relative to the first; ``real``: ``None`` if there is too little to judge."""

    first: float
    second: float
    change: float
    real: bool | None


def judge(first: Sequence[float], second: Sequence[float]) -> Judgment | None:
    """Compare two series of finite values in the order of time; ``None`` if one is empty.

    Neighbouring steps are alike, so steps are no independent observations: each series is cut into up to 20 blocks (the method
    of batch means, Law and Kelton, Simulation Modeling and Analysis, 9.5.3). The runs differ if the middle halves of their
    blocks' medians lie apart.
    """
    if not first or not second:
        return None
    one, other = median(first), median(second)
    change = (other - one) / abs(one) if one else 0.0
    blocks = [_blocks(values) for values in (first, second)]
    if min(map(len, blocks)) < LEAST_BLOCKS:
        return Judgment(one, other, change, None)
    (low, _, high), (other_low, _, other_high) = (quantiles(medians, n=4, method="inclusive") for medians in blocks)
    return Judgment(one, other, change, (high < other_low or other_high < low) and abs(change) >= LEAST_CHANGE)


def _blocks(values: Sequence[float]) -> list[float]:
    count = min(BLOCKS, len(values) // LEAST_IN_BLOCK)
    return [median(values[index * len(values) // count : (index + 1) * len(values) // count]) for index in range(count)]
