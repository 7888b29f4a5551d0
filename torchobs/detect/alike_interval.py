"""Sampling by number that gives all ranks the same numbers, although each measures durations of its own.

The interval is a power of two. Two ranks whose measurements fall on different sides of a limit differ by a factor of two, and
what the one with the longer interval takes the other takes as well.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST = 1 << 40


def alike_interval(unit: float, target: float) -> int:
    """Return the smallest power of two that, times ``unit``, reaches ``target``; at most 2^40, also for a unit of 0."""
    if unit * _MOST <= target:
        return _MOST
    return 1 << max(ceil(target / unit) - 1, 0).bit_length()


def taken(numbers: Iterable[int], interval: int) -> list[int]:
    """Return multiples of ``interval``, a power of two, and all powers of two, so that the first ones come sooner."""
    return [number for number in numbers if number > 0 and (not number % interval or not number & (number - 1))]
