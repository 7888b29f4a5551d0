"""Statistics of a tensor, computed where it is, and completed from a few numbers once these have arrived.

A :class:`TensorRow` is exact, and for a person who waits: mean, deviation and extremes of the finite elements, so that one NaN
does not hide the others, the norm of all, in float64. The deviation is the sample's (n - 1), as ``torch.std``'s.

:class:`ActivationStats` are for the outputs of all layers in a training that goes on. Elements that are not finite count as
zero in the sums, and are taken out of them afterwards. An output of more than ``MOST_ELEMENTS`` is represented by its first
part: the first samples of the batch, then the first places of a sequence. The share of zeros among 262,144 elements is known to
within 0.1 % (its standard error is at most ``1 / (2 * sqrt(n))``), and no temporary memory is larger than 1 MiB.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import hypot, inf, isnan, nan, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.support.result import Result
from torchobs.tensors.losses import wide_type
from torchobs.tensors.values import elements_of, name_of, plain, shape_of, values_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CHUNK = 1 << 22
"""Elements that are converted at once: 32 MiB as float64"""


class _OwnWork(threading.local):
    """Whether this thread computes statistics: their NaN and infinities are not the program's."""

    on = False


own_work = _OwnWork()


@contextmanager
def computing() -> Iterator[None]:
    """Mark what this thread computes in the block as own work; without gradients."""
    before, own_work.on = own_work.on, True
    try:
        with torch.no_grad():
            yield
    finally:
        own_work.on = before


class Moments(NamedTuple):
    """The numbers of :func:`moments`, read."""

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
    def norm(self) -> float:
        """The L2 norm of all elements: NaN or infinite if one of them is."""
        return nan if self.nan else inf if self.infinite else sqrt(self.norm_squared)

    def described(self, scale: float = 1.0) -> dict[str, Any]:
        """Return the fields for a result, by name; values are divided by ``scale``."""
        values = {"mean": self.mean, "min": self.min, "max": self.max} if self.finite else {}
        if self.finite > 1:
            values["std"] = sqrt(self.squares / (self.finite - 1))
        counts = {"zero_count": self.zeros, "nan_count": self.nan, "inf_count": self.infinite}
        absent = dict.fromkeys(("mean", "std", "min", "max"))
        scaled = {name: value / scale for name, value in (values | {"norm": self.norm}).items()}
        return absent | scaled | {name: int(n) for name, n in counts.items()}


NOTHING = Moments(0, 0, 0, 0, nan, 0, nan, nan, 0)
"""Moments of no elements"""


def moments(x: Any) -> Any:
    """Return the :class:`Moments` of a strided tensor as a one-dimensional tensor on its device."""
    if not x.numel():
        return filled(NOTHING, x.device)
    parts, number = x.reshape(-1).split(CHUNK), wide_type(x.device)
    rows = torch.stack([_sums(part.to(number)) for part in parts])
    count, is_nan, infinite, zeros, total, norm = rows[:, :6].sum(0)
    mean = total / count  # NaN without a finite element
    odd = ((part.to(number) - mean).nan_to_num_(0.0, 0.0, 0.0) for part in parts)
    squares = sum((part.square_().sum() for part in odd), torch.zeros_like(count))
    least, greatest = (torch.where(count > 0, value, nan) for value in (rows[:, 6].min(), rows[:, 7].max()))
    return torch.stack([count, is_nan, infinite, zeros, mean, squares, least, greatest, norm])


def _sums(x: Any) -> Any:
    is_finite, is_nan = x.isfinite(), x.isnan()
    count, nans = is_finite.sum(), is_nan.sum()
    counts = count, nans, x.numel() - count - nans, (x == 0).sum()
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    extremes = torch.where(is_finite, x, inf).min(), torch.where(is_finite, x, -inf).max()
    return torch.stack([*(count.to(x.dtype) for count in counts), finite.sum(), finite.square().sum(), *extremes])


def filled(numbers: Iterable[float], device: Any) -> Any:
    """Return numbers on a device, filled in there: a copy from the host would wait."""
    return torch.stack([torch.full((), number, dtype=wide_type(device), device=device) for number in numbers])


class Numbers:
    """One-dimensional tensors on any devices, to be read together as lists of floats."""

    def __init__(self) -> None:
        self._parts: dict[Any, list[tuple[int, Any]]] = {}
        self._count = 0

    def add(self, numbers: Any) -> int:
        """Add a one-dimensional float tensor; return its index in what is read."""
        index, self._count = self._count, self._count + 1
        self._parts.setdefault(numbers.device, []).append((index, numbers))
        return index

    def read(self) -> list[list[float]]:
        """Return the numbers, after one copy for each device."""
        results: list[list[float]] = [[] for _ in range(self._count)]
        for parts in self._parts.values():
            numbers = iter(torch.cat([tensor for _, tensor in parts]).tolist())
            for index, tensor in parts:
                results[index] = list(islice(numbers, tensor.numel()))
        return results


@dataclass(frozen=True, slots=True)
class TensorRow(Result):
    """One parameter, gradient, input, output or activation. Statistics are of the finite elements, the norm of all.

    ``None`` where there is no such element.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    device: str
    numel: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    norm: float | None
    zero_count: int
    nan_count: int
    inf_count: int

    @property
    def defect(self) -> str:
        """Its values that are not finite, in words, or nothing."""
        counts = " and ".join(f"{n} {kind}" for n, kind in ((self.nan_count, "NaN"), (self.inf_count, "Inf")) if n)
        return f"{counts} of {self.numel} elements" if counts else ""


class Rows:
    """Tensors that are described together: computed where they are, read by one copy from each device."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self._taken: list[tuple[dict[str, Any], int | None]] = []

    def add(self, name: str, x: Any, values: Any = None) -> tuple[Any, str]:
        """Start to describe a tensor; return the result of :func:`values_of`. ``values``: its values, if known."""
        about = {"shape": shape_of(x), "dtype": name_of(x.dtype), "device": str(x.device), "numel": elements_of(x)}
        with computing():
            values, kind = values_of(x) if values is None else (values, "elements")
            self._taken.append(({"name": name} | about, None if values is None else self.numbers.add(moments(values))))
        return values, kind

    def described(self, read: list[list[float]] | None = None, scale: float = 1.0) -> tuple[TensorRow, ...]:
        """Return a row for each, divided by ``scale``, by what was read of ``numbers``; without it, read them."""
        read = self.numbers.read() if read is None else read
        nothing = NOTHING.described() | {"norm": None}
        numbers = [nothing if index is None else Moments(*read[index]).described(scale) for _, index in self._taken]
        return tuple(TensorRow(**about, **values) for (about, _), values in zip(self._taken, numbers, strict=True))


def norm_of(rows: Iterable[TensorRow]) -> float | None:
    """Return the L2 norm of all elements together; ``None`` if no tensor has numbers."""
    norms = [row.norm for row in rows if row.norm is not None]
    return (nan if any(map(isnan, norms)) else hypot(*norms)) if norms else None


def statistics(name: str, x: Any) -> TensorRow | None:
    """Return the row of one tensor of floating-point or complex numbers that :func:`plain` reads; ``None`` for any other."""
    if (values := plain(x)) is None:
        return None
    rows = Rows()
    with torch._C.DisableTorchFunctionSubclass():
        rows.add(name, x, values)
    return rows.described()[0]


MOST_ELEMENTS = 1 << 18
NUMBERS = 6
_DEPTH, _MOST_PARTS = 4, 16
"""Depth to which an output's tuples and dicts are searched for its first tensor, and most items of each"""


class ActivationStats(NamedTuple):
    """Statistics of a layer's output in one step, over all its calls; the first three are of the finite elements."""

    mean_abs: float
    std: float
    """Standard deviation, of the population"""
    max_abs: float
    zero: float
    """Share of the elements that are exactly zero"""
    nonfinite: float
    """Share of the elements that are NaN or infinite"""
    elements: int
    """Number of elements looked at"""
    shape: tuple[int, ...] = ()
    """of the first call's output"""


def first_tensor(output: Any, depth: int = _DEPTH) -> Any:
    """Return the first plain floating-point tensor of an output; ``None`` if it has none.

    ``output``: a tensor, or a nesting of tuples, lists, dicts and dataclasses (which ``transformers`` returns). Subclasses of
    ``torch.Tensor`` are not looked at: an operation on a sharded one may have to communicate.
    """
    kind = type(output)
    if kind is torch.Tensor:
        return output if output.is_floating_point() else None
    if not depth:
        return None
    parts: Sequence[Any] = ()
    if isinstance(output, (tuple, list)):
        parts = output[:_MOST_PARTS]
    elif isinstance(output, dict):
        parts = list(output.values())[:_MOST_PARTS]
    elif hasattr(kind, "__dataclass_fields__"):
        parts = [vars(output).get(name) for name in list(kind.__dataclass_fields__)[:_MOST_PARTS]]
    tensors = (first_tensor(part, depth - 1) for part in parts)
    return next((tensor for tensor in tensors if tensor is not None), None)


def numbers(output: Any) -> tuple[Any, int]:
    """Return a vector of ``NUMBERS`` numbers, where the output is, and how many elements were looked at.

    ``output``: a strided tensor of at least one element. To be called without grad.
    """
    part = output.detach()
    for dimension in range(part.dim()):
        rest = part.numel() // part.shape[dimension]
        part = part.narrow(dimension, 0, min(part.shape[dimension], max(1, MOST_ELEMENTS // rest)))
    values = part.reshape(-1)
    if values.dtype is not torch.float64:
        values = values.to(torch.float32)
    finite = torch.nan_to_num(values, 0.0, 0.0, 0.0)
    size, mean = finite.abs(), finite.mean()
    # not ``var_mean`` and norms, which take eight times as long on the CPU (2.2 ms for 262,144 elements)
    variance = torch.sub(finite, mean).square_().mean()
    nonzero = (torch.count_nonzero(x).to(values.dtype) for x in (values, size))
    return torch.stack([mean, variance, size.sum(), size.max(), *nonzero]), values.numel()


def combine(calls: Sequence[tuple[Sequence[float], int]]) -> ActivationStats:
    """Return the statistics of one or more calls, each with its ``numbers`` and how many elements were looked at."""
    elements = sum(count for _, count in calls)
    nonzero = sum(row[4] for row, _ in calls)
    finite = elements - nonzero + sum(row[5] for row, _ in calls)
    if not finite:
        return ActivationStats(0.0, 0.0, 0.0, (elements - nonzero) / elements, 1.0, elements)
    mean = sum(row[0] * count for row, count in calls) / finite
    # the deviations from the mean of all, so that nothing cancels where the mean is large: Chan, Golub & LeVeque 1983, and for
    # each element that counted as zero the square of the mean comes out again
    squares = sum(count * (row[1] + (row[0] - mean) * (row[0] - mean)) for row, count in calls)
    squares -= (elements - finite) * mean * mean
    return ActivationStats(
        sum(row[2] for row, _ in calls) / finite,
        sqrt(max(squares, 0.0) / finite),
        max(row[3] for row, _ in calls),
        (elements - nonzero) / elements,
        (elements - finite) / elements,
        elements,
    )
