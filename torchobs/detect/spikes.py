"""Spikes, explosions, vanishing and divergence of losses and gradient norms, and the layer that blew up.

*Spikes*: the baseline is an exponentially weighted mean and variance (Finch 2009, "Incremental calculation of weighted mean and
variance", eqs. 124 and 143), the test a z-score and a least excess, as spike-aware trainers use it (ZClip, Kumar et
al. 2025, arXiv:2504.02507: EMA statistics of the gradient norm, z threshold 2.5 for clipping). An alert needs a rarer event
than clipping does, hence 6 standard deviations and an excess that matters by itself.

*Excursions*: what the data does is a step, a curriculum's next stage, a new task, a longer sequence. The value leaves its level
at once, and then varies around another one as it did around the first; no weight has moved. What the weights do is an
excursion: it is over after a few values, or it goes on growing. One value does not show which it is, so a value far above the
baseline is a candidate until

- ``CALM`` values have come back to the old level: the candidates were spikes, but one or two of them only at ``SHORT_LOSS``
  times the distance that longer ones need, ``SHORT_NORM`` times for a norm. A batch may hold one sample that is far from all
  others, and no distribution of the batches before shows it: the losses of a flow of heavy-tailed returns are normal (kurtosis
  3.2) until one is 13 deviations above them. One or two norms beside such a loss are the batch's, and no explosion;
- one rises above the candidates by as much as a spike has to, or by half their height, or is so large that no data explains it:
  they are, and so is it;
- ``SETTLED`` values have stayed, and data explains it: they are a level, which is the baseline from there on. If they still
  rise, however slowly, as a term of the loss with a growing weight does, they are waited for; ``MOST_RISE`` times the
  first of them is no ramp.

Data explains no level of a loss after the learning rate has jumped, and none of a gradient's norm while the loss is as usual.
The noise of a level is in proportion to it, so the deviation that was learned at the old level is scaled to the new one.

*Vanishing*: one small norm is ordinary (a batch that is fitted already, a masked one); a hundredth of the usual norm in five
consecutive measured steps is not: dead units, a detached graph, underflow in half precision without a loss scaler. The baseline
is a mean and variance on the log scale; it follows a norm that declines slowly, as in training that converges. A norm of
exactly zero has no logarithm and needs no baseline.

*Divergence* from the first steps on: the recent past does not show that, for a baseline learns the new level. The measure is
the first loss, which is that of an untrained model.

That loss proves nothing by itself, either. A contrastive one begins near 0 against a queue of random keys, and rises a
thousandfold as the queue fills (MoCo, He et al. 2020); the weight of a term may be raised. So the steps must have been long
enough to take it there: to first order a step of SGD lowers the loss by the learning rate times the square of the norm, and
Adam's moves no weight by more than about the rate.

*Recovery*: that there was no further anomaly does not suffice, for baselines follow a loss that stays five times as high. So
what was judged has to be near the value again that was usual before. Past is only what is proven by the values of the last
steps.

*The layer that blew up*: squared norms of layers add up to that of the whole, so that only a layer with a part of the excess
shows how far it has grown. From where a gradient blows up it is carried on to all layers before: these grow by about the same
factor, and the last of them in the model's order is the one where it began.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, inf, isfinite, log, log1p, sqrt
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


ALPHA = 0.03
"""Weight of a new value: a memory of about 33 values (ZClip: 0.97 decay)."""
WARM_UP = 20
"""Values seen before the first verdict of :func:`judge`; until then the plain mean and variance are learned."""
Z_LIMIT = 6.0
LEARN_LIMIT = 3.0
"""Standard deviations by which one value can move the baseline (Huber's clipping): with the z limit itself the deviation would
grow by 1.4 with every spike, and the third spike in a row would be usual."""
LEAST_EXPLOSIONS = 3
"""Spikes that are a finding: single ones are ordinary (ZClip clips them as they come)."""
LEAST_LOSS_SPIKES = 5
"""Each spike raises the baseline by a factor of 1.44, so five mean a loss that has nearly doubled.

The small GPT of ``examples/`` has 2 with a hundredfold learning rate, which it recovers from, 5 at 300 and 9 at 1000. Its
gradient norm shows none of it so early in training, when that varies as much by itself.
"""

START = 3
"""First values that determine a run's scale: a single one may be unusually small"""
ORDERS = 1e3
"""Three orders of magnitude above the first values. In log-normal values with a standard deviation of 1.5 in the logarithm
(single batches differ a hundredfold) one run in 16,000 has such a value by chance among its first 20, and one in 240 where it
is 2 (simulated, 300,000 runs each). If there is only one earlier value, the square is required: two such values differ by
that factor in one case of two million."""
LEAST_SCALE = 1.0
"""A run may begin at or near 0: rewards that have not come yet, a head initialised with zeros, a loss that crosses zero. A
value that begins below 1 has to exceed 1,000."""

LEAST_LOSS_EXCESS = 0.25
"""Least excess of a spike over the loss baseline: relative, or absolute below a loss of 1; beside the tail test."""
LEAST_NORM_EXCESS = log(8.0)
"""An explosion is at least 8 times the baseline norm (on the log scale, where norms are nearly normal)."""


SHORT_BURST, CALM = 2, 3
"""Spikes in a burst of this kind, and ordinary values after which it is over: what goes up and down belongs together"""
BURST_MEMORY = 300
"""Values after which a burst counts for 1/e. Two that are over within some 150 values make the third a usual one: in healthy
runs of A2C it is the third or the fourth, and single outliers in 300 batches are always reported."""
_KEPT = 1.0 - 1.0 / BURST_MEMORY
_LARGEST_EXPONENT = 709.0
"""Of a finite float64"""


def leaves_start(value: float, start: float, count: int) -> bool:
    """Return whether a value among the first ``WARM_UP`` is orders of magnitude above the first ones.

    ``start`` is the greatest magnitude among the first ``START`` of the ``count`` earlier values, without those for which this
    was true. A learning rate that is wrong from the start takes the loss from 2.3 to 1.5e10 before any baseline is learned.
    """
    scale = max(abs(start), LEAST_SCALE)
    if not 0 < count < WARM_UP:
        return False
    return value / scale > (ORDERS if count > 1 else ORDERS**2)


def skewed_reach(mean: float, variance: float, limit: float = Z_LIMIT) -> float:
    """Return the distance above ``mean`` of ``limit`` deviations for log-normal values, in their unit; 0 without variance.

    A loss near its floor has a long tail: a classifier that is right on all but a few samples has 144 losses in 5,200 steps
    beyond 6 standard deviations of its recent past, and none beyond this (measured: 16 samples a batch, mean loss 0.005,
    single batches of 1 to 3). With mean m and coefficient of variation c the logarithm's variance is v = ln(1 + c²), its mean
    ln(m) - v / 2 (Aitchison & Brown 1957, "The Lognormal Distribution", ch. 2). For c = 0.03 that is 6.6 standard deviations,
    close to the normal limit; for c = 1 it is 104.

    A loss of both signs (a policy gradient: advantages times log-probabilities) has such tails on both sides. For a mean that
    is not positive the tail is that of its magnitude; where that is less than a standard deviation, c is 1.
    """
    if variance <= 0.0:
        return 0.0
    if mean <= 0.0:
        mean = max(-mean, sqrt(variance))
    variation = sqrt(variance) / mean
    spread = min(log1p(variation * variation), limit**2)  # where the exponent is largest, and infinities end
    return mean * (exp(limit * sqrt(spread) - spread / 2) - 1.0)


class Bursts:
    """Spikes that come again and again, each for a value or two, and are over: what such a training does.

    The critic of an on-policy actor-critic (A2C) has a loss ten to thirty times as large whenever an episode ends, some thirty
    steps apart: 2 to 4 % of the steps of healthy runs, whatever the deviation of those between. What an unstable training does
    lasts longer, for the weights have moved.
    """

    __slots__ = ("calm", "length", "peak", "recent", "top")

    def __init__(
        self, recent: float = 0.0, peak: float = 0.0, length: float = 0.0, top: float = 0.0, calm: float = 0.0
    ) -> None:
        self.recent, self.peak, self.length, self.top, self.calm = recent, peak, length, top, calm
        """recent: number of bursts that are over, each the less the longer ago it was; peak: their largest value; length and
        top: number of spikes in the present one, and the largest; calm: number of values since its last"""

    def judge(self, value: float, likely: float, *, is_spike: bool) -> bool:
        """Take a value that :func:`judge` has judged; return whether it is a spike still.

        ``likely``: the largest value that is a usual one, where bursts are.
        """
        self.recent *= _KEPT
        if is_spike:
            is_reported = self.length >= SHORT_BURST or self.recent < 1.0 or value > likely
            self.top = max(self.top, value) if self.length else value
            self.length += 1
            self.calm = 0.0
            return is_reported
        if self.length:
            self.calm += 1
            if self.calm >= CALM:
                self._end()
        return False

    def _end(self) -> None:
        if self.length <= SHORT_BURST:
            self.peak = max(self.peak, self.top) if self.recent >= 1.0 else self.top
            self.recent += 1.0
        self.length = 0.0


def judge(value: float, mean: float, variance: float, count: int, least_excess: float) -> tuple[bool, float, float, int]:
    """Judge one finite value against its baseline and return ``(is_high, mean, variance, count)`` updated.

    ``least_excess`` is the smallest distance above the mean that counts, in the value's own unit. A value moves the baseline by
    at most 3 standard deviations (winsorised), so that one outlier does not hide the next. A lasting new level is a spike for
    some tens of values at most, then the baseline: a hundredfold norm for 10 values where the logarithm's deviation was 0.3,
    for 24 where it was 0.02. A value with an overflowing square resets the baseline: no spike exceeds an infinite variance.
    """
    deviation = sqrt(variance)
    excess = value - mean
    is_high = count >= WARM_UP and excess > max(Z_LIMIT * deviation, least_excess)
    if count >= WARM_UP:
        bound = max(LEARN_LIMIT * deviation, least_excess / 8)  # a new level is learned even without variance
        excess = min(max(excess, -bound), bound)
    alpha = max(ALPHA, 1.0 / (count + 1))
    step = alpha * excess
    mean, variance = mean + step, (1.0 - alpha) * (variance + excess * step)
    if not (isfinite(mean) and isfinite(variance)):
        return is_high, value, 0.0, 1
    return is_high, mean, variance, min(count + 1, WARM_UP * 100)


class NormBaseline:
    """The usual gradient norm of one model, for who judges each step as it comes."""

    __slots__ = ("_count", "_mean", "_start", "_variance")

    def __init__(self) -> None:
        self._mean = self._variance = self._start = 0.0
        self._count = 0

    @property
    def limit(self) -> float:
        """The norm above which it explodes: far above its recent past, as :func:`judge` has it, or ``ORDERS`` above its start.

        The second is for a norm that grows so smoothly that its recent past grows with it; 0 until ``WARM_UP`` norms are known.
        """
        if self._count < WARM_UP:
            return 0.0
        reach = max(Z_LIMIT * sqrt(self._variance), LEAST_NORM_EXCESS)
        exponent = min(self._mean + reach, self._start + log(ORDERS))
        return exp(exponent) if exponent < _LARGEST_EXPONENT else inf

    def add(self, norm: float) -> None:
        """Learn a norm; one that is not finite, or 0, teaches nothing."""
        if not 0.0 < norm < inf:
            return
        number, least = log(norm), LEAST_NORM_EXCESS
        _, self._mean, self._variance, self._count = judge(number, self._mean, self._variance, self._count, least)
        if self._count <= WARM_UP:
            self._start = self._mean


SETTLED = 8
"""Values of a new level before it is one. A spike is over in fewer: what lasts longer is called one if it grows"""
CALM_LIMIT = Z_LIMIT / 3
"""Deviations within which a value has come back: 97 of 100 normal ones are"""
RISING = Z_LIMIT / sqrt(SETTLED / 4)
"""Deviations of one value, by which the mean of the second half of ``SETTLED`` is above that of the first"""
HALF = 0.5
MOST_RISE = 10.0
"""As ``LEFT``, of a loss that has left its start"""
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


class UsualValues:
    """What is usual of one series: its baseline, and the candidates. ``logs``: of logarithms, of values above 0."""

    __slots__ = (
        "_logs", "bursts", "calm", "count", "explained", "first", "is_high", "mean", "settled", "start", "usual", "variance",
        "waiting",
    )  # fmt: skip

    def __init__(self, *, logs: bool = False) -> None:
        self._logs, self.bursts = logs, Bursts()
        self.mean, self.variance, self.count = 0.0, 0.0, 0
        self.usual = self.start = 0.0
        """usual: the baseline after the last ordinary value; start: see :func:`leaves_start`"""
        self.waiting: list[Candidate] = []
        self.calm = self.explained = self.first = 0.0
        """calm: number of values that came back while candidates wait; explained: number of these that data explains;
        first: the first of them"""
        self.is_high = self.settled = False
        """Whether the last value was above the baseline, far or as a candidate; whether it has become a new one with it"""

    def add(self, value: float, step: int, end_ns: int, *, explained: bool) -> tuple[list[Candidate], bool]:
        """Add a finite value; return the spikes that are certain by now, and whether it is one itself.

        ``explained``: data may have made it high.
        """
        logs, self.is_high, self.settled = self._logs, False, False
        number = log(value) if logs else value
        candidate = Candidate(number, step, end_ns)
        if self.count < WARM_UP and leaves_start(value, self.start, self.count):  # not learned by the baseline
            self.count += 1
            if not logs or self.start > 0.0:
                self.usual = min(self.usual, log(self.start) if logs else self.start)
            return [candidate], True
        least, waited = self._least(self.mean), self.waiting
        high, mean, variance, count = judge(number, self.mean, self.variance, self.count, least)
        far = high and (logs or number - self.mean > skewed_reach(self.mean, self.variance))
        spikes, is_spike, level = self._judge(candidate, high=high, far=far, explained=explained)
        self.settled, waiting = level is not None, self.waiting
        self.is_high = high or self.settled or bool(waiting and waiting[-1] is candidate)
        if not waiting:
            baseline = self._with_tail([*waited, candidate], least) if waited and not logs else (mean, variance, count)
            self.mean, self.variance, self.count = level or baseline
            self.usual = self.usual if is_spike else self.mean
            if self.count <= START:
                self.start = max(self.start, abs(value)) if self.count > 1 else abs(value)
        return spikes, is_spike

    def judge(self, loss: float, least_excess: float | None = None, *, learns: bool = True) -> bool:
        """Return whether a finite loss is a spike, for who cannot wait for the losses after it: without excursions.

        ``least_excess``: see :func:`judge`; by default :data:`LEAST_LOSS_EXCESS` of the mean. ``learns``: whether a spike moves
        the baseline, which it must not if what it led to is undone.
        """
        least = self._least(self.mean) if least_excess is None else least_excess
        high, mean, variance, count = judge(loss, self.mean, self.variance, self.count, least)
        far = high and loss - self.mean > skewed_reach(self.mean, self.variance)
        is_spike = self._is_spike(Candidate(loss, 0, 0), far=far)
        if learns or not is_spike:
            self.mean, self.variance, self.count = mean, variance, count
        return is_spike

    def give_up(self, *, ended: bool = False) -> list[Candidate]:
        """Return the spikes among the candidates, which one follows that is not finite; ``ended``: which nothing follows."""
        return self._release(short=ended)

    def _judge(
        self, candidate: Candidate, *, high: bool, far: bool, explained: bool
    ) -> tuple[list[Candidate], bool, tuple[float, float, int] | None]:
        """Take the next value.

        ``high``: it is above this baseline by as many deviations as a normal value never is; ``far``: by as much as a spike
        has to be. Return the spikes that are certain by now, whether this value is one, and the new level if it is one.
        """
        if not self.waiting and (self.bursts.length or not high):
            is_spike = self._is_spike(candidate, far=far)
            return [candidate] if is_spike else [], is_spike, None
        if not high and candidate.value - self.mean < self._reach(self.mean, self.variance, CALM_LIMIT):
            self.calm += 1.0
            return (self._release() if self.calm >= CALM else []), False, None
        if not self.waiting:
            self.explained, self.first = 0.0, candidate.value
        self.explained += explained
        is_last = len(self.waiting) == SETTLED - 1
        is_blow_up = far and self._is_blow_up(candidate.value, explained=explained)
        if is_blow_up or (is_last and self.explained < SETTLED / 2):
            spikes = self._release(candidate)
            return spikes, candidate in spikes, None
        self.waiting.append(candidate)
        return [], False, self._settle() if is_last else None

    def _release(self, last: Candidate | None = None, *, short: bool = True) -> list[Candidate]:
        """Return the spikes among the candidates, which are over unless there is a ``last`` one that goes beyond them."""
        candidates, calm = self.waiting if last is None else [*self.waiting, last], int(self.calm)
        self.waiting, self.calm = [], 0.0
        least = self.mean + self._reach(self.mean, self.variance, Z_LIMIT)
        far = [candidate for candidate in candidates if candidate.value > least]
        spikes = [candidate for candidate in far if self._is_spike(candidate, far=True)]
        for _ in range(calm if last is None else 0):
            self.bursts.judge(self.mean, self.mean, is_spike=False)
        together = far if self._logs else candidates  # the norms beside an outlier vary as well
        if short and last is None and len(together) <= SHORT_BURST:
            if self._logs and self.explained >= len(candidates):
                return []
            least = self.mean + (SHORT_NORM if self._logs else SHORT_LOSS) * (least - self.mean)
        return [candidate for candidate in spikes if candidate.value > least]

    def _with_tail(self, candidates: list[Candidate], least: float) -> tuple[float, float, int]:
        """Return the baseline with those losses that are no further above it than losses of a long tail are."""
        mean, variance, count = self.mean, self.variance, self.count
        most = mean + skewed_reach(mean, variance)
        for candidate in candidates:
            if candidate.value <= most:
                _, mean, variance, count = judge(candidate.value, mean, variance, count, least)
        return mean, variance, count

    def _is_spike(self, candidate: Candidate, *, far: bool) -> bool:
        peak = self.bursts.peak
        likely = peak + (_TWICE if self._logs else max(0.0, peak - self.mean))  # twice as far from the mean
        return self.bursts.judge(candidate.value, likely, is_spike=far)

    def _is_blow_up(self, value: float, *, explained: bool) -> bool:
        if value > self._most(self.mean, ORDERS) and not (self._logs and explained):
            return True
        if not self.waiting:
            return False
        level = median(candidate.value for candidate in self.waiting)
        rise = max(self._reach(level, self._scaled(level), Z_LIMIT), HALF * (level - self.mean))
        return value - level > rise or value > self._most(self.first, MOST_RISE)

    def _most(self, level: float, factor: float) -> float:
        return level + 2 * LEAST_NORM_EXCESS if self._logs else factor * max(abs(level), LEAST_SCALE)

    def _least(self, level: float) -> float:
        return LEAST_NORM_EXCESS if self._logs else LEAST_LOSS_EXCESS * max(1.0, abs(level))

    def _reach(self, level: float, variance: float, limit: float) -> float:
        """Return the distance above a level that so many deviations are, and a spike's least excess in that proportion."""
        reach = max(limit * sqrt(variance), self._least(level) * limit / Z_LIMIT)
        return reach if self._logs else max(reach, skewed_reach(level, variance, limit))

    def _scaled(self, level: float) -> float:
        """Return the variance at another level."""
        usual = max(abs(self.mean), sqrt(self.variance))
        if self._logs or usual <= 0.0:
            return self.variance
        deviation = abs(level) * (sqrt(self.variance) / usual)  # at most the level, also where both have decayed to nearly 0
        return max(self.variance, deviation * deviation)

    def _settle(self) -> tuple[float, float, int] | None:
        """Return the new level as a baseline, unless the candidates still rise: then the older half is forgotten."""
        values = [candidate.value for candidate in self.waiting]
        first, second = _mean(values[: SETTLED // 2]), _mean(values[SETTLED // 2 :])
        level, self.calm = _mean(values), 0.0
        scaled = self._scaled(level)
        if second - first > RISING * sqrt(scaled):
            self.waiting, self.explained = self.waiting[SETTLED // 2 :], min(self.explained, SETTLED / 2)
            return None
        self.waiting = []
        moves = [after - before for before, after in pairwise(values)]
        noise = _mean([move * move for move in moves]) / 2  # which a fall does not add to
        return level, max(scaled, noise), WARM_UP


def _mean(values: list[float]) -> float:
    """Return the mean: infinite where ``fmean`` and ``**`` raise OverflowError, which one value must not do to the fold."""
    return sum(value / len(values) for value in values)


LEAST_DECLINE = log(100.0)
"""On the log scale: the norm of an ordinary run varies by a few tens at most, warm-up and clipping included."""
LASTING = 5
"""Measured steps in a row that make a verdict."""


def judge_low(norm: float, mean: float, variance: float, count: int, low: int) -> tuple[bool, int]:
    """Judge one finite norm against the baseline of the logarithms before it.

    Return whether it has vanished, and ``low`` updated: the number of consecutive measured steps with a low norm.
    """
    if norm > 0.0:
        limit = max(Z_LIMIT * sqrt(variance), LEAST_DECLINE)
        low = low + 1 if count >= WARM_UP and mean - log(norm) > limit else 0
    else:
        low += 1
    return low >= LASTING, low


LEFT, NEAR, RAMP = 10.0, 2.0, 3.0
"""Factors on the first loss: at the one, within the first ``WARM_UP`` losses, a loss has left its start; below the other it has
come back. A policy gradient's loss is as long as its episodes: it may leave its start, and comes back with each short one. A
loss with a growing weight grows with the steps' number: it has to be so many times that"""
LEAST_FIRST = 1e-3
"""A loss below that is none of an untrained model: of a batch in which all is masked, or a policy's in its first step"""
LEAST_AFTER = 50
"""Losses after that without a return"""
LEAST_SHARE = 0.01
"""Of the loss, that a step lowers it by to first order. Of 180 random trainings with a rate that was too high from the start 32
stayed away for so long, with 0.39 or more (of SGD; of AdamW 24); MoCo's has 3e-5 to 9e-4 (SGD, queues of 1,024 to 65,536)"""
LEAST_RATE = 0.01
"""Half of the deviation of weights that transformers begin with, which Adam's first step of that rate takes. Its share of the
loss grows with the loss's scale: MoCo's by Adam at 1e-3 has 1.5, summed over a batch of 128"""
AT_START, BACK = 0, (1 << 63) - 1
"""The two states besides the number of the loss that left: it has not, or it has come back and is judged no more"""


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
    """Return whether the loss has been away for long enough."""
    return AT_START < left < BACK and number - left >= LEAST_AFTER


def are_long(loss: float, rate: float | None, square: float | None) -> bool:
    """Return whether steps can have taken a loss so far.

    ``rate``: their mean. ``square``: that of the last quarter of squared norms, since the first steps of a contrastive loss may
    be as long. ``None`` if unknown.
    """
    if rate is None:
        return True
    return rate >= LEAST_RATE and (square is None or rate * square >= LEAST_SHARE * loss)


class Divergence:
    """Whether one model's loss has grown without end, for code that judges each loss as it comes, without a learning rate.

    The growth may be so smooth that no loss is far above those before it. A loss has diverged that is ``ORDERS`` above the
    first ones, and ``RAMP`` times what a weight that is ramped up could have made of them, ``LEAST_AFTER`` times in a row.
    """

    __slots__ = ("_away", "_number", "start")

    def __init__(self) -> None:
        self._away = self._number = 0
        self.start = 0.0
        """The greatest magnitude among the first losses, as :func:`leaves_start` takes it"""

    def add(self, loss: float) -> bool:
        """Add a finite loss; return whether the model's has diverged."""
        if self._number < START and not leaves_start(loss, self.start, self._number):
            self.start = max(self.start, abs(loss))
        self._number += 1
        least = max(ORDERS * max(self.start, LEAST_SCALE), RAMP * self._number * self.start)
        self._away = self._away + 1 if loss > least else 0
        return self._away >= LEAST_AFTER


HEALTHY = 50
"""Steps after which an anomaly is past, as many as a loss that diverges is watched for (``LEAST_AFTER``)"""


class LastAnomaly(NamedTuple):
    """The last reported anomaly of a kind."""

    step: int
    usual: float | None
    """what was usual before it"""
    reported: int
    """number of all that were reported; others may have come after the last one"""


def healthy_steps(
    kind: str, count: int, last: LastAnomaly | None, losses: Mapping[int, float], norms: Mapping[int, float]
) -> int:
    """Return the number of healthy steps since the last anomaly of a kind that is not active; 0 if it is not past.

    ``count``: number of its anomalies. ``losses``, ``norms``: finite or not, by step, of the last steps.
    """
    newest = max([*losses, *norms], default=0)
    begin = newest - HEALTHY + 1
    recent = {step: loss for step, loss in losses.items() if step >= begin}
    if not all(map(isfinite, recent.values())):
        return 0
    is_exact = last is not None and last.reported >= count
    since = newest - last.step if last is not None and is_exact else HEALTHY
    if since < HEALTHY:
        return 0
    if not is_exact and min([*losses, *norms], default=newest) > begin:
        return 0
    if kind in {"nonfinite_loss", "diverged"}:
        return since if recent else 0
    after = last.step + 1 if last is not None else begin
    values = list(recent.values()) if kind == "loss_spike" else [norm for step, norm in norms.items() if step >= after]
    if not values or not all(map(isfinite, values)):
        return 0
    return since if kind == "nonfinite_gradient" or _is_usual(kind, values, last, is_exact=is_exact) else 0


def _is_usual(kind: str, values: Sequence[float], last: LastAnomaly | None, *, is_exact: bool) -> bool:
    """Return whether values are near what was usual before; each of them, if there may have been anomalies among them."""
    if last is None or last.usual is None or not isfinite(last.usual):
        return False
    if kind == "gradient_vanishing":
        return (median(values) if is_exact else min(values)) > last.usual / exp(LEAST_DECLINE)
    value = median(values) if is_exact else max(values)
    if kind == "gradient_explosion":
        return value < last.usual * exp(LEAST_NORM_EXCESS)
    return value - last.usual < LEAST_LOSS_EXCESS * max(1.0, abs(last.usual))


LEAST_BEFORE = 3
"""Least earlier measurements: a median of fewer is a single step's."""
LEAST_PART = 0.1
"""Least part of the excess"""
LEAST_FACTOR = 2.0
"""Least growth: a loss may leap without any gradient's doing so."""
LEAST_SHARED = 0.01
"""Least part of the excess of the layer where it began: one with a norm near zero grows by any factor by chance."""
SHARED = 2 / 3
"""Part of the largest growth, on the log scale, that layers have in common: of a thirtyfold one these are at least ten times
what they were, while norms of single steps vary by less than three."""


class BlownLayer(NamedTuple):
    """The layer, its gradient's norm in that step, and the median of the steps before."""

    layer: str
    norm: float
    usual: float


def blown_layer(norms: Mapping[str, float], before: Sequence[Mapping[str, float]]) -> BlownLayer | None:
    """Return the layer in which the growth began; ``None`` if no layer has doubled, or too little is known.

    ``norms``: the norm of each layer's gradient, in the model's order; ``before``: the same of measured steps before.

    Of the layers with a tenth of the excess one has grown most; the last of those that grew with it is returned.
    """
    layers = [BlownLayer(name, norm, usual) for name, norm in norms.items() if (usual := _usual(name, before)) is not None]
    grown = [layer for layer in layers if isfinite(layer.norm) and layer.norm > LEAST_FACTOR * layer.usual]
    excess = sum(map(_excess, grown))
    factor = max((_factor(layer) for layer in grown if _excess(layer) >= LEAST_PART * excess), default=inf)
    shared = [layer for layer in grown if _factor(layer) >= factor**SHARED and _excess(layer) >= LEAST_SHARED * excess]
    return shared[-1] if shared else None


def _factor(layer: BlownLayer) -> float:
    return layer.norm / layer.usual if layer.usual else inf


def _excess(layer: BlownLayer) -> float:
    return layer.norm * layer.norm - layer.usual * layer.usual


def _usual(name: str, before: Sequence[Mapping[str, float]]) -> float | None:
    past = [norm for norms in before if isfinite(norm := norms.get(name, inf))]
    return median(past) if len(past) >= LEAST_BEFORE else None
