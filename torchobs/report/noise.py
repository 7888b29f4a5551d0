"""Judgment whether two runs differ by more than each varies within itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import erfc, sqrt
from statistics import median
from typing import NamedTuple

BLOCKS = 20
LEAST_BLOCKS = 5
LEAST_IN_BLOCK = 4
LEVEL = 0.01
"""Probability below which a difference counts as real."""
LEAST_CHANGE = 0.02
"""A smaller relative difference is noise whatever its probability: machines of one type differ by as much."""


class Judgment(NamedTuple):
    """A difference. ``change``: of the medians, relative to the first; ``real``: ``None`` if there is too little to judge."""

    first: float
    second: float
    change: float
    probability: float | None
    real: bool | None


def judge(first: Sequence[float], second: Sequence[float]) -> Judgment | None:
    """Compare two series of finite values in the order of time; ``None`` if one is empty.

    Neighbouring steps are alike, so steps are no independent observations: each series is cut into up to 20 blocks (the method
    of batch means, Law and Kelton, Simulation Modeling and Analysis, 9.5.3), and the blocks' medians are compared by the rank
    sum test of Mann and Whitney (1947), with the normal approximation and the correction for ties.
    """
    if not first or not second:
        return None
    one, other = median(first), median(second)
    change = (other - one) / abs(one) if one else 0.0
    blocks = [_blocks(values) for values in (first, second)]
    if min(map(len, blocks)) < LEAST_BLOCKS:
        return Judgment(one, other, change, None, None)
    probability = rank_sum(*blocks)
    return Judgment(one, other, change, probability, probability < LEVEL and abs(change) >= LEAST_CHANGE)


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided probability of ranks as uneven as these, if both were drawn from one distribution."""
    ordered = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks, ties, at = 0.0, 0.0, 0
    for _, group in groupby(ordered, key=lambda pair: pair[0]):
        same = list(group)
        ranks += (at + (len(same) + 1) / 2) * sum(1 for _, which in same if not which)
        ties += len(same) ** 3 - len(same)
        at += len(same)
    n, m = len(first), len(second)
    statistic = ranks - n * (n + 1) / 2
    variance = n * m / 12 * (at + 1 - ties / (at * (at - 1)))
    if variance <= 0:
        return 1.0
    # half a rank towards the middle: ranks are whole, the normal distribution is not
    return erfc(max(0.0, abs(statistic - n * m / 2) - 0.5) / sqrt(2 * variance))


def _blocks(values: Sequence[float]) -> list[float]:
    count = min(BLOCKS, len(values) // LEAST_IN_BLOCK)
    return [median(values[index * len(values) // count : (index + 1) * len(values) // count]) for index in range(count)]
