"""Has the gradient all but disappeared: far below its own past for a while, or exactly zero?

One small norm is ordinary (a batch that is fitted already, a masked one), a hundredth of the usual norm in five measured
steps on end is not: dead units, a detached graph, underflow in half precision without a loss scaler. The usual is the
baseline of :mod:`torchobs.detect.spikes`, a mean and variance on the log scale; a norm that declines slowly, as in training
that converges, takes it along. A norm of exactly zero has no logarithm and needs no past.
"""

from __future__ import annotations

from math import log, sqrt

from torchobs.detect.spikes import WARM_UP, Z_LIMIT

LEAST_DECLINE = log(100.0)
"""On the log scale: an ordinary run's norm, warm-up and clipping included, varies by some tens at most."""
LASTING = 5
"""Measured steps in a row that make a verdict."""


def judge_low(norm: float, mean: float, variance: float, seen: int, low: int) -> tuple[bool, int]:
    """Judge one finite norm against the baseline of the logarithms before it.

    Returns whether it has vanished, and ``low`` updated: the measured steps in a row whose norm was low.
    """
    if norm > 0.0:
        limit = max(Z_LIMIT * sqrt(variance), LEAST_DECLINE)
        low = low + 1 if seen >= WARM_UP and mean - log(norm) > limit else 0
    else:
        low += 1
    return low >= LASTING, low
