"""``analyze_tensor`` and ``analyze_parameters``: what is in a tensor, in those of a model.

Mean, deviation, extremes and quantiles are those of the finite elements, so that one NaN does not hide the others; the norm is
that of all elements. The deviation is the sample's (n - 1), as ``torch.std``'s. Parts are combined by Chan, Golub & LeVeque
1983, "Algorithms for computing the sample variance", eq. 2.1. Quantiles interpolate linearly, as ``torch.quantile`` does.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import dataclass
from itertools import islice
from math import inf, isnan, nan, prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from torchobs.debug.findings import found, told
from torchobs.support.result import Result
from torchobs.support.tensor_parts import evenly_sampled, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, slots=True)
class Values:
    """What statistics are computed of."""

    tensor: Any
    """A strided, real tensor on the same device; ``None`` if there are no numbers to read"""
    kind: str
    """What they are of: elements, magnitudes, stored elements, local shard ..., or why there are none"""
    nan: Any = None
    """A mask of NaN where ``tensor`` does not show them (the magnitude of ``inf + nan j`` is inf)"""


def require_tensor(x: Any, function: str) -> None:
    """Raise ``TypeError`` with advice if ``x`` is no tensor."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{function}() takes a torch.Tensor, not {type(x).__name__}: convert it by torch.as_tensor()")


def values_of(x: Any) -> Values:
    """Return the numbers of a tensor. Call it under ``no_grad``.

    An uncoalesced sparse tensor is coalesced, and a strided nested tensor is put together, which on a device waits for it;
    everything else does not. Of a DTensor it is the local shard: no collective is called.
    """
    import torch

    if _has_no_data(torch, x):
        return Values(None, "no data")
    x = x.detach()
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        local = values_of(x.to_local())
        return Values(local.tensor, f"{local.kind} of the local shard", local.nan)
    try:
        return _real(torch, *_dense(torch, x))
    except (NotImplementedError, TypeError):  # by a TypeError a class of tensors says that it does not know the operator
        return Values(None, f"unreadable: torch converts no {str(x.dtype).removeprefix('torch.')} of this layout")


def is_uninitialized(x: Any) -> bool:
    """Return True for a parameter of a lazy module that has no shape yet."""
    import torch

    lazy: Any = torch.nn.parameter
    return isinstance(x, lazy.UninitializedTensorMixin)


def _has_no_data(torch: Any, x: Any) -> bool:
    if is_uninitialized(x) or x.device.type == "meta":
        return True
    return type(x).__name__ == "FakeTensor" or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _dense(torch: Any, x: Any) -> tuple[Any, str]:
    if x.is_nested:
        parts = [x.values()] if x.layout is torch.jagged else [part.reshape(-1) for part in x.unbind()]
        return torch.cat([part.reshape(-1) for part in parts]) if parts else x.new_empty(0), "elements"
    if x.layout is torch.sparse_coo:
        return x.coalesce().values(), "stored elements"
    if x.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        return x.values(), "stored elements"
    if x.layout is not torch.strided:
        return x.to_dense(), "elements"
    is_quantised = x.is_quantized or type(x).dequantize is not torch.Tensor.dequantize  # or by a class of its own: torchao's
    return (x.dequantize(), "dequantised elements") if is_quantised else (x, "elements")


def _real(torch: Any, dense: Any, kind: str) -> Values:
    if dense.is_complex():
        wide = dense.to(torch.complex64) if dense.dtype is torch.complex32 else dense
        return Values(wide.abs(), f"magnitudes of {kind}", torch.isnan(wide))
    if not dense.dtype.is_floating_point or dense.dtype.itemsize > 1:
        if dense.numel():
            dense.reshape(-1)[:1].double()  # raises for packed types, which have no conversion
        return Values(dense, kind)
    return Values(dense.float(), kind)  # float8 has no isnan


def shape_of(x: Any) -> tuple[int | str, ...]:
    """Return the shape; a dimension of unequal lengths (nested) is ``"*"``, an uninitialised parameter has none."""
    if is_uninitialized(x):
        return ()
    if not x.is_nested:
        return tuple(map(int, x.shape))
    return tuple(_length(x, dimension) for dimension in range(x.dim()))


def _length(x: Any, dimension: int) -> int | str:
    try:
        size = x.size(dimension)
    except RuntimeError:
        return "*"
    return size if type(size) is int else "*"


def elements_of(x: Any) -> int:
    """Return the number of elements, implicit zeros of a sparse tensor included."""
    if is_uninitialized(x):
        return 0
    return int(x.numel()) if x.is_nested else prod(map(int, x.shape))


def bytes_of(x: Any) -> int:
    """Return the bytes that hold the tensor's elements (of a sparse one with its indices, of a DTensor the local shard)."""
    import torch

    if _has_no_data(torch, x):
        return 0
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        return bytes_of(x.to_local())
    if hasattr(type(x), "__tensor_flatten__") and not x.is_nested:  # made of others: quantised values and their scales
        return sum(bytes_of(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return sum(int(part.numel() * part.element_size()) for part in stored(x))


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


POLL_S = 0.0005
"""How often an awaited copy is looked at, in seconds: kernels for a large tensor take about as long."""


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
        return self._split([flat.tolist() for flat in self._joined()])

    async def aread(self) -> list[list[float]]:
        """Return the numbers as :meth:`read` does, without blocking the event loop while a CUDA device computes."""
        return self._split([await _arrived(flat) for flat in self._joined()])

    def _joined(self) -> list[Any]:
        import torch

        return [torch.cat([tensor for _, tensor in parts]) for parts in self._parts.values()]

    def _split(self, by_device: list[list[float]]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in range(self._count)]
        for parts, flat in zip(self._parts.values(), by_device, strict=True):
            numbers = iter(flat)
            for index, tensor in parts:
                found[index] = list(islice(numbers, tensor.numel()))
        return found


async def _arrived(flat: Any) -> list[float]:
    if not flat.is_cuda:
        return list(flat.tolist())
    import torch

    events: Any = torch.cuda
    with torch.cuda.device(flat.device):
        landing = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        landing.copy_(flat, non_blocking=True)
        copied: Any = events.Event()
        copied.record()
    while not copied.query():  # noqa: ASYNC110  # CUDA sets no asyncio.Event
        await asyncio.sleep(POLL_S)
    return list(landing.tolist())


@dataclass(frozen=True, slots=True)
class TensorStats(Result):
    """One tensor. Mean, std, min, max, quantiles and histogram are of the finite elements; NaN if there are none."""

    name: str
    shape: tuple[int | str, ...]
    """``"*"`` is a dimension whose length varies (nested tensors)"""
    dtype: str
    device: str
    layout: str
    size_bytes: int
    """Bytes of its elements, with the indices of a sparse tensor; of a DTensor, the local shard's"""
    numel: int
    requires_grad: bool
    values: str
    """What the statistics are of: elements, stored elements of a sparse tensor, magnitudes of complex numbers, dequantised
    elements, the local shard of a DTensor; or why there are none"""
    counted: int
    """Elements that the statistics are of"""
    has_nan: bool
    has_inf: bool
    nan_count: int
    inf_count: int
    zero_count: int
    mean: float
    std: float
    min: float
    max: float
    norm: float
    """L2 norm of all of them: NaN or infinite if one is"""
    quantiles: dict[str, float]
    histogram: tuple[int, ...]
    """Counts in 20 equal bins between ``min`` and ``max``"""
    sampled: int
    """Elements that quantiles and histogram are of: evenly spaced ones of a tensor with more than 262,144"""


@dataclass(frozen=True, slots=True)
class ParameterStats(Result):
    """One parameter."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    device: str
    trainable: bool
    numel: int
    mean: float
    std: float
    min: float
    max: float
    norm: float
    zero_count: int
    nan_count: int
    inf_count: int


@dataclass(frozen=True, slots=True)
class ParameterAnalysis(Result):
    """The parameters of a model, each named once however often it is shared."""

    model: str
    numel: int
    trainable: int
    size_bytes: int
    norm: float
    """L2 norm of all parameters on this rank; NaN or infinite if an element is"""
    has_nan: bool
    has_inf: bool
    anomalies: tuple[str, ...]
    parameters: tuple[ParameterStats, ...]


def analyze_tensor(x: Any, name: str = "tensor") -> TensorStats:
    """Return shape, type, device, bytes and statistics of a tensor of any kind, after one transfer from its device.

    Sparse tensors are analysed by their stored elements (a COO tensor is coalesced, which on a device waits once more), complex
    ones by magnitude, quantised ones dequantised, a DTensor by its local shard without a collective; a meta or fake tensor has
    no numbers. The tensor is not changed, and nothing is added to its graph. NaN and Inf are logged and recorded as an event.

    Raises:
        TypeError: ``x`` is not a tensor.
    """
    numbers, build = start_tensor(x, name, "analyze_tensor")
    return build(numbers.read())


def start_tensor(x: Any, name: str, function: str) -> tuple[Numbers, Callable[[list[list[float]]], TensorStats]]:
    """Start the computations of :func:`analyze_tensor`; return the device's numbers, and what makes the result of them."""
    require_tensor(x, function)
    import torch

    with torch.no_grad():
        values, numbers = values_of(x), Numbers()
        if values.tensor is not None:
            numbers.add(moments(values.tensor, values.nan))
            if values.tensor.numel():
                numbers.add(distribution(values.tensor, values.nan))
    counted = 0 if values.tensor is None else values.tensor.numel()

    def build(read: list[list[float]]) -> TensorStats:
        stats = _tensor_stats(x, name, values.kind, counted, read)
        if stats.has_nan or stats.has_inf:
            what = " and ".join(
                f"{count} {kind}" for kind, count in (("NaN", stats.nan_count), ("Inf", stats.inf_count)) if count
            )
            found("nonfinite_tensor", f"{name}: {what} of {stats.counted} {stats.values}", function=function, name=name)
        return stats

    return numbers, build


def _tensor_stats(x: Any, name: str, kind: str, counted: int, read: list[list[float]]) -> TensorStats:
    moments = Moments(*read[0]) if read else NOTHING
    shape = read[1] if len(read) > 1 else [nan] * len(QUANTILES) + [0.0] * (BINS + 1)
    return TensorStats(
        name=name, shape=shape_of(x), dtype=_name(x.dtype), device=str(x.device), layout=_name(x.layout),
        size_bytes=bytes_of(x), numel=elements_of(x), requires_grad=bool(x.requires_grad), values=kind, counted=counted,
        has_nan=moments.nan > 0, has_inf=moments.infinite > 0, nan_count=int(moments.nan), inf_count=int(moments.infinite),
        zero_count=int(moments.zeros), mean=moments.mean, std=moments.std if counted else nan, min=moments.min, max=moments.max,
        norm=moments.norm if counted else nan,
        quantiles={f"{place:g}": value for place, value in zip(QUANTILES, shape, strict=False)},
        histogram=tuple(int(count) for count in shape[len(QUANTILES) : -1]), sampled=int(shape[-1]),
    )  # fmt: skip


def _name(attribute: Any) -> str:
    return str(attribute).removeprefix("torch.")


def analyze_parameters(model: Any) -> ParameterAnalysis:
    """Return the statistics of each parameter of a model and of all of them, after one transfer from each device.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
    """
    named = parameters_of(model, "analyze_parameters")
    found_moments = read_moments([parameter for _, parameter in named])
    rows = tuple(
        ParameterStats(
            name=name, shape=shape_of(x), dtype=_name(x.dtype), device=str(x.device), trainable=bool(x.requires_grad),
            numel=elements_of(x), **m.described(),
        )
        for (name, x), m in zip(named, found_moments, strict=True)
    )  # fmt: skip
    odd = [row for row in rows if row.nan_count or row.inf_count]
    texts = [("nonfinite_parameter", row.name, f"{row.name}: {row.nan_count} NaN, {row.inf_count} Inf") for row in odd]
    return ParameterAnalysis(
        model=type(model).__name__, numel=sum(row.numel for row in rows), trainable=sum(r.numel for r in rows if r.trainable),
        size_bytes=sum(bytes_of(parameter) for _, parameter in named), norm=total_norm(found_moments),
        has_nan=any(row.nan_count for row in rows), has_inf=any(row.inf_count for row in rows),
        anomalies=told("analyze_parameters", texts), parameters=rows,
    )  # fmt: skip


def parameters_of(model: Any, function: str) -> list[tuple[str, Any]]:
    """Return the named parameters of a module. Raises ``TypeError`` with advice if it is none."""
    require_module(model, function)
    return list(model.named_parameters())


def require_module(model: Any, function: str) -> None:
    """Raise ``TypeError`` with advice if ``model`` is no module."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{function}() takes a torch.nn.Module, not {type(model).__name__}")


def require_optimizer(optimizer: Any, function: str) -> None:
    """Raise ``TypeError`` with advice if ``optimizer`` is none."""
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{function}() takes a torch.optim.Optimizer, not {type(optimizer).__name__}")


def require_scaler(scaler: Any, function: str, *methods: str) -> None:
    """Raise ``TypeError`` with advice if ``scaler`` is neither None nor a loss scaler that has what the function calls."""
    if scaler is not None and not all(hasattr(scaler, name) for name in ("get_scale", *methods)):
        raise TypeError(f"{function}() takes a torch.amp.GradScaler as scaler, not {type(scaler).__name__}")


def read_moments(tensors: Iterable[Any]) -> list[Moments]:
    """Return the moments of each tensor, after one transfer from each device; unknown ones for one without numbers."""
    import torch

    numbers = Numbers()
    with torch.no_grad():
        indices = [start_moments(x, numbers) for x in tensors]
    read = numbers.read()
    return [UNKNOWN if index is None else Moments(*read[index]) for index in indices]


def start_moments(x: Any, numbers: Numbers) -> int | None:
    """Start to compute the moments of a tensor; return their index in ``numbers``. Call it under ``no_grad``."""
    values = values_of(x)
    return None if values.tensor is None else numbers.add(moments(values.tensor, values.nan))


def total_norm(all_moments: Iterable[Moments], scale: float = 1.0) -> float:
    """Return the L2 norm of all elements together, divided by ``scale``."""
    parts = list(all_moments)
    whole = NOTHING._replace(
        nan=sum(part.nan for part in parts), infinite=sum(part.infinite for part in parts),
        norm_squared=sum(part.norm_squared for part in parts),
    )  # fmt: skip
    return whole.norm / scale
