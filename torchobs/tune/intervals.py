"""Medians with intervals of confidence that assume no distribution: step times have long tails, and no variance to speak of."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from statistics import median
from typing import TYPE_CHECKING

from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval(Result):
    """A median and the interval that has the population's median with at least the confidence asked for."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median with the interval between two order statistics, by the binomial distribution of ranks.

    Each value is below the population's median with probability 1/2, so the k-th smallest and k-th largest of n enclose it with
    probability ``1 - 2 P(Binomial(n, 1/2) < k)`` (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2).

    Raises:
        ValueError: too few values for that confidence.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered), confidence)
    if rank == 0:
        needed = least_values(confidence)
        raise ValueError(f"{len(ordered)} values give no interval with confidence {confidence:.3f}: use {needed}")
    return Interval(median(ordered), ordered[rank - 1], ordered[-rank])


def least_values(confidence: float = CONFIDENCE) -> int:
    """Return how many values an interval with that confidence needs: 6 for 0.95."""
    return next(count for count in range(1, 1000) if _rank(count, confidence))


def _rank(count: int, confidence: float) -> int:
    """Return the largest k, from 1, whose interval has the confidence; 0 if none has."""
    below, rank = 0.0, 0
    while rank < (count + 1) // 2:
        below += comb(count, rank) / 2**count
        if 1 - 2 * below < confidence:
            break
        rank += 1
    return rank
