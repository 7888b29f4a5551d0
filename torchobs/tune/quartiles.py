"""The median of measurements and what lies around it: step times have long tails, and no variance to speak of."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Quartiles(Result):
    """The median of some values, and the quartiles between which the middle half of them lies."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of two or more values, by linear interpolation between them."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Quartiles(middle, low, high)
