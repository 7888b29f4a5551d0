"""Whether a value far above its baseline is a spike, or the first of a new level.

What the data does is a step: a curriculum's next stage, a new task, a longer sequence. The value leaves its level at once, and
then varies around another one as it did around the first; no weight has moved. What the weights do is an excursion: it is over
after a few values, or it goes on growing. One value shows not which it is, so a value far above the baseline
(:func:`torchobs.detect.spikes.judge`) is a candidate until

- ``CALM`` values have come back to the old level: the candidates were spikes, but one or two of them only at ``SHORT_LOSS``
  times the distance that longer ones need, ``SHORT_NORM`` times for a norm. A batch may hold one sample that is far from all
  others, and no distribution of the batches before shows it: the losses of a flow of heavy-tailed returns are normal (kurtosis
  3.2) until one is 13 deviations above them. One or two norms beside such a loss are the batch's, and no explosion;
- one rises above the candidates by as much as a spike has to, or by half their height, or is so large that no data explains it:
  they are, and so is it;
- ``SETTLED`` values have stayed, and data explains it: they are a level, which is the baseline from there on. If they still
  rise, however slowly, as a term of the loss does whose weight is ramped up, they are waited for; ``MOST_RISE`` times the
  first of them is no ramp.

Data explains no level of a loss after the learning rate has jumped, and none of a gradient's norm while the loss is as usual.

The noise of a level is in proportion to it (the loss of a batch is a mean of losses of one distribution, times a scale), so
the deviation that was learned at the old level is scaled to the new one.
"""

from __future__ import annotations

from itertools import pairwise
from math import log, sqrt
from statistics import median
from typing import NamedTuple

from torchobs.detect.spikes import (
    CALM,
    LEAST_LOSS_EXCESS,
    LEAST_NORM_EXCESS,
    LEAST_SCALE,
    ORDERS,
    SHORT_BURST,
    WARM_UP,
    Z_LIMIT,
    Bursts,
    skewed_reach,
)

SETTLED = 8
"""Values of a new level before it is one. A spike is over in fewer: what lasts longer is called one if it grows"""
CALM_LIMIT = Z_LIMIT / 3
"""Deviations within which a value has come back: 97 of 100 normal ones are"""
RISING = Z_LIMIT / sqrt(SETTLED / 4)
"""Deviations of one value, by which the mean of the second half of ``SETTLED`` is above that of the first"""
HALF = 0.5
MOST_RISE = 10.0
"""As ``detect.spikes.LEFT``, of a loss that has left its start"""
SHORT_LOSS, SHORT_NORM = 4.0, 2.0
"""Times the distance of a longer spike that one or two batches need: in 50 runs of a flow of heavy-tailed returns, 500 steps
each, losses of single batches reach 3.8 times"""
RATE_ROSE = 2.0
"""Least jump of the learning rate in one step, to a new maximum: schedules change it by a few per cent"""
LEAST_RATES = 10
"""Steps before one: a warm-up begins near 0"""
RATE_MEMORY = 50
"""Steps after one in which what happens is its doing"""
_TWICE = log(2.0)


class Candidate(NamedTuple):
    """A value that may be a spike, and its step."""

    value: float
    step: int
    end_ns: int


class Level(NamedTuple):
    """A new baseline: what :func:`torchobs.detect.spikes.judge` goes on with."""

    mean: float
    variance: float
    seen: int


class Excursions:
    """The candidates of one series, and its :class:`~torchobs.detect.spikes.Bursts`. ``logs``: of logarithms."""

    __slots__ = ("_logs", "bursts", "calm", "explained", "first", "waiting")

    def __init__(
        self,
        bursts: Bursts,
        waiting: list[Candidate],
        state: tuple[float, float, float] = (0.0, 0.0, 0.0),
        *,
        logs: bool = False,
    ) -> None:
        self._logs, self.bursts, self.waiting = logs, bursts, waiting
        self.calm, self.explained, self.first = state
        """calm: number of values that came back while candidates wait; explained: number of these that data explains;
        first: the first of them"""

    def judge(
        self, candidate: Candidate, mean: float, variance: float, *, far: bool, explained: bool
    ) -> tuple[list[Candidate], bool, Level | None]:
        """Take the next value, which was ``far`` above this baseline or not. ``explained``: data may have made it so.

        Return the spikes that are certain by now, whether this value is one, and the new level if it is one.
        """
        if not self.waiting and (self.bursts.length or not far):
            is_spike = self._is_spike(candidate, mean, far=far)
            return [candidate] if is_spike else [], is_spike, None
        if not far and candidate.value - mean < self._reach(mean, variance, CALM_LIMIT):
            self.calm += 1.0
            return (self._release(mean, variance) if self.calm >= CALM else []), False, None
        if not self.waiting:
            self.explained, self.first = 0.0, candidate.value
        self.explained += explained
        is_last = len(self.waiting) == SETTLED - 1
        is_blow_up = far and self._is_blow_up(candidate.value, mean, variance, explained=explained)
        if is_blow_up or (is_last and self.explained < SETTLED / 2):
            spikes = self._release(mean, variance, candidate)
            return spikes, candidate in spikes, None
        self.waiting.append(candidate)
        return [], False, self._settle(mean, variance) if is_last else None

    def give_up(self, mean: float, variance: float, *, ended: bool) -> list[Candidate]:
        """Return the spikes among the candidates, which one follows that is not finite; ``ended``: which nothing follows."""
        return self._release(mean, variance, short=ended)

    def _release(self, mean: float, variance: float, last: Candidate | None = None, *, short: bool = True) -> list[Candidate]:
        """Return the spikes among the candidates, which are over unless there is a ``last`` one that goes beyond them."""
        candidates, calm = self.waiting if last is None else [*self.waiting, last], int(self.calm)
        self.waiting, self.calm = [], 0.0
        least = mean + self._reach(mean, variance, Z_LIMIT)
        far = [candidate for candidate in candidates if candidate.value > least]
        spikes = [candidate for candidate in far if self._is_spike(candidate, mean, far=True)]
        for _ in range(calm if last is None else 0):
            self.bursts.judge(mean, mean, is_spike=False)
        together = far if self._logs else candidates  # the norms beside an outlier vary as well
        if short and last is None and len(together) <= SHORT_BURST:
            if self._logs and self.explained >= len(candidates):
                return []
            least = mean + (SHORT_NORM if self._logs else SHORT_LOSS) * (least - mean)
        return [candidate for candidate in spikes if candidate.value > least]

    def _is_spike(self, candidate: Candidate, mean: float, *, far: bool) -> bool:
        peak = self.bursts.peak
        likely = peak + (_TWICE if self._logs else max(0.0, peak - mean))  # twice as far from the mean
        return self.bursts.judge(candidate.value, likely, is_spike=far)

    def _is_blow_up(self, value: float, mean: float, variance: float, *, explained: bool) -> bool:
        if value > self._most(mean, ORDERS) and not (self._logs and explained):
            return True
        if not self.waiting:
            return False
        level = median(candidate.value for candidate in self.waiting)
        rise = max(self._reach(level, self._scaled(level, mean, variance), Z_LIMIT), HALF * (level - mean))
        return value - level > rise or value > self._most(self.first, MOST_RISE)

    def _most(self, mean: float, factor: float) -> float:
        return mean + 2 * LEAST_NORM_EXCESS if self._logs else factor * max(abs(mean), LEAST_SCALE)

    def _reach(self, level: float, variance: float, limit: float) -> float:
        """Return the distance above a level that so many deviations are, and a spike's least excess in that proportion."""
        least = LEAST_NORM_EXCESS if self._logs else LEAST_LOSS_EXCESS * max(1.0, abs(level))
        reach = max(limit * sqrt(variance), least * limit / Z_LIMIT)
        return reach if self._logs else max(reach, skewed_reach(level, variance, limit))

    def _scaled(self, level: float, mean: float, variance: float) -> float:
        """Return the variance at another level."""
        usual = max(abs(mean), sqrt(variance))
        if self._logs or usual <= 0.0:
            return variance
        deviation = abs(level) * (sqrt(variance) / usual)  # at most the level, also where both have decayed to nearly 0
        return max(variance, deviation * deviation)

    def _settle(self, mean: float, variance: float) -> Level | None:
        """Return the new level, unless the candidates still rise: then the older half is forgotten."""
        values = [candidate.value for candidate in self.waiting]
        first, second = _mean(values[: SETTLED // 2]), _mean(values[SETTLED // 2 :])
        level, self.calm = _mean(values), 0.0
        scaled = self._scaled(level, mean, variance)
        if second - first > RISING * sqrt(scaled):
            self.waiting, self.explained = self.waiting[SETTLED // 2 :], min(self.explained, SETTLED / 2)
            return None
        self.waiting = []
        moves = [after - before for before, after in pairwise(values)]
        noise = _mean([move * move for move in moves]) / 2  # which a fall does not add to
        return Level(level, max(scaled, noise), WARM_UP)


def _mean(values: list[float]) -> float:
    """Return the mean: infinite where ``fmean`` and ``**`` raise OverflowError, which one value must not do to the fold."""
    return sum(value / len(values) for value in values)
