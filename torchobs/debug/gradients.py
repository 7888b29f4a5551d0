"""``check_gradients``: the gradients that a backward pass has left, parameter by parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.debug.findings import told
from torchobs.debug.statistics import UNKNOWN, Moments, wide
from torchobs.debug.tensors import parameters_of, require_scaler, start_moments, total_norm
from torchobs.debug.transfer import Numbers
from torchobs.debug.values import elements_of, values_of
from torchobs.runtime.session import current
from torchobs.support.arguments import is_number
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable

EXPLODING = 10.0
"""Norm of one parameter's gradient above which it is called exploding; trainings clip the total norm to 1 or so"""
VANISHING = 1e-6
"""Norm below which it is called vanishing: a step at a learning rate of 0.1 is lost in float32 beside weights of 1"""


@dataclass(frozen=True, slots=True)
class GradientStats(Result):
    """The gradient of one parameter, divided by the loss scale. Statistics are of the finite elements, the norm of all.

    What a sparse gradient does not store is zero, and is counted as that.
    """

    name: str
    numel: int
    norm: float
    mean: float
    std: float
    min: float
    max: float
    zero_count: int
    nan_count: int
    inf_count: int


@dataclass(frozen=True, slots=True)
class GradientCheck(Result):
    """The gradients of a model, divided by the loss scale where they are scaled."""

    model: str
    total_norm: float
    """L2 norm of all of them, on this rank; NaN or infinite if an element is; NaN without any gradient"""
    loss: float | None
    loss_scale: float
    """What the gradients were divided by; 1 if they are not scaled"""
    has_nan: bool
    has_inf: bool
    missing: tuple[str, ...]
    """Trainable parameters without a gradient"""
    anomalies: tuple[str, ...]
    """Not finite, exploding; vanishing for weights alone: a bias before a normalisation has no gradient by construction"""
    remarks: tuple[str, ...]
    """What is no anomaly by itself: gradients that are exactly zero while a parameter that begins with zeros gets one"""
    parameters: tuple[GradientStats, ...]

    def exploding(self, threshold: float = EXPLODING) -> tuple[str, ...]:
        """Return the names of parameters whose gradient has a norm above ``threshold``, or is not finite.

        Raises:
            ValueError: the threshold is not above 0.
        """
        require_positive(threshold)
        return tuple(row.name for row in self.parameters if row.nan_count or row.inf_count or row.norm > threshold)

    def vanishing(self, threshold: float = VANISHING) -> tuple[str, ...]:
        """Return the names of parameters whose gradient has a norm below ``threshold``, zero included.

        Raises:
            ValueError: the threshold is not above 0.
        """
        require_positive(threshold)
        return tuple(row.name for row in self.parameters if row.norm < threshold)


class _Measured(NamedTuple):
    name: str
    parameter: Any
    numel: int
    is_weight: bool
    """Of two dimensions or more"""
    moments: Moments


def check_gradients(
    model: Any, loss: Any = None, *, scaler: Any = None, exploding: float = EXPLODING, vanishing: float = VANISHING
) -> GradientCheck:
    """Check the gradients that a backward pass has left in a model, after one transfer from each device.

    Call it between ``backward()`` and ``zero_grad()``. Gradients that a loss scaler has scaled are divided by its scale: the
    scale is that of ``scaler``, or of the scaler that a session has seen. Without a session, gradients count as scaled until
    ``scaler.unscale_()`` or ``scaler.step()``, and again after ``scaler.update()``: so call it before that.

    Args:
        model: the module; shared parameters count once. Of a DTensor the local shard is checked, without a collective.
        loss: the loss as a tensor with one element or a number, to be reported and checked as well.
        scaler: a ``torch.amp.GradScaler``.
        exploding: norm of one parameter's gradient above which it explodes. The default is for a loss that is a mean: one that
            is a sum over the batch has a norm larger by its size.
        vanishing: norm of a weight's gradient below which it vanishes.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``, ``loss`` not one number, or ``scaler`` no loss scaler.
        ValueError: a threshold is not above 0.
    """
    numbers, build = start_gradients(model, loss, scaler, "check_gradients", exploding, vanishing)
    return build(numbers.read())


def start_gradients(
    model: Any, loss: Any, scaler: Any, function: str, exploding: float = EXPLODING, vanishing: float = VANISHING
) -> tuple[Numbers, Callable[[list[list[float]]], GradientCheck]]:
    """Start the computations of :func:`check_gradients`; return the devices' numbers, and what makes the result of them."""
    import torch

    require_positive(exploding)
    require_positive(vanishing)
    require_scaler(scaler, function)
    named, numbers = parameters_of(model, function), Numbers()
    with torch.no_grad():
        rows = [(name, x, start_moments(x.grad, numbers)) for name, x in named if x.grad is not None]
        at_loss, at_scale = _add_scalar(numbers, loss, function), _add_scalar(numbers, scale_in_use(scaler), function)
    missing = tuple(name for name, x in named if x.grad is None and x.requires_grad)

    def build(read: list[list[float]]) -> GradientCheck:
        scale = 1.0 if at_scale is None else read[at_scale][0]
        measured = [
            _Measured(name, x, elements_of(x), x.dim() > 1, UNKNOWN if at is None else _of_all(Moments(*read[at]), x.grad))
            for name, x, at in rows
        ]
        at = None if at_loss is None else read[at_loss][0]
        return _checked(model, measured, at, scale, missing, function, (exploding, vanishing))

    return numbers, build


def _of_all(stored: Moments, gradient: Any) -> Moments:
    """Return the moments of all elements of a gradient, which may be sparse, by those of what it stores."""
    import torch

    if gradient.layout in {torch.strided, torch.jagged}:
        return stored
    return stored.with_zeros(elements_of(gradient) - int(stored.finite + stored.nan + stored.infinite))


def _add_scalar(numbers: Numbers, value: Any, function: str) -> int | None:
    """Add a number, or a tensor with one element; return its index."""
    import torch

    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return numbers.add(value.detach().reshape(1).to(wide(torch, value.device)))
    if isinstance(value, (int, float)):
        return numbers.add(torch.tensor([float(value)], dtype=torch.float64, device="cpu"))
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TypeError(f"{function}() takes a loss of one number, not {what}: reduce it, or leave it out")


def scale_in_use(scaler: Any) -> Any:
    """Return the scale that the gradients still have, as a tensor on its device; ``None`` if they have none."""
    session = current()
    seen = session.loss_scaling if session is not None else None
    own = getattr(scaler, "_scale", None)  # a disabled scaler has none, and get_scale() would wait
    if seen is not None and seen.losses and (scaler is None or seen.scale is own):
        return seen.scale if seen.waits_for_unscale else None
    stages = [] if own is None else [state["stage"].name for state in scaler._per_optimizer_states.values()]
    return own if all(stage == "READY" for stage in stages) else None


def _checked(
    model: Any,
    measured: list[_Measured],
    loss: float | None,
    scale: float,
    missing: tuple[str, ...],
    function: str,
    limits: tuple[float, float],
) -> GradientCheck:
    rows = tuple(GradientStats(name=one.name, numel=one.numel, **one.moments.described(scale)) for one in measured)
    total = total_norm((one.moments for one in measured), scale) if rows else nan
    check = GradientCheck(
        model=type(model).__name__, total_norm=total, loss=loss, loss_scale=scale, has_nan=any(row.nan_count for row in rows),
        has_inf=any(row.inf_count for row in rows), missing=missing, anomalies=(), remarks=(), parameters=rows,
    )  # fmt: skip
    weights = {one.name for one in measured if one.is_weight}
    zero = [one.name for one in measured if one.is_weight and _is_zero(one)]
    first = next((one.name for one in measured if _begins_with_zeros(one)), None) if zero else None
    if first is not None:
        weights.difference_update(zero)
        text = f"{first} is all zeros and has a gradient: until its first step it may pass none on to {', '.join(zero)}"
        check = replace(check, remarks=(text,))
    return replace(check, anomalies=told(function, _anomalies(check, weights, *limits)))


def _is_zero(one: _Measured) -> bool:
    """Return True if all of the gradient is exactly zero."""
    return one.numel > 0 and one.moments.zeros == one.numel


def _begins_with_zeros(one: _Measured) -> bool:
    """Return True for a parameter of zeros that learns: LoRA's B (Hu et al. 2021), a zero-initialised head, gate or scale.

    What is multiplied by it has a gradient of exactly zero before its first step. A bias of zeros has no such effect.
    """
    if not one.moments.norm > 0 or "bias" in one.name.rpartition(".")[2]:
        return False
    values = values_of(one.parameter).tensor
    return values is not None and not bool(values.any())


def _anomalies(check: GradientCheck, weights: set[str], exploding: float, vanishing: float) -> list[tuple[str, str, str]]:
    """Return kind, name and text of each.

    Only of weights a small gradient is one: that of a bias before a normalisation, or of attention's keys, is zero but for
    rounding, and nothing is wrong with it.
    """
    anomalies = []
    if check.loss is not None and not isfinite(check.loss):
        anomalies.append(("nonfinite_loss", "loss", f"the loss is {check.loss}"))
    if not check.parameters and check.missing:
        text = f"no parameter of {check.model} has a gradient: was backward() called, and not yet zero_grad()?"
        anomalies.append(("no_gradient", check.model, text))
    for row in check.parameters:
        if row.nan_count or row.inf_count:
            more = "; a loss scaler skips such a step" if check.loss_scale != 1.0 else ""
            text = f"{row.name}: {row.nan_count} NaN and {row.inf_count} Inf in a gradient of {row.numel} elements{more}"
            anomalies.append(("nonfinite_gradient", row.name, text))
        elif row.norm > exploding:
            text = f"{row.name}: the gradient's norm {row.norm:.3g} is above {exploding:.3g} (exploding)"
            anomalies.append(("gradient_explosion", row.name, text))
        elif row.name not in weights:
            continue
        elif row.numel and row.zero_count == row.numel:
            anomalies.append(("gradient_vanishing", row.name, f"{row.name}: the gradient is exactly zero (vanishing)"))
        elif row.norm < vanishing and row.numel:
            text = f"{row.name}: the gradient's norm {row.norm:.3g} is below {vanishing:.3g} (vanishing)"
            anomalies.append(("gradient_vanishing", row.name, text))
    return anomalies


def require_positive(threshold: Any) -> None:
    """Raise ``ValueError`` if a threshold of a norm is not above 0."""
    if not is_number(threshold) or not threshold > 0:
        raise ValueError(f"a threshold of a norm is above 0, not {threshold!r}")
