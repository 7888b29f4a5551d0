"""A model's weights: not finite, huge, constant, unlike their reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from torchobs import catalog
from torchobs.guard.contracts import ordered_values
from torchobs.guard.records import Category, Severity, count, record_event
from torchobs.support.result import Checked, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE = 1e4
"""Magnitude that no usual initialisation or training reaches in a parameter; half precision ends at 65,504. A buffer may have
any: it is in the units of the data (a mean, a variance), or a mask's lowest number."""
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
ONES = (
    "every value is 1: common before training, as of a norm over several dimensions, or of a scale; after it, the layer has "
    "learned nothing"
)
_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's norms, known by their names also where a dictionary does not tell buffers from parameters"""
_KINDS = ("nonfinite", "value", "shape", "missing", "added")
"""Of problems, the gravest first"""
_LOWEST = [torch.finfo(each).min for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
"""What a mask has beside 0 where it does not have -inf"""
UNKNOWABLE = (
    "weights that were changed to answer wrongly for some inputs (a backdoor) need not look unusual",
    "a sound look says nothing about what the model was trained on",
)


@dataclass(frozen=True)
class ModelReport(Checked):
    """What :func:`check_model` found. ``ok`` is True if nothing was; it is no word of trust."""

    problems: tuple[Problem, ...]
    """the gravest first: of the kind ``nonfinite`` or ``value``; beside a reference ``shape``, ``missing`` (it alone has it) or
    ``added``"""
    tensors: int
    elements: int
    remarks: tuple[Problem, ...] = ()
    """what is common in some models and no problem by itself, ``meta`` (no values to look at), ``zeros``, ``ones``"""
    unknowable: tuple[str, ...] = UNKNOWABLE


def check_model(
    model: torch.nn.Module | Mapping[str, torch.Tensor], reference: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
) -> ModelReport:
    """Look for weights that a sound model does not have.

    Args:
        model: a module, its ``state_dict()``, or a checkpoint that has such dictionaries in it, at whatever depth.
        reference: a module or state dictionary of the same architecture, to find layers that were added, lost or reshaped.

    Returns:
        A report of values that are not finite, and of differences in names and shapes from the reference; of parameters also
        of magnitudes above ``HUGE``, matrices of one value that is neither 0 nor 1, and single neurons (rows) ``OUTLIER``
        deviations above their layer's. A matrix of zeros or ones is a remark, see ``ZEROS`` and ``ONES``. Masks (of 0, and
        -inf or a type's lowest number) are no problem, and neither is -inf in a buffer, or one that is infinite as a whole: a
        minimum of nothing yet. What is a buffer is known of a module, or by the reference if that is one. A tensor that is
        tied to another (they share their memory) is not missed or added where the other is on both sides. Of a DTensor it is
        this rank's part that is looked at. Of tensors on the device meta names and shapes alone are compared, as is remarked.

    Raises:
        TypeError: an argument is neither.
        ValueError: a lazy layer has not seen an input yet, a dictionary has no tensor, or tensors are on the device meta and
            there is no reference: nothing could be looked at.
    """
    state, other = _state(model), _state(reference) if reference is not None else None
    buffers = _buffers(model if isinstance(model, torch.nn.Module) else reference)
    if (on_meta := [name for name, tensor in state.items() if tensor.is_meta]) and other is None:
        raise ValueError(
            f"{on_meta[0]} is on the device meta, where it has no values: load the weights first, or give a reference"
        )
    unusual = [_unusual(tensor, name, is_buffer=name in buffers) for name, tensor in state.items()]
    found = [Problem("meta", name, "on the device meta, where it has no values to look at") for name in on_meta]
    found += [problem for problem in unusual if problem is not None]
    if other is not None:
        found += [
            Problem("shape", name, f"its shape is {tuple(tensor.shape)}, and the reference has {tuple(other[name].shape)}")
            for name, tensor in state.items()
            if name in other and other[name].shape != tensor.shape
        ]
        found += [Problem("missing", name, "only the reference has it") for name in _lacking(other, state)]
        found += [Problem("added", name, "the reference has it not") for name in _lacking(state, other)]
    problems = sorted((each for each in found if each.kind in _KINDS), key=lambda problem: _KINDS.index(problem.kind))
    remarks = [each for each in found if each.kind not in _KINDS]
    if problems:
        count(catalog.GUARD_FINDINGS, 1, Category.NUMERICS, Severity.WARNING, by="check_model")
        about = {"layer": problems[0].where, "problem": problems[0].text, "problems": len(problems)}
        record_event(catalog.EVENT_GUARD_MODEL, Category.NUMERICS, Severity.WARNING, **about)
    elements = sum(tensor.numel() for tensor in state.values())
    return ModelReport(tuple(problems), len(state), elements, tuple(remarks))


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


def _buffers(model: object) -> set[str]:
    """Return the names of a module's buffers, as ``_state`` gives them; a dictionary does not know them."""
    if not isinstance(model, torch.nn.Module):
        return set()
    wrapped = all(name.startswith("module.") for name in model.state_dict())
    names = (name for name, _ in model.named_buffers(remove_duplicate=False))
    plain = {name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "") for name in names}
    return {name.removeprefix("module.") for name in plain} if wrapped else plain


def _lacking(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of ``state`` that ``other`` has not, neither by themselves nor by a tensor that they are tied to."""
    there = {_memory(tensor) for name, tensor in state.items() if name in other} - {None}
    return tuple(name for name, tensor in state.items() if name not in other and _memory(tensor) not in there)


def _memory(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what is equal for tensors of the same memory; None where torch does not tell."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout is not torch.strided or local.is_nested or not local.numel():
        return None
    # the storage itself: a meta tensor's has no address
    return local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, local.stride()  # noqa: SLF001  # nothing public


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
    values = ordered_values(tensor)
    if not values.numel():
        return None
    return values if values.dtype == torch.float64 else values.float()


def _unusual(tensor: torch.Tensor, name: str, *, is_buffer: bool) -> Problem | None:
    """Return what is unusual about a tensor. Numbers are read from its device at once."""
    values = _values(tensor)
    if values is None:
        return None
    is_statistic = name.rpartition(".")[2] in _STATISTICS
    least, largest = values.aminmax()
    wrong = (~torch.isfinite(values)).sum()
    outlier, index = _furthest_neuron(values)
    numbers = torch.stack([each.to(values.dtype) for each in (wrong, least, largest, outlier, index)]).tolist()
    if numbers[0]:
        # -inf beside any finite values, as of ALiBi's masks, and one infinity alone, which is a minimum of nothing
        by_mask = bool((torch.isfinite(values) | (values == -inf)).all()) or bool((values == inf).all())
        intended = not is_statistic and (_is_mask(values) or (is_buffer and by_mask))
        text = f"{int(numbers[0]):,} of {values.numel():,} values are not finite"
        return None if intended else Problem("nonfinite", name, text)
    return None if is_buffer or is_statistic else _unusual_value(name, values, *numbers[1:])


def _unusual_value(
    name: str, values: torch.Tensor, least: float, largest: float, outlier: float, index: float
) -> Problem | None:
    """Return what is unusual about a parameter whose values are finite."""
    extreme = max(-least, largest)
    if extreme > HUGE:
        return None if _is_mask(values) else Problem("value", name, f"a magnitude of {extreme:g}")
    # vectors of one value are how norms, scales of layers and biases begin; of matrices of zeros or ones there is a remark
    if least == largest and sum(size > 1 for size in values.shape) > 1:
        kind, text = {0.0: ("zeros", ZEROS), 1.0: ("ones", ONES)}.get(least, ("value", f"every value is {least:g}"))
        return Problem(kind, name, text)
    if outlier > OUTLIER:
        return Problem("value", name, f"the norm of neuron {int(index)} is {outlier:.0f} deviations above the others")
    return None


def _is_mask(values: torch.Tensor) -> bool:
    """Return True for what is added to scores to hide some: 0, and -inf or a type's lowest number."""
    lowest = torch.tensor([0.0, -inf, *_LOWEST], device=values.device, dtype=torch.float64).to(values.dtype)
    return bool(torch.isin(values, lowest).all())


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
