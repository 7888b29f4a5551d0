"""Detect memory that grows with the steps, and estimate when it will be used up.

The trend is the median of the slopes between all pairs of points (Theil 1950; Sen 1968, "Estimates of the regression
coefficient based on Kendall's tau"), which is robust against up to a fifth of outliers (an evaluation, a checkpoint). Its
significance is Kendall's rank test (Mann 1945, "Nonparametric tests against trend").

There are two windows. :class:`MemoryHistory` has a point every ten seconds, of the whole run and of its last four minutes;
:class:`FastWindow` has one a second, for memory that would be used up before those minutes are over.

Warm-up is no leak: caches, arenas and fragmentation grow ever more slowly. A leak grows in its last third as fast as in the
third before it, which no logarithm does (0.58 of it). A trend is extrapolated to at most 60 times the time it was observed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import inf, sqrt
from statistics import median
from typing import NamedTuple

LEAST = 24
"""Points before the first verdict: four minutes at one in ten seconds; the first third is ignored."""
MOST = 48
"""Points kept of a whole run. The number of pairs is quadratic: 0.2 ms for these."""
Z_LIMIT = 3.0
"""One-sided z-score, exceeded in 1 of 740 cases without a trend."""
STEADY = 0.7
"""Least ratio of the last third's growth to that of the third before: a logarithm's is 0.58, a straight line's 1."""
ALIKE = 0.5
"""Least ratio of the smallest to the largest among the trends of both thirds and of the whole. A single jump, a sawtooth and
growth that has just begun have parts that are steeper than the whole, or flat."""
LEAST_SHARE = 0.01
LEAST_BYTES = 8 * 1024**2
"""Least growth over the examined points that counts: less is what an allocator's arenas do."""
FORESIGHT = 60.0
HORIZON_S = 7 * 86_400.0
NEAR_S = 86_400.0
"""A limit that would be reached within a day is shown; the alert calls people later (`torchobs.rules.values`)."""

# For the fast window, where the last two thirds are 32 s: in that time growth has to take a fifth of what is left, which
# fluctuations do not, and half of the limit has to be in use: a training begins with a ramp (a dataset that is cached, arenas,
# compiled code), which may end.
FAST_FORESIGHT = 5.0
FAST_STEPS = 6
"""Steps within the examined points, three in each half. A leak of a training with slow steps is a staircase."""
FAST_STEADY = 0.85
"""Part of a ramp that slows down looks straighter than the whole: 0.7 and more for a logarithm that is a minute old."""
FAST_IN_USE = 0.5

# Before these 24 s, only what would fill the machine within minutes: a straight line from the run's first seconds, over a
# hundred steps, and not in a first epoch, in which a dataset may be cached.
YOUNG = 12
"""Least number of points; the last two thirds of them are examined"""
YOUNG_HORIZON_S = 300.0
"""What takes longer is found by the other windows in time."""
YOUNG_STEPS = 100
YOUNG_BYTES = 64 * 1024**2
"""Least growth of these, and of 24 s that are steep: this alone is no finding, but what grows is looked at (``probes.leak``)"""
YOUNG_ALIKE = 0.9
"""Least ratio of the smallest to the largest among the trends of both thirds and of the whole: a root's is 0.77, that of a ramp
with a time constant of 20 s 0.82."""
YOUNG_EVEN = 0.6
"""Least ratio of the smallest to the largest growth a step among the seconds: a leak's steps are alike, a random walk's not."""


class MemoryPoint(NamedTuple):
    """Memory in use after so many steps, at so many seconds of any steady clock."""

    step: int
    seconds: float
    used: float


class Growth(NamedTuple):
    """The trend: bytes a step, bytes a second, and for how many seconds it was seen."""

    per_step: float
    per_second: float
    seconds: float
    sustained: bool


def grows(
    points: Sequence[MemoryPoint],
    least_steps: int | None = None,
    steady: float = STEADY,
    *,
    least: int = LEAST,
    alike: float = ALIKE,
) -> Growth | None:
    """Return the trend over the last two thirds of ``points`` (in order, evenly spaced).

    ``None`` with fewer than ``least`` points or fewer than ``least_steps`` steps, by default one for every other point.
    ``steady``, ``alike``: see ``STEADY`` and ``ALIKE``.
    """
    points = list(points)
    third = len(points) // 3
    earlier, last = points[-2 * third : -third], points[-third:]
    looked_at = points[-2 * third :]
    if len(points) < least or last[-1].step - looked_at[0].step < (third if least_steps is None else least_steps):
        return None
    per_step, before, now = (median(_slopes(part) or [0.0]) for part in (looked_at, earlier, last))
    steps, seconds = last[-1].step - looked_at[0].step, last[-1].seconds - looked_at[0].seconds
    grown, level = per_step * steps, median([point.used for point in looked_at])
    matters = grown >= max(LEAST_SHARE * level, LEAST_BYTES) and _is_trend([point.used for point in looked_at])
    return Growth(
        per_step,
        grown / seconds if seconds > 0 else 0.0,
        seconds,
        sustained=matters and now >= steady * before and min(before, now, per_step) >= alike * max(before, now, per_step),
    )


def time_to_limit_s(growth: Growth | None, left: float) -> float | None:
    """Return after how many seconds ``left`` bytes are used up; ``None`` if the growth is not sustained or not near enough."""
    if growth is None or not growth.sustained or growth.per_second <= 0:
        return None
    seconds = max(left, 0.0) / growth.per_second
    return seconds if seconds <= min(FORESIGHT * growth.seconds, HORIZON_S) else None


class MemoryHistory:
    """The points of a run: the last ``LEAST`` in full, and at most ``MOST`` of the whole run, ever further apart.

    A reading from another thread falls anywhere in a step, where activations come and go: a point is the minimum of several.
    """

    __slots__ = ("_count", "_every", "_minimum", "recent", "whole")

    def __init__(self) -> None:
        self.recent: list[MemoryPoint] = []
        self.whole: list[MemoryPoint] = []
        self._every, self._count, self._minimum = 1, 0, inf

    def see(self, used: float) -> None:
        """Take a reading."""
        self._minimum = min(self._minimum, used)

    def point(self, step: int, seconds: float) -> tuple[Growth | None, Growth | None]:
        """Add a point of the readings since the last one; return :meth:`growths`."""
        if self._minimum < inf:
            self.add(MemoryPoint(step, seconds, self._minimum))
        self._minimum = inf
        return self.growths()

    def add(self, point: MemoryPoint) -> None:
        """Add the next point; the caller keeps the distance between points."""
        self.recent = [*self.recent[-LEAST + 1 :], point]
        self._count += 1
        if self._count % self._every:
            return
        self.whole.append(point)
        if len(self.whole) > MOST:
            self.whole = self.whole[1::2]
            self._every *= 2

    def begin(self) -> None:
        """Drop the last minutes, since another model is trained. The whole run is kept: it shows models that are not freed."""
        self.recent = []

    def growths(self) -> tuple[Growth | None, Growth | None]:
        """Return the trends of the whole run and of the last minutes; only the latter shows a fast leak that began late."""
        return grows(self.whole), grows(self.recent)


class FastWindow:
    """The last 48 seconds of measurements, which may come more often; each point is the minimum of its second."""

    __slots__ = ("_points", "growth", "is_steep")

    def __init__(self) -> None:
        self._points: deque[MemoryPoint] = deque(maxlen=MOST)
        self.growth: Growth | None = None
        """The trend, if it uses up what is left within minutes"""
        self.is_steep = False
        """Whether memory grows fast, however much is left: a data set that is cached does so too, and a graph that is kept"""

    def see(self, point: MemoryPoint, left: float, total: float, *, caching: bool = False) -> bool:
        """Add a measurement, with the bytes ``left`` of ``total``; return whether a verdict has begun or ended.

        ``caching``: whether growth may be a dataset's that is cached, in the first epoch.
        """
        points, before = self._points, self.growth
        if points and point.seconds - points[-1].seconds < 1.0:
            points[-1] = points[-1]._replace(used=min(points[-1].used, point.used))
            return False
        points.append(point)
        least = max(left, 0.0) / FAST_FORESIGHT
        # skip the quadratic part in the usual case: too little has grown, or too much is left
        near = left <= (1.0 - FAST_IN_USE) * total and point.used - points[0].used > least / 2
        trend = grows(points, FAST_STEPS, FAST_STEADY) if near else None
        self.growth = trend if trend and trend.sustained and trend.per_second * trend.seconds >= least else None
        recent = list(points)[-LEAST:]
        fast = grows(recent, FAST_STEPS, FAST_STEADY) if recent[-1].used - recent[0].used >= YOUNG_BYTES else None
        self.is_steep = fast is not None and fast.sustained
        if self.growth is None and not caching:
            self.growth = _fills_soon(list(points), left)
        return (self.growth is None) != (before is None)

    def begin(self) -> None:
        """Drop all points, since another model is trained, which begins with a ramp of its own."""
        self._points.clear()
        self.growth, self.is_steep = None, False


def _fills_soon(points: Sequence[MemoryPoint], left: float) -> Growth | None:
    """Return the trend of a run's first seconds if it uses up ``left`` within minutes."""
    examined = points[-(len(points) // 3 * 2) :]
    if not YOUNG <= len(points) < LEAST or examined[-1].used - examined[0].used < YOUNG_BYTES:
        return None
    trend = grows(points, YOUNG_STEPS, YOUNG_ALIKE, least=YOUNG, alike=YOUNG_ALIKE)
    if trend is None or not trend.sustained or trend.per_second <= 0:
        return None
    rates = [(b.used - a.used) / max(1, b.step - a.step) for a, b in pairwise(examined)]
    soon = max(left, 0.0) / trend.per_second <= YOUNG_HORIZON_S
    return trend if soon and min(rates) >= YOUNG_EVEN * max(rates) else None


def soonest(growths: Sequence[Growth | None], left: float) -> float | None:
    """Return the shortest :func:`time_to_limit_s` of several trends."""
    return min((seconds for growth in growths if (seconds := time_to_limit_s(growth, left)) is not None), default=None)


def _slopes(points: Sequence[MemoryPoint]) -> list[float]:
    return [(b.used - a.used) / (b.step - a.step) for a, b in combinations(points, 2) if b.step > a.step]


def _is_trend(values: Sequence[float]) -> bool:
    count = len(values)
    score = sum((b > a) - (b < a) for a, b in combinations(values, 2))
    return (score - 1) / sqrt(count * (count - 1) * (2 * count + 5) / 18) >= Z_LIMIT
