"""Is a step slow? Against the median of its predecessors, which no few slow ones move."""

from __future__ import annotations

from math import inf
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FACTOR = 3.0
LEAST_EXCESS_S = 0.005
"""The interpreter's threads take turns of 5 ms: a step of 1 ms that had to wait for one is no finding."""
LEAST_SEEN = 16
"""Fewer steps tell nothing: the first ones warm up."""


def slow_from(durations_s: Sequence[float]) -> float:
    """Return the seconds from which on a step is slow: three times what is usual. Infinity if too few have been seen."""
    if len(durations_s) < LEAST_SEEN:
        return inf
    usual_s = median(durations_s)
    return max(FACTOR * usual_s, usual_s + LEAST_EXCESS_S)
