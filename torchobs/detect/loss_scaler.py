"""Tell a loss scaler that is stuck from one that searches: it halves its scale at each step that it skips. Pure."""

from __future__ import annotations

LEAST_SKIPPED = 20
"""Steps in a row that a loss scaler skips before it is stuck: from 65,536, where torch's begins, 16 halvings lead to 1, and a
starting job may need some of them."""
LONGEST_SEARCH = 128
"""Halvings from float32's largest number to 1: no scaler needs more to find its scale, wherever it begins."""


def is_stuck(streak: float, scale: float | None) -> bool:
    """Return True if a scaler that has skipped so many steps in a row finds no scale; ``scale``: the present one, if known.

    One that was made with a large scale, or has grown it, may skip many steps in good health on its way down.
    """
    return streak >= LEAST_SKIPPED and (scale is None or scale <= 1 or streak >= LONGEST_SEARCH)
