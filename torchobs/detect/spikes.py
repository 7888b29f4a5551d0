"""Detect values far above what their own recent past makes likely.

The baseline is an exponentially weighted mean and variance (Finch 2009, "Incremental calculation of weighted mean and
variance", eqs. 124 and 143), the test a z-score and a least excess, as spike-aware trainers use it (ZClip, Kumar et
al. 2025, arXiv:2504.02507: EMA statistics of the gradient norm, z threshold 2.5 for clipping). An alert needs a rarer event
than clipping does, hence 6 standard deviations and an excess that matters by itself.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log, log1p, sqrt

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
runs of A2C it is the third or the fourth, and single outliers in 300 batches are always told."""
_KEPT = 1.0 - 1.0 / BURST_MEMORY
_LARGEST_EXPONENT = 709.0
"""Of a finite float64"""


def leaves_start(value: float, start: float, seen: int) -> bool:
    """Return True if a value among the first ``WARM_UP`` is orders of magnitude above the first ones.

    ``start`` is the greatest magnitude among the first ``START`` of the ``seen`` earlier values, without those for which this
    was true. A learning rate that is wrong from the start takes the loss from 2.3 to 1.5e10 before any baseline is learned.
    """
    scale = max(abs(start), LEAST_SCALE)
    if not 0 < seen < WARM_UP:
        return False
    return value / scale > (ORDERS if seen > 1 else ORDERS**2)


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
            told = self.length >= SHORT_BURST or self.recent < 1.0 or value > likely
            self.top = max(self.top, value) if self.length else value
            self.length += 1
            self.calm = 0.0
            return told
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


def judge(
    value: float, mean: float, variance: float, seen: int, least_excess: float, *, skewed: bool = False
) -> tuple[bool, float, float, int]:
    """Judge one finite value against its baseline and return ``(is_spike, mean, variance, seen)`` updated.

    ``least_excess`` is the smallest distance above the mean that counts, in the value's own unit; ``skewed`` values must also
    exceed ``skewed_reach``. A value moves the baseline by at most 3 standard deviations (winsorised), so that one outlier does
    not hide the next. A lasting new level is a spike for some tens of values at most, then the baseline: a hundredfold norm for
    10 values where the logarithm's deviation was 0.3, for 24 where it was 0.02. Values whose squares overflow reset
    the baseline: with an infinite variance nothing would ever be a spike again.
    """
    deviation = sqrt(variance)
    excess = value - mean
    is_spike = seen >= WARM_UP and excess > max(Z_LIMIT * deviation, least_excess)
    if is_spike and skewed:  # costly, so only for candidates: the fold judges every step
        is_spike = excess > skewed_reach(mean, variance)
    if seen >= WARM_UP:
        bound = max(LEARN_LIMIT * deviation, least_excess / 8)  # a new level is learned even without variance
        excess = min(max(excess, -bound), bound)
    alpha = max(ALPHA, 1.0 / (seen + 1))
    step = alpha * excess
    mean, variance = mean + step, (1.0 - alpha) * (variance + excess * step)
    if not (isfinite(mean) and isfinite(variance)):
        return is_spike, value, 0.0, 1
    return is_spike, mean, variance, min(seen + 1, WARM_UP * 100)


class LossBaseline:
    """The usual loss of one model, and its :class:`Bursts`, for who judges each loss as it comes."""

    __slots__ = ("_bursts", "_seen", "_variance", "mean")

    def __init__(self) -> None:
        self.mean = self._variance = 0.0
        self._seen = 0
        self._bursts = Bursts()

    def is_spike(self, loss: float, least_excess: float | None = None, *, learns: bool = True) -> bool:
        """Return True if a finite loss is a spike, as the exporter's metrics count them.

        ``least_excess``: see :func:`judge`; by default :data:`LEAST_LOSS_EXCESS` of the mean. ``learns``: whether a spike moves
        the baseline, which it must not if what it led to is undone.
        """
        least = LEAST_LOSS_EXCESS * max(1.0, abs(self.mean)) if least_excess is None else least_excess
        likely = self._bursts.peak + max(0.0, self._bursts.peak - self.mean)  # twice as far from the mean
        far, mean, variance, seen = judge(loss, self.mean, self._variance, self._seen, least, skewed=True)
        found = self._bursts.judge(loss, likely, is_spike=far)
        if learns or not found:
            self.mean, self._variance, self._seen = mean, variance, seen
        return found


class NormBaseline:
    """The usual gradient norm of one model, for who judges each step as it comes."""

    __slots__ = ("_mean", "_seen", "_start", "_variance")

    def __init__(self) -> None:
        self._mean = self._variance = self._start = 0.0
        self._seen = 0

    @property
    def limit(self) -> float:
        """The norm above which it explodes: far above its recent past, as :func:`judge` has it, or ``ORDERS`` above its start.

        The second is for a norm that grows so smoothly that its recent past grows with it; 0 until ``WARM_UP`` norms are known.
        """
        if self._seen < WARM_UP:
            return 0.0
        reach = max(Z_LIMIT * sqrt(self._variance), LEAST_NORM_EXCESS)
        exponent = min(self._mean + reach, self._start + log(ORDERS))
        return exp(exponent) if exponent < _LARGEST_EXPONENT else inf

    def add(self, norm: float) -> None:
        """Learn a norm; one that is not finite, or 0, teaches nothing."""
        if not 0.0 < norm < inf:
            return
        _, self._mean, self._variance, self._seen = judge(log(norm), self._mean, self._variance, self._seen, LEAST_NORM_EXCESS)
        if self._seen <= WARM_UP:
            self._start = self._mean
