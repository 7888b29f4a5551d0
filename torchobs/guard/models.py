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
"""Magnitude that no usual initialisation or training reaches in a parameter; half precision ends at 65,504. Buffers may be
larger: a mean or variance has the units of the data, and a mask the type's lowest number."""
OUTLIER = 20.0
"""Deviations above its layer's median from which a neuron's norm is unusual, by the scaled median absolute deviation (Rousseeuw
& Croux 1993). Far beyond any chance, since rows of trained layers differ by more than those of fresh ones."""
MAD_SCALE = 1.4826
LEAST_NEURONS = 16
"""Rows of a matrix below which their spread means nothing"""
ZEROS = (
    "every value is 0: common before training, as of LoRA's B (Hu et al. 2021), zero convolutions (Zhang et al. 2023) and the "
    "last layers of diffusion models; after it, the layer has learned nothing"
)
ONES = (
    "every value is 1: common before training, as of a norm over several dimensions, or of a scale; after it, the layer has "
    "learned nothing"
)
_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's norms, recognised by name since a dictionary has no other mark of a buffer"""
_KINDS = ("nonfinite", "value", "shape", "missing", "added")
"""Kinds of problems, the most severe first"""
_LOWEST = [torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
"""Values of a mask that has no -inf"""
UNKNOWABLE = (
    "weights that were changed to answer wrongly for some inputs (a backdoor) need not look unusual",
    "a sound look says nothing about what the model was trained on",
)


@dataclass(frozen=True)
class ModelReport(Checked):
    """The result of :func:`check_model`. ``ok`` means that nothing was found, not that the model can be trusted."""

    problems: tuple[Problem, ...]
    """the most severe first: of the kind ``nonfinite`` or ``value``; against a reference ``shape``, ``missing`` (the reference
    alone has it) or ``added``"""
    tensors: int
    elements: int
    remarks: tuple[Problem, ...] = ()
    """no problems by themselves: ``meta`` (no values), ``zeros`` and ``ones``, common in some models"""
    unknowable: tuple[str, ...] = UNKNOWABLE


def check_model(
    model: torch.nn.Module | Mapping[str, torch.Tensor], reference: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
) -> ModelReport:
    """Check a model for weights that a sound model does not have.

    Args:
        model: a module, its ``state_dict()``, or a checkpoint that has such dictionaries in it, at any depth.
        reference: a module or state dictionary of the same architecture, to find layers that were added, lost or reshaped.

    Returns:
        A report of values that are not finite, and of names and shapes that differ from the reference; for parameters also of
        magnitudes above ``HUGE``, matrices of a single value other than 0 and 1, and single neurons (rows) ``OUTLIER``
        deviations above their layer's. A matrix of zeros or ones is a remark, see ``ZEROS`` and ``ONES``. No problems are
        masks (of 0, and -inf or a type's lowest number), -inf in a buffer, and a buffer that is infinite as a whole: a minimum
        of nothing yet. Buffers are those of the module, or of the reference if that is a module. A tensor tied to another
        (they share memory) is not missing or added if the other is on both sides. A DTensor is checked by this rank's part,
        and a tensor on the device meta by name and shape alone, with a remark.

    Raises:
        TypeError: an argument is neither.
        ValueError: a lazy layer has had no input yet, a dictionary has no tensor, or tensors are on the device meta and there
            is no reference: nothing could be checked.
    """
    state, other = _state(model), _state(reference) if reference is not None else None
    buffers = _buffers(model if isinstance(model, torch.nn.Module) else reference)
    if (on_meta := [name for name, tensor in state.items() if tensor.is_meta]) and other is None:
        raise ValueError(
            f"{on_meta[0]} is on the device meta, where it has no values: load the weights first, or give a reference"
        )
    unusual = [_unusual(tensor, name, is_buffer=name in buffers) for name, tensor in state.items()]
    findings = [Problem("meta", name, "on the device meta, where it has no values to look at") for name in on_meta]
    findings += [problem for problem in unusual if problem is not None]
    if other is not None:
        findings += [
            Problem("shape", name, f"its shape is {tuple(tensor.shape)}, and the reference has {tuple(other[name].shape)}")
            for name, tensor in state.items()
            if name in other and other[name].shape != tensor.shape
        ]
        findings += [Problem("missing", name, "only the reference has it") for name in _missing_names(other, state)]
        findings += [Problem("added", name, "the reference has it not") for name in _missing_names(state, other)]
    problems = sorted((x for x in findings if x.kind in _KINDS), key=lambda problem: _KINDS.index(problem.kind))
    remarks = [x for x in findings if x.kind not in _KINDS]
    if problems:
        count(catalog.GUARD_FINDINGS, 1, Category.NUMERICS, Severity.WARNING, by="check_model")
        about = {"layer": problems[0].where, "problem": problems[0].text, "problems": len(problems)}
        record_event(catalog.EVENT_GUARD_MODEL, Category.NUMERICS, Severity.WARNING, **about)
    elements = sum(tensor.numel() for tensor in state.values())
    return ModelReport(tuple(problems), len(state), elements, tuple(remarks))


def _state(model: object) -> dict[str, torch.Tensor]:
    """Return tensors by name, without the prefixes of torch.compile and DistributedDataParallel."""
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    if not isinstance(state, Mapping):
        raise TypeError(f"a module or its state_dict() is needed, not {type(model).__name__}")
    if lazy := [name for name, tensor in _tensors(state) if is_lazy(tensor)]:
        raise ValueError(f"{lazy[0]} has no values before the first forward pass of its lazy layer: do one first")
    tensors = {name.replace("_orig_mod.", ""): tensor.detach() for name, tensor in _tensors(state)}
    if not tensors and not isinstance(model, torch.nn.Module):
        raise ValueError(f"there is no tensor in it: it has {', '.join(map(str, list(state)[:5])) or 'nothing'}")
    wrapped = bool(tensors) and all(name.startswith("module.") for name in tensors)
    return {name.removeprefix("module.") if wrapped else name: tensor for name, tensor in tensors.items()}


def _buffers(model: object) -> set[str]:
    """Return the names of a module's buffers, as in ``_state``; none for a dictionary."""
    if not isinstance(model, torch.nn.Module):
        return set()
    wrapped = all(name.startswith("module.") for name in model.state_dict())
    names = (name for name, _ in model.named_buffers(remove_duplicate=False))
    plain = {name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "") for name in names}
    return {name.removeprefix("module.") for name in plain} if wrapped else plain


def _missing_names(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of ``state`` that ``other`` lacks, unless they are tied to one that it has."""
    there = {_memory_key(tensor) for name, tensor in state.items() if name in other} - {None}
    return tuple(name for name, tensor in state.items() if name not in other and _memory_key(tensor) not in there)


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal for tensors of the same memory; None if torch cannot say."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout is not torch.strided or local.is_nested or not local.numel():
        return None
    # the storage itself: a meta tensor's has no address
    return local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, local.stride()  # noqa: SLF001  # nothing public


def _tensors(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors by name, without states of optimizers, which are no weights."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping) and "param_groups" not in value:
            yield from _tensors(value, f"{prefix}{name}.")


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values to check, in float32 or float64; None for integers, empty tensors and the device meta."""
    if tensor.device.type == "meta" or not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized):
        return None
    values = ordered_values(tensor)
    if not values.numel():
        return None
    return values if values.dtype == torch.float64 else values.float()


def _unusual(tensor: torch.Tensor, name: str, *, is_buffer: bool) -> Problem | None:
    """Return what is unusual about a tensor, by one read from its device."""
    values = _values(tensor)
    if values is None:
        return None
    is_statistic = name.rpartition(".")[2] in _STATISTICS
    least, largest = values.aminmax()
    wrong = (~torch.isfinite(values)).sum()
    outlier, index = _furthest_neuron(values)
    numbers = torch.stack([number.to(values.dtype) for number in (wrong, least, largest, outlier, index)]).tolist()
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
    """Return what is unusual about a parameter with finite values."""
    extreme = max(-least, largest)
    if extreme > HUGE:
        return None if _is_mask(values) else Problem("value", name, f"a magnitude of {extreme:g}")
    # norms, scales of layers and biases begin as vectors of one value; matrices of zeros or ones get a remark
    if least == largest and sum(size > 1 for size in values.shape) > 1:
        kind, text = {0.0: ("zeros", ZEROS), 1.0: ("ones", ONES)}.get(least, ("value", f"every value is {least:g}"))
        return Problem(kind, name, text)
    if outlier > OUTLIER:
        return Problem("value", name, f"the norm of neuron {int(index)} is {outlier:.0f} deviations above the others")
    return None


def _is_mask(values: torch.Tensor) -> bool:
    """Return whether it is a mask for scores: 0, and -inf or a type's lowest number."""
    lowest = torch.tensor([0.0, -inf, *_LOWEST], device=values.device, dtype=torch.float64).to(values.dtype)
    return bool(torch.isin(values, lowest).all())


def _furthest_neuron(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest distance of a row's norm above the median, in deviations, and the row; 0 if there are too few."""
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
