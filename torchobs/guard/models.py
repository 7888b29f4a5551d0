"""A model's weights: not finite, huge, constant, unlike their reference; a verdict with its reasons and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from torchobs import catalog
from torchobs.guard.record import count, record
from torchobs.guard.severity import Category, Severity
from torchobs.guard.tensor_values import dense_values
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE = 1e4
"""Magnitude that no usual initialisation or training reaches in a weight; half precision ends at 65,504"""
OUTLIER = 20.0
"""Deviations above its layer's median from which a neuron's norm is unusual, by the scaled median absolute deviation (Rousseeuw
& Croux 1993). Far beyond any chance, since rows of trained layers differ by more than those of fresh ones."""
MAD_SCALE = 1.4826
LEAST_NEURONS = 16
"""Fewer have no spread to speak of"""
ZEROS = (
    "every value is 0: common before training, as of LoRA's B (Hu et al. 2021), zero convolutions (Zhang et al. 2023) and the "
    "last layers of diffusion models; after it, the layer has learned nothing"
)
UNKNOWABLE = (
    "weights that were changed to answer wrongly for some inputs (a backdoor) need not look unusual",
    "a sound look says nothing about what the model was trained on",
)


@dataclass(frozen=True)
class LayerReport(Result):
    """What is unusual about one parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    problem: str


@dataclass(frozen=True)
class ModelReport(Result):
    """What :func:`check_model` found. ``ok`` is True if nothing was; it is no word of trust."""

    ok: bool
    tensors: int
    elements: int
    problems: tuple[LayerReport, ...]
    missing: tuple[str, ...]
    """tensors that only the reference has"""
    added: tuple[str, ...]
    """tensors that the reference has not"""
    remarks: tuple[LayerReport, ...] = ()
    """what is common in some models and no problem by itself: a matrix of zeros"""
    unknowable: tuple[str, ...] = UNKNOWABLE


def check_model(
    model: torch.nn.Module | Mapping[str, torch.Tensor], reference: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
) -> ModelReport:
    """Look for weights that a sound model does not have.

    Args:
        model: a module, its ``state_dict()``, or a checkpoint that has such dictionaries in it, at whatever depth.
        reference: a module or state dictionary of the same architecture, to find layers that were added, lost or reshaped.

    Returns:
        A report of values that are not finite, magnitudes above ``HUGE``, matrices of one value that is not 0, single neurons
        (rows) ``OUTLIER`` deviations above their layer's, and differences in names and shapes from the reference. A matrix of
        zeros is a remark, see ``ZEROS``. Of a DTensor it is this rank's part that is looked at; a meta tensor has no values.

    Raises:
        TypeError: an argument is neither.
        ValueError: a lazy layer has not seen an input yet, or a dictionary has no tensor.
    """
    state, other = _state(model), _state(reference) if reference is not None else None
    looked = [
        LayerReport(name, tuple(tensor.shape), problem)
        for name, tensor in state.items()
        if (problem := _problem(tensor)) is not None
    ]
    problems = [each for each in looked if each.problem is not ZEROS]
    remarks = tuple(each for each in looked if each.problem is ZEROS)
    if other is not None:
        problems += [
            LayerReport(name, tuple(tensor.shape), f"the reference has the shape {tuple(other[name].shape)}")
            for name, tensor in state.items()
            if name in other and other[name].shape != tensor.shape
        ]
    missing = tuple(name for name in other or () if name not in state)
    added = tuple(name for name in state if other is not None and name not in other)
    elements = sum(tensor.numel() for tensor in state.values())
    ok = not (problems or missing or added)
    if not ok:
        _record(problems, missing, added)
    return ModelReport(ok, len(state), elements, tuple(problems), missing, added, remarks)


def _record(problems: list[LayerReport], missing: tuple[str, ...], added: tuple[str, ...]) -> None:
    found = [(each.name, each.problem) for each in problems]
    found += [(name, "only the reference has it") for name in missing]
    found += [(name, "the reference has it not") for name in added]
    count(catalog.GUARD_FINDINGS, 1, Category.NUMERICS, Severity.WARNING, by="check_model")
    about = {"layer": found[0][0], "problem": found[0][1], "problems": len(found)}
    record(catalog.EVENT_GUARD_MODEL, Category.NUMERICS, Severity.WARNING, **about)


def _state(model: object) -> dict[str, torch.Tensor]:
    """Return tensors by name; without the prefixes of torch.compile and DistributedDataParallel."""
    found = model.state_dict() if isinstance(model, torch.nn.Module) else model
    if not isinstance(found, Mapping):
        raise TypeError(f"a module or its state_dict() is needed, not {type(model).__name__}")
    if lazy := [name for name, tensor in _tensors(found) if is_lazy(tensor)]:
        raise ValueError(f"{lazy[0]} has no values before the first forward pass of its lazy layer: do one first")
    tensors = {name.replace("_orig_mod.", ""): each.detach() for name, each in _tensors(found)}
    if not tensors and not isinstance(model, torch.nn.Module):
        raise ValueError(f"there is no tensor in it: it has {', '.join(map(str, list(found)[:5])) or 'nothing'}")
    wrapped = bool(tensors) and all(name.startswith("module.") for name in tensors)
    return {name.removeprefix("module.") if wrapped else name: each for name, each in tensors.items()}


def _tensors(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors by name, without the states of optimizers: their values are no weights."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping) and "param_groups" not in value:
            yield from _tensors(value, f"{prefix}{name}.")


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values to look at, in float32 or float64; None of integers, of nothing, and where there are none."""
    if tensor.device.type == "meta" or not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized):
        return None
    values = dense_values(tensor)
    if not values.numel():
        return None
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values if values.dtype == torch.float64 else values.float()


def _problem(tensor: torch.Tensor) -> str | None:
    """Return what is unusual about a tensor, or that it is ``ZEROS``. Five numbers are read from its device together."""
    values = _values(tensor)
    if values is None:
        return None
    least, largest = values.aminmax()
    wrong = (~torch.isfinite(values)).sum()
    outlier, index = _furthest_neuron(values)
    numbers = torch.stack([each.to(values.dtype) for each in (wrong, least, largest, outlier, index)]).tolist()
    if numbers[0]:
        return f"{int(numbers[0]):,} of {values.numel():,} values are not finite"
    extreme = max(-numbers[1], numbers[2])
    if extreme > HUGE:
        return f"a magnitude of {extreme:g}"
    # vectors of ones and zeros are how norms and biases begin; of zeros there is a remark
    if numbers[1] == numbers[2] and values.dim() > 1 and values.numel() > 1:
        return f"every value is {numbers[1]:g}" if numbers[1] else ZEROS
    if numbers[3] > OUTLIER:
        return f"the norm of neuron {int(numbers[4])} is {numbers[3]:.0f} deviations above the others"
    return None


def _furthest_neuron(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distance and index of the row whose norm is furthest from the median, in deviations; 0 where there are too few."""
    zero = torch.zeros((), device=values.device)
    if values.dim() < 2 or values.shape[0] < LEAST_NEURONS:  # noqa: PLR2004  # a vector has no rows
        return zero, zero
    norms = torch.linalg.vector_norm(values.flatten(1), dim=1)
    median = torch.where(norms > 0, norms, torch.nan).nanmedian().nan_to_num()  # rows of zeros are padding, or pruned
    excess = norms - median
    # a fraction of the median: rows that are all but equal have no deviation
    deviation = torch.maximum(excess.abs().median() * MAD_SCALE, median * 1e-2) + torch.finfo(torch.float32).tiny
    furthest, index = (excess / deviation).max(0)
    return furthest, index
