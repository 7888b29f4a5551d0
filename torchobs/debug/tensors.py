"""``inspect_tensor`` and ``inspect_parameters``: statistics of a tensor, or of a model's; checks of the toolbox's arguments.

Quantiles are of the finite elements, and interpolate linearly as ``torch.quantile`` does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf, nan
from operator import attrgetter
from typing import Any

import torch

from torchobs.debug.findings import record_findings
from torchobs.support.result import Checked, Problem
from torchobs.tensors.batches import is_mapping
from torchobs.tensors.losses import has_parameters_of, is_without_values, wide_type
from torchobs.tensors.statistics import Rows, TensorRow, computing, filled, norm_of
from torchobs.tensors.values import bytes_of, elements_of, evenly_sampled, name_of


def require(value: Any, kind: str, function: str) -> None:
    """Raise ``TypeError`` unless a value is of that class of torch, such as ``nn.Module``."""
    if not isinstance(value, attrgetter(kind)(torch)):
        raise TypeError(f"{function}() takes a torch.{kind}, not {type(value).__name__}")


def require_model(model: Any, function: str) -> None:
    """Raise unless it is a module with weights: on the device meta there is nothing to check."""
    require(model, "nn.Module", function)
    if is_without_values(model):
        raise ValueError(f"{function}() needs weights, and the model is on the device meta: load it on a real one")


def require_optimizer(optimizer: Any, model: Any, function: str) -> None:
    """Raise unless it is an optimizer that has some of the model's parameters."""
    require(optimizer, "optim.Optimizer", function)
    if not has_parameters_of(optimizer, model):
        raise ValueError(f"{function}() takes an optimizer that has the model's parameters, and this one has none of them")


def is_batch(loader: Any) -> bool:
    """Return whether an iterable is a single batch: a tensor, a mapping, a tuple."""
    return isinstance(loader, (torch.Tensor, tuple)) or is_mapping(loader)


def require_scaler(scaler: Any, function: str, *methods: str) -> None:
    """Raise ``TypeError`` unless ``scaler`` is None, or a loss scaler with these methods."""
    if scaler is not None and not all(hasattr(scaler, name) for name in ("get_scale", *methods)):
        raise TypeError(f"{function}() takes a torch.amp.GradScaler as scaler, not {type(scaler).__name__}")


SAMPLE = 1 << 18
"""Most elements sorted for quantiles and histogram; evenly spaced ones of a larger tensor"""
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 20


def _distribution(x: Any) -> Any:
    """Return :data:`QUANTILES`, then :data:`BINS` counts between least and greatest, of the finite elements of a sample.

    The last number is the size of the sample. ``x`` is not empty.
    """
    number = wide_type(x.device)
    sample = evenly_sampled(x.reshape(-1), SAMPLE).to(number)
    ordered = torch.where(sample.isfinite(), sample, inf).sort().values
    count = sample.isfinite().sum()
    places = filled(QUANTILES, x.device) * (count - 1).clamp(min=0)
    quantiles = torch.lerp(ordered[places.floor().long()], ordered[places.ceil().long()], places.frac())
    low, high = ordered[0], ordered[(count - 1).clamp(min=0).reshape(1)]  # a 0-dimensional index would be read
    steps = torch.arange(1, BINS, dtype=number, device=x.device) / BINS
    inner = torch.searchsorted(ordered, low + (high - low) * steps)
    edges = torch.cat([torch.zeros_like(inner[:1]), inner.clamp(max=count), count.reshape(1)])
    return torch.cat([torch.where(count > 0, quantiles, nan), edges.diff().to(number), count.reshape(1).to(number)])


@dataclass(frozen=True, slots=True)
class TensorStats(TensorRow, Checked):
    """One tensor. In ``shape``, ``"*"`` is a dimension of varying length (nested tensors)."""

    layout: str
    size_bytes: int
    """Bytes of its elements, with the indices of a sparse tensor; of a DTensor, the local shard's"""
    requires_grad: bool
    values: str
    """Kind of the counted values: elements, stored elements of a sparse tensor, magnitudes of complex numbers, dequantised
    elements, the local shard of a DTensor; or why there are none"""
    counted: int
    """Number of values in the statistics"""
    has_nan: bool
    has_inf: bool
    quantiles: dict[str, float]
    """Empty without a finite element"""
    histogram: tuple[int, ...]
    """Counts in 20 equal bins between ``min`` and ``max``"""
    sampled: int
    """Number of values in quantiles and histogram: evenly spaced ones of a tensor with more than 262,144"""
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class ParameterInspection(Checked):
    """The parameters of a model; shared ones have one name."""

    model: str
    numel: int
    trainable: int
    size_bytes: int
    norm: float | None
    """L2 norm of all parameters on this rank; not finite if an element is not"""
    has_nan: bool
    has_inf: bool
    problems: tuple[Problem, ...]
    parameters: tuple[TensorRow, ...]


def inspect_tensor(x: Any, name: str = "tensor") -> TensorStats:
    """Return shape, type, device, bytes and statistics of any kind of tensor, after one transfer from its device.

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
        with computing():
            taken.numbers.add(_distribution(values))
    read = taken.numbers.read()
    (row,), shape = taken.described(read), read[1] if counted else shape
    odd = [("nonfinite_tensor", name, row.defect)] if row.defect else []
    return TensorStats(
        **{field.name: getattr(row, field.name) for field in fields(row)}, layout=name_of(x.layout), size_bytes=bytes_of(x),
        requires_grad=bool(x.requires_grad), values=kind, counted=counted, has_nan=row.nan_count > 0, has_inf=row.inf_count > 0,
        quantiles={f"{place:g}": value for place, value in zip(QUANTILES, shape, strict=False)} if shape[-1] else {},
        histogram=tuple(int(count) for count in shape[len(QUANTILES) : -1]), sampled=int(shape[-1]),
        problems=record_findings("inspect_tensor", odd),
    )  # fmt: skip


def inspect_parameters(model: Any) -> ParameterInspection:
    """Return statistics of a model's parameters, each and in total, after one transfer from each device.

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
