"""Detect a learning rate that is zero since some step, or next to it: the training goes on, and changes nothing.

Next to zero is a rate below float32's rounding of the highest one of the same model: a step that doubled a weight at that does
not change its last bit any more. It may change others (small ones, or in float64), which is not known here.
A scheduler that counts epochs and is stepped in each batch gets there within some hundred steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

LEAST_ZEROS, ZEROS_SHARE = 20, 0.05
"""Steps, and their share of all, with a rate of zero at the end: a schedule may end there, and its last steps are few"""
ENOUGH = 200
"""Steps that suffice, where the ones before them are not known"""
NEGLIGIBLE = 2.0**-24
"""Of the highest rate: half of the distance between float32 numbers near 1"""
OTHER_GROUPS = 7
"""Most parameter groups of which the rate is recorded, besides the first (``catalog.GROUP``): there may be more"""


class ZeroRate(NamedTuple):
    """Steps in a row, up to the last one, with a rate of zero, or a negligible one."""

    first: int
    steps: int
    is_begun_before: bool
    """Whether the steps before the first one are not known"""
    highest: float = 0.0
    """The highest rate that is known, if that of the steps is negligible beside it and not zero"""


def zero_rate(rates: Sequence[tuple[int, float | None]], began: int = 0) -> ZeroRate | None:
    """Return since when the rate is zero, or negligible; ``None`` if the last one's is not, or for too short a time.

    ``rates``: of steps, oldest first, the rate of the first parameter group; ``None`` where it is not known. ``began``: the
    step in which the training of the last model began, or 0: what is negligible for it has no measure in another one's rates.
    """
    highest = max((rate for step, rate in rates if step >= began and rate is not None and isfinite(rate)), default=0.0)
    return _at_most(0.0, rates, 0.0) or _at_most(NEGLIGIBLE * highest, rates, highest)


def _at_most(limit: float, rates: Sequence[tuple[int, float | None]], highest: float) -> ZeroRate | None:
    begins = None
    for index in range(len(rates) - 1, -1, -1):
        rate = rates[index][1]
        if rate is not None and not 0.0 <= rate <= limit:
            break
        begins = index if rate is not None else begins
    if begins is None:
        return None
    first, last = rates[begins][0], rates[-1][0]
    count, is_begun_before = last - first + 1, begins == 0 and first > 1
    if count < LEAST_ZEROS or count < min(ZEROS_SHARE * last, ENOUGH if is_begun_before else last):
        return None
    return ZeroRate(first, count, is_begun_before, highest)
