"""From when on is it no training any more, if nothing of a step is seen?"""

from __future__ import annotations

from math import inf

from torchobs.detect.slow_steps import FACTOR

LEAST_S = 10.0
"""What a script does between two steps (a plot, a message, a garbage collection) is a part of training up to here."""


def idle_from(longest_s: float) -> float:
    """Return the seconds from which on: three times the longest step so far. Infinity while there was none (not positive)."""
    return max(FACTOR * longest_s, LEAST_S) if longest_s > 0 else inf
