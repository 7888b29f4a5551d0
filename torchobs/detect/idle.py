"""Decide after how long without any boundary of a step the training counts as idle."""

from __future__ import annotations

from math import inf

from torchobs.detect.slow_steps import FACTOR

LEAST_S = 10.0
"""A pause between two steps (a plot, a message, a garbage collection) is part of training up to here."""


def idle_from(longest_s: float) -> float:
    """Return the idle threshold in seconds, three times the longest step so far; infinity before the first (not positive)."""
    return max(FACTOR * longest_s, LEAST_S) if longest_s > 0 else inf
