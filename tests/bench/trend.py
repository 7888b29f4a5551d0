"""Does it grow? The verdict of the soak, from numbers alone."""

from __future__ import annotations

from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 200
"""Points whose pairs are looked at: 20,000 slopes."""


class Trend(NamedTuple):
    """How a quantity went."""

    level: float
    """the median"""
    grown: float
    """slope times the time looked at; what it grew if it grew steadily"""
    allowed: float

    @property
    def grows(self) -> bool:
        """Whether it grew by more than is allowed."""
        return self.grown > self.allowed


def trend(points: Sequence[tuple[float, float]], allowed: float) -> Trend:
    """Return the trend of (seconds, value) points in order.

    The slope is the median of those between all pairs of points (Theil 1950; Sen 1968), of which three in ten may be wild: a
    scrape that was just being answered, ranks that were just being replaced. Raises ``ValueError`` for fewer than two points.
    """
    if len(points) < 2:
        raise ValueError("a trend needs two points")
    step = -(-len(points) // MOST)
    kept = points[::step]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(kept, 2) if b[0] > a[0]]
    return Trend(median(value for _, value in points), median(slopes) * (points[-1][0] - points[0][0]), allowed)
