"""Statistics of plain tensors, computed on their device as float64 and returned there: nothing waits.

Mean, deviation, extremes and quantiles are those of the finite elements, so that one NaN does not hide the others; the norm is
that of all elements. The deviation is the sample's (n - 1), as ``torch.std``'s. Parts are combined by Chan, Golub & LeVeque
1983, "Algorithms for computing the sample variance", eq. 2.1. Quantiles interpolate linearly, as ``torch.quantile`` does.
"""

from __future__ import annotations

import functools
import threading
from math import inf, isnan, nan, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from torchobs.support.even_sample import evenly_sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHUNK = 1 << 22
"""Elements that are converted at once: 32 MiB as float64"""
SAMPLE = 1 << 18
"""Most elements that are sorted for quantiles and the histogram: of a larger tensor, evenly spaced ones"""
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 20


class _OwnWork(threading.local):
    """Whether this thread computes statistics, whose NaN and infinities are none of the program's."""

    on = False


own_work = _OwnWork()
F = TypeVar("F", bound="Callable[..., Any]")


def _own(function: F) -> F:
    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        before, own_work.on = own_work.on, True
        try:
            return function(*args, **kwargs)
        finally:
            own_work.on = before

    return cast("F", marked)


class Moments(NamedTuple):
    """What :func:`moments` computes, read."""

    finite: float
    nan: float
    infinite: float
    zeros: float
    mean: float
    squares: float
    """Sum of squared deviations from the mean"""
    min: float
    max: float
    norm_squared: float

    @property
    def std(self) -> float:
        """The sample's standard deviation; NaN for fewer than two finite elements."""
        return sqrt(self.squares / (self.finite - 1)) if self.finite > 1 and self.squares >= 0 else nan

    @property
    def norm(self) -> float:
        """The L2 norm of all elements: NaN or infinite if one of them is."""
        return nan if self.nan else inf if self.infinite else sqrt(self.norm_squared) if not isnan(self.norm_squared) else nan

    def with_zeros(self, count: int) -> Moments:
        """Return the moments of the same elements and so many zeros, by eq. 2.1 of Chan, Golub & LeVeque."""
        if not count:
            return self
        finite = self.finite + count
        mean = 0.0 if isnan(self.mean) else self.mean
        return self._replace(
            finite=finite, zeros=self.zeros + count, mean=mean * self.finite / finite,
            squares=self.squares + mean * mean * self.finite * count / finite,
            min=0.0 if isnan(self.min) else min(self.min, 0.0), max=0.0 if isnan(self.max) else max(self.max, 0.0),
        )  # fmt: skip

    def described(self, scale: float = 1.0) -> dict[str, Any]:
        """Return what results tell of it, by the names of their fields; values are divided by ``scale``."""
        values = {"norm": self.norm, "mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        counts = {"zero_count": self.zeros, "nan_count": self.nan, "inf_count": self.infinite}
        return {name: value / scale for name, value in values.items()} | {name: int(n) for name, n in counts.items()}


NOTHING = Moments(0, 0, 0, 0, nan, 0, nan, nan, 0)
"""Moments of no elements"""
UNKNOWN = NOTHING._replace(norm_squared=nan)
"""Moments of a tensor without numbers, such as one on the device meta"""


@_own
def moments(x: Any, nans: Any = None) -> Any:
    """Return the :class:`Moments` of a strided tensor as a one-dimensional tensor on its device. Call it under ``no_grad``.

    ``nans``: mask of elements that count as NaN whatever they hold.
    """
    import torch

    flat, marks = x.reshape(-1), None if nans is None else nans.reshape(-1)
    if not flat.numel():
        return _numbers(torch, NOTHING, x.device)
    total = None
    for begin in range(0, flat.numel(), CHUNK):
        mark = None if marks is None else marks[begin : begin + CHUNK]
        part = _part(torch, flat[begin : begin + CHUNK], mark)
        total = part if total is None else _combined(torch, total, part)
    count, is_nan, infinite, zeros, mean, squares, least, greatest, norm = total or ()
    defined = (torch.where(count > 0, value, nan) for value in (mean, least, greatest))
    mean, least, greatest = defined  # they need a finite element
    return torch.stack([count, is_nan, infinite, zeros, mean, squares, least, greatest, norm])


def wide(torch: Any, device: Any) -> Any:
    """Return the type to compute in: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _part(torch: Any, x: Any, mark: Any) -> tuple[Any, ...]:
    number = wide(torch, x.device)
    x = x.to(number)
    is_nan = torch.isnan(x) if mark is None else torch.isnan(x) | mark
    infinite = torch.isinf(x) & ~is_nan
    odd = is_nan | infinite
    finite = torch.where(odd, 0.0, x)
    count = (~odd).sum().to(number)
    mean = finite.sum() / count.clamp(min=1)
    squares = torch.where(odd, 0.0, x - mean).square().sum()
    return (
        count, is_nan.sum().to(number), infinite.sum().to(number), ((x == 0) & ~odd).sum().to(number), mean, squares,
        torch.where(odd, inf, x).min(), torch.where(odd, -inf, x).max(), finite.square().sum(),
    )  # fmt: skip


def _combined(torch: Any, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    count = one[0] + other[0]
    safe, delta = count.clamp(min=1), other[4] - one[4]
    return (
        count, one[1] + other[1], one[2] + other[2], one[3] + other[3],
        (one[0] * one[4] + other[0] * other[4]) / safe,
        one[5] + other[5] + delta.square() * one[0] * other[0] / safe,
        torch.minimum(one[6], other[6]), torch.maximum(one[7], other[7]), one[8] + other[8],
    )  # fmt: skip


def _numbers(torch: Any, numbers: Iterable[float], device: Any) -> Any:
    """Return numbers on a device, filled in there: a copy from the host would wait."""
    return torch.stack([torch.full((), number, dtype=wide(torch, device), device=device) for number in numbers])


@_own
def distribution(x: Any, nans: Any = None) -> Any:
    """Return :data:`QUANTILES`, then :data:`BINS` counts between least and greatest, of the finite elements of a sample.

    The last number is how many elements the sample has. Call it under ``no_grad``; ``x`` is not empty.
    """
    import torch

    number = wide(torch, x.device)
    flat, marks = x.reshape(-1), None if nans is None else nans.reshape(-1)
    sample = evenly_sampled(flat, SAMPLE).to(number)
    odd = ~torch.isfinite(sample) if marks is None else ~torch.isfinite(sample) | evenly_sampled(marks, SAMPLE)
    ordered = torch.where(odd, inf, sample).sort().values
    count = (~odd).sum()
    places = _numbers(torch, QUANTILES, x.device) * (count - 1).clamp(min=0)
    below, above = ordered[places.floor().long()], ordered[places.ceil().long()]
    quantiles = torch.where(below == above, below, below + (above - below) * (places - places.floor()))
    low, high = ordered[0], ordered[(count - 1).clamp(min=0).reshape(1)]  # a 0-dimensional index would be read
    steps = torch.arange(1, BINS, dtype=number, device=x.device) / BINS
    inner = torch.searchsorted(ordered, low + (high - low) * steps)
    edges = torch.cat([torch.zeros_like(inner[:1]), inner.clamp(max=count), count.reshape(1)])
    counts = edges.diff().to(number)
    return torch.cat([torch.where(count > 0, quantiles, nan), counts, count.reshape(1).to(number)])
