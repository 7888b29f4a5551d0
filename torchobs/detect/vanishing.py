"""Detect vanishing gradients: far below their own past for a while, or exactly zero.

One small norm is ordinary (a batch that is fitted already, a masked one); a hundredth of the usual norm in five consecutive
measured steps is not: dead units, a detached graph, underflow in half precision without a loss scaler. The baseline is that of
:mod:`torchobs.detect.spikes`, a mean and variance on the log scale; it follows a norm that declines slowly, as in training
that converges. A norm of exactly zero has no logarithm and needs no baseline.
"""

from __future__ import annotations

from math import log, sqrt

from torchobs.detect.spikes import WARM_UP, Z_LIMIT

LEAST_DECLINE = log(100.0)
"""On the log scale: the norm of an ordinary run varies by a few tens at most, warm-up and clipping included."""
LASTING = 5
"""Measured steps in a row that make a verdict."""


def judge_low(norm: float, mean: float, variance: float, seen: int, low: int) -> tuple[bool, int]:
    """Judge one finite norm against the baseline of the logarithms before it.

    Return whether it has vanished, and ``low`` updated: the number of consecutive measured steps with a low norm.
    """
    if norm > 0.0:
        limit = max(Z_LIMIT * sqrt(variance), LEAST_DECLINE)
        low = low + 1 if seen >= WARM_UP and mean - log(norm) > limit else 0
    else:
        low += 1
    return low >= LASTING, low
