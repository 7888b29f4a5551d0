"""``inspect_tensor`` and ``inspect_parameters``: what is in a tensor, in those of a model.

Mean, deviation, extremes and quantiles are those of the finite elements, so that one NaN does not hide the others; the norm is
that of all elements. The deviation is the sample's (n - 1), as ``torch.std``'s. Quantiles interpolate linearly, as
``torch.quantile`` does.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from math import hypot, inf, isnan, nan, prod, sqrt
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.debug.findings import record_findings
from torchobs.support.result import Checked, Problem, Result
from torchobs.tensors.batches import is_mapping
from torchobs.tensors.losses import has_parameters_of, is_without_values, wide_type
from torchobs.tensors.values import evenly_sampled, stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def require(value: Any, kind: str, function: str) -> None:
    """Raise ``TypeError`` unless a value is of that class of torch, such as ``nn.Module``."""
    if not isinstance(value, attrgetter(kind)(torch)):
        raise TypeError(f"{function}() takes a torch.{kind}, not {type(value).__name__}")


def require_model(model: Any, function: str) -> None:
    """Raise unless it is a module whose weights are there: on the device meta nothing could be looked at."""
    require(model, "nn.Module", function)
    if is_without_values(model):
        raise ValueError(f"{function}() needs weights, and the model is on the device meta: load it on a real one")


def require_optimizer(optimizer: Any, model: Any, function: str) -> None:
    """Raise unless it is an optimizer that has some of the model's parameters."""
    require(optimizer, "optim.Optimizer", function)
    if not has_parameters_of(optimizer, model):
        raise ValueError(f"{function}() takes an optimizer that has the model's parameters, and this one has none of them")


def is_batch(loader: Any) -> bool:
    """Return True for what is a batch by itself, though it could be iterated: a tensor, a mapping, a tuple."""
    return isinstance(loader, (torch.Tensor, tuple)) or is_mapping(loader)


def require_scaler(scaler: Any, function: str, *methods: str) -> None:
    """Raise ``TypeError`` with advice if ``scaler`` is neither None nor a loss scaler that has what the function calls."""
    if scaler is not None and not all(hasattr(scaler, name) for name in ("get_scale", *methods)):
        raise TypeError(f"{function}() takes a torch.amp.GradScaler as scaler, not {type(scaler).__name__}")


def values_of(x: Any) -> tuple[Any, str]:
    """Return the numbers of a tensor as a strided, real one on the same device, and what they are. Call it under ``no_grad``.

    Where there are none it is ``None``, and why. An uncoalesced sparse tensor is coalesced, and a strided nested one is put
    together, which on a device waits for it; nothing else does. Of a DTensor it is the local shard, without a collective.
    """
    if _has_no_data(x):
        return None, "no data"
    x = x.detach()
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        values, kind = values_of(x.to_local())
        return values, f"{kind} of the local shard"
    try:
        dense, kind = _dense(x)
        if dense.is_complex():
            dense = dense.to(torch.complex64) if dense.dtype is torch.complex32 else dense
            dense, kind = dense.abs().masked_fill_(dense.isnan(), nan), f"magnitudes of {kind}"  # that of inf + nan j is inf
        dense.reshape(-1)[:1].float()  # packed types have no conversion
    except (NotImplementedError, TypeError):  # by a TypeError a class of tensors says that it does not know the operator
        return None, f"unreadable: torch converts no {_name(x.dtype)} of this layout"
    return dense, kind


def _dense(x: Any) -> tuple[Any, str]:
    if x.is_nested:
        parts = [x.values()] if x.layout is torch.jagged else x.unbind()
        return torch.cat([part.reshape(-1) for part in parts]) if len(parts) else x.new_empty(0), "elements"
    if x.layout is torch.sparse_coo:
        return x.coalesce().values(), "stored elements"
    if x.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        return x.values(), "stored elements"
    if x.layout is not torch.strided:
        return x.to_dense(), "elements"
    is_quantised = x.is_quantized or type(x).dequantize is not torch.Tensor.dequantize  # or by a class of its own: torchao's
    return (x.dequantize(), "dequantised elements") if is_quantised else (x, "elements")


def is_uninitialized(x: Any) -> bool:
    """Return True for a parameter of a lazy module that has no shape yet."""
    lazy: Any = torch.nn.parameter
    return isinstance(x, lazy.UninitializedTensorMixin)


def _has_no_data(x: Any) -> bool:
    if is_uninitialized(x) or x.device.type == "meta":
        return True
    return type(x).__name__ == "FakeTensor" or torch._C._functorch.is_functorch_wrapped_tensor(x)


def shape_of(x: Any) -> tuple[int | str, ...]:
    """Return the shape; a dimension of unequal lengths (nested) is ``"*"``, an uninitialised parameter has none."""
    if is_uninitialized(x):
        return ()
    return tuple(_length(x, dimension) for dimension in range(x.dim())) if x.is_nested else tuple(map(int, x.shape))


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
    if _has_no_data(x):
        return 0
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        return bytes_of(x.to_local())
    if hasattr(type(x), "__tensor_flatten__") and not x.is_nested:  # made of others: quantised values and their scales
        return sum(bytes_of(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return sum(int(part.numel() * part.element_size()) for part in stored(x))


def _name(attribute: Any) -> str:
    return str(attribute).removeprefix("torch.")


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


@contextmanager
def _computing() -> Iterator[None]:
    before, own_work.on = own_work.on, True
    try:
        with torch.no_grad():
            yield
    finally:
        own_work.on = before


class Moments(NamedTuple):
    """What :func:`_moments` computes, read."""

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
        """Return what results have of it, by the names of their fields; values are divided by ``scale``."""
        values = {"mean": self.mean, "min": self.min, "max": self.max} if self.finite else {}
        if self.finite > 1:
            values["std"] = sqrt(self.squares / (self.finite - 1))
        counts = {"zero_count": self.zeros, "nan_count": self.nan, "inf_count": self.infinite}
        absent = dict.fromkeys(("mean", "std", "min", "max"))
        scaled = {name: value / scale for name, value in (values | {"norm": self.norm}).items()}
        return absent | scaled | {name: int(n) for name, n in counts.items()}


NOTHING = Moments(0, 0, 0, 0, nan, 0, nan, nan, 0)
"""Moments of no elements"""


def _moments(x: Any) -> Any:
    """Return the :class:`Moments` of a strided tensor as a one-dimensional tensor on its device."""
    if not x.numel():
        return _numbers(NOTHING, x.device)
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
    return torch.stack([*(each.to(x.dtype) for each in counts), finite.sum(), finite.square().sum(), *extremes])


def _numbers(numbers: Iterable[float], device: Any) -> Any:
    """Return numbers on a device, filled in there: a copy from the host would wait."""
    return torch.stack([torch.full((), number, dtype=wide_type(device), device=device) for number in numbers])


def _distribution(x: Any) -> Any:
    """Return :data:`QUANTILES`, then :data:`BINS` counts between least and greatest, of the finite elements of a sample.

    The last number is how many elements the sample has. ``x`` is not empty.
    """
    number = wide_type(x.device)
    sample = evenly_sampled(x.reshape(-1), SAMPLE).to(number)
    ordered = torch.where(sample.isfinite(), sample, inf).sort().values
    count = sample.isfinite().sum()
    places = _numbers(QUANTILES, x.device) * (count - 1).clamp(min=0)
    quantiles = torch.lerp(ordered[places.floor().long()], ordered[places.ceil().long()], places.frac())
    low, high = ordered[0], ordered[(count - 1).clamp(min=0).reshape(1)]  # a 0-dimensional index would be read
    steps = torch.arange(1, BINS, dtype=number, device=x.device) / BINS
    inner = torch.searchsorted(ordered, low + (high - low) * steps)
    edges = torch.cat([torch.zeros_like(inner[:1]), inner.clamp(max=count), count.reshape(1)])
    return torch.cat([torch.where(count > 0, quantiles, nan), edges.diff().to(number), count.reshape(1).to(number)])


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
        found: list[list[float]] = [[] for _ in range(self._count)]
        for parts in self._parts.values():
            numbers = iter(torch.cat([tensor for _, tensor in parts]).tolist())
            for index, tensor in parts:
                found[index] = list(islice(numbers, tensor.numel()))
        return found


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
        """What is not finite in it, in words, or nothing."""
        counts = " and ".join(f"{n} {kind}" for n, kind in ((self.nan_count, "NaN"), (self.inf_count, "Inf")) if n)
        return f"{counts} of {self.numel} elements" if counts else ""


class Rows:
    """Tensors that are described together: computed where they are, read by one copy from each device."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self._taken: list[tuple[dict[str, Any], int | None]] = []

    def add(self, name: str, x: Any) -> tuple[Any, str]:
        """Start to describe a tensor; return what :func:`values_of` does."""
        about = {"shape": shape_of(x), "dtype": _name(x.dtype), "device": str(x.device), "numel": elements_of(x)}
        with _computing():
            values, kind = values_of(x)
            self._taken.append(({"name": name} | about, None if values is None else self.numbers.add(_moments(values))))
        return values, kind

    def described(self, read: list[list[float]] | None = None, scale: float = 1.0) -> tuple[TensorRow, ...]:
        """Return a row for each, divided by ``scale``, by what was read of ``numbers``; without it, read them."""
        read = self.numbers.read() if read is None else read
        nothing = NOTHING.described() | {"norm": None}
        numbers = [nothing if index is None else Moments(*read[index]).described(scale) for _, index in self._taken]
        return tuple(TensorRow(**about, **each) for (about, _), each in zip(self._taken, numbers, strict=True))


def norm_of(rows: Iterable[TensorRow]) -> float | None:
    """Return the L2 norm of all elements together; ``None`` if no tensor has numbers."""
    norms = [row.norm for row in rows if row.norm is not None]
    return (nan if any(map(isnan, norms)) else hypot(*norms)) if norms else None


@dataclass(frozen=True, slots=True)
class TensorStats(TensorRow, Checked):
    """One tensor. In ``shape``, ``"*"`` is a dimension whose length varies (nested tensors)."""

    layout: str
    size_bytes: int
    """Bytes of its elements, with the indices of a sparse tensor; of a DTensor, the local shard's"""
    requires_grad: bool
    values: str
    """What the statistics are of: elements, stored elements of a sparse tensor, magnitudes of complex numbers, dequantised
    elements, the local shard of a DTensor; or why there are none"""
    counted: int
    """Elements that the statistics are of"""
    has_nan: bool
    has_inf: bool
    quantiles: dict[str, float]
    """Empty without a finite element"""
    histogram: tuple[int, ...]
    """Counts in 20 equal bins between ``min`` and ``max``"""
    sampled: int
    """Elements that quantiles and histogram are of: evenly spaced ones of a tensor with more than 262,144"""
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class ParameterInspection(Checked):
    """The parameters of a model, each named once however often it is shared."""

    model: str
    numel: int
    trainable: int
    size_bytes: int
    norm: float | None
    """L2 norm of all parameters on this rank; NaN or infinite if an element is"""
    has_nan: bool
    has_inf: bool
    problems: tuple[Problem, ...]
    parameters: tuple[TensorRow, ...]


def inspect_tensor(x: Any, name: str = "tensor") -> TensorStats:
    """Return shape, type, device, bytes and statistics of a tensor of any kind, after one transfer from its device.

    Sparse tensors are analysed by their stored elements (a COO tensor is coalesced, which on a device waits once more), complex
    ones by magnitude, quantised ones dequantised, a DTensor by its local shard without a collective; a meta or fake tensor has
    no numbers. The tensor is not changed, and nothing is added to its graph. NaN and Inf are logged and recorded as an event.

    Raises:
        TypeError: ``x`` is not a tensor.
    """
    require(x, "Tensor", "inspect_tensor")
    taken, shape = Rows(), [nan] * len(QUANTILES) + [0.0] * (BINS + 1)
    values, kind = taken.add(name, x)
    counted = 0 if values is None else values.numel()
    if counted:
        with _computing():
            taken.numbers.add(_distribution(values))
    read = taken.numbers.read()
    (row,), shape = taken.described(read), read[1] if counted else shape
    odd = [("nonfinite_tensor", name, row.defect)] if row.defect else []
    return TensorStats(
        **{field.name: getattr(row, field.name) for field in fields(row)}, layout=_name(x.layout), size_bytes=bytes_of(x),
        requires_grad=bool(x.requires_grad), values=kind, counted=counted, has_nan=row.nan_count > 0, has_inf=row.inf_count > 0,
        quantiles={f"{place:g}": value for place, value in zip(QUANTILES, shape, strict=False)} if shape[-1] else {},
        histogram=tuple(int(count) for count in shape[len(QUANTILES) : -1]), sampled=int(shape[-1]),
        problems=record_findings("inspect_tensor", odd),
    )  # fmt: skip


def inspect_parameters(model: Any) -> ParameterInspection:
    """Return the statistics of each parameter of a model and of all of them, after one transfer from each device.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
        ValueError: it is on the device meta.
    """
    require_model(model, "inspect_parameters")
    taken, parameters = Rows(), dict(model.named_parameters())
    for name, x in parameters.items():
        taken.add(name, x)
    rows = taken.described()
    odd = [("nonfinite_parameter", row.name, row.defect) for row in rows if row.defect]
    return ParameterInspection(
        model=type(model).__name__, numel=sum(row.numel for row in rows),
        trainable=sum(elements_of(x) for x in parameters.values() if x.requires_grad),
        size_bytes=sum(map(bytes_of, parameters.values())), norm=norm_of(rows),
        has_nan=any(row.nan_count for row in rows), has_inf=any(row.inf_count for row in rows), parameters=rows,
        problems=record_findings("inspect_parameters", odd),
    )  # fmt: skip
