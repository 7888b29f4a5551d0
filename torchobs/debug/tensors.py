"""``analyze_tensor`` and ``analyze_parameters``: what is in a tensor, in those of a model."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

from torchobs.debug import statistics
from torchobs.debug.findings import found, told
from torchobs.debug.statistics import BINS, NOTHING, QUANTILES, UNKNOWN, Moments
from torchobs.debug.transfer import Numbers
from torchobs.debug.values import bytes_of, elements_of, require_tensor, shape_of, values_of
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
            numbers.add(statistics.moments(values.tensor, values.nan))
            if values.tensor.numel():
                numbers.add(statistics.distribution(values.tensor, values.nan))
    counted = 0 if values.tensor is None else values.tensor.numel()

    def build(read: list[list[float]]) -> TensorStats:
        stats = _tensor_stats(x, name, values.kind, counted, read)
        if stats.has_nan or stats.has_inf:
            what = " and ".join(f"{count} {kind}" for kind, count in _odd(stats) if count)
            found("nonfinite_tensor", f"{name}: {what} of {stats.counted} {stats.values}", function=function, name=name)
        return stats

    return numbers, build


def _odd(stats: Any) -> list[tuple[str, int]]:
    return [("NaN", stats.nan_count), ("Inf", stats.inf_count)]


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
    rows = tuple(_parameter_stats(name, x, m) for (name, x), m in zip(named, found_moments, strict=True))
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
    return None if values.tensor is None else numbers.add(statistics.moments(values.tensor, values.nan))


def total_norm(all_moments: Iterable[Moments], scale: float = 1.0) -> float:
    """Return the L2 norm of all elements together, divided by ``scale``."""
    parts = list(all_moments)
    whole = NOTHING._replace(
        nan=sum(part.nan for part in parts), infinite=sum(part.infinite for part in parts),
        norm_squared=sum(part.norm_squared for part in parts),
    )  # fmt: skip
    return whole.norm / scale


def _parameter_stats(name: str, x: Any, m: Moments) -> ParameterStats:
    return ParameterStats(
        name=name, shape=shape_of(x), dtype=_name(x.dtype), device=str(x.device), trainable=bool(x.requires_grad),
        numel=elements_of(x), **m.described(),
    )  # fmt: skip
