"""``check_gradients``: what is wrong with gradients; ``nan_guard``: no step with NaN; the asyncio variants."""

from __future__ import annotations

import asyncio
import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from torchobs import catalog
from torchobs.debug import tensors
from torchobs.debug.findings import record_findings
from torchobs.probes.gradient_norms import device_norms, local
from torchobs.probes.nonfinite.backward import bad_gradients
from torchobs.probes.nonfinite.probe import skips_by_itself
from torchobs.runtime.session import current
from torchobs.support.arguments import is_number
from torchobs.support.error_guard import call
from torchobs.support.process_group import greatest, is_shared
from torchobs.support.result import Checked, Problem
from torchobs.taps import taps
from torchobs.tensors import statistics
from torchobs.tensors.losses import wide_type
from torchobs.tensors.statistics import Numbers, Rows, TensorRow
from torchobs.tensors.values import values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from torch.utils.hooks import RemovableHandle

    from torchobs.probes.context import ProbeContext


P = ParamSpec("P")
T = TypeVar("T")
EXPLODING = 10.0
"""Norm of one parameter's gradient above which it is called exploding; trainings clip the total norm to 1 or so"""
VANISHING = 1e-6
"""Norm below which it is called vanishing: at a learning rate of 0.1, float32 weights of 1 do not change by it"""


@dataclass(frozen=True, slots=True)
class GradientCheck(Checked):
    """The gradients of a model, divided by the loss scale where they are scaled."""

    model: str
    gradient_norm: float | None
    """L2 norm of all of them, on this rank; NaN or infinite if an element is; ``None`` without any gradient"""
    loss: float | None
    loss_scale: float
    """What the gradients were divided by; 1 if they are not scaled"""
    has_nan: bool
    has_inf: bool
    missing: tuple[str, ...]
    """Trainable parameters without a gradient"""
    problems: tuple[Problem, ...]
    """Not finite, exploding; vanishing for weights alone: a bias before a normalisation has no gradient by construction"""
    remarks: tuple[str, ...]
    """No anomalies: gradients that are exactly zero, while a parameter that begins with zeros has one"""
    parameters: tuple[TensorRow, ...]
    """The gradient of each parameter that has one; of a sparse gradient its stored elements"""

    def exploding(self, threshold: float = EXPLODING) -> tuple[str, ...]:
        """Return the names of parameters that have a gradient with a norm above ``threshold``, or one that is not finite.

        Raises:
            ValueError: the threshold is not above 0.
        """
        require_positive(threshold)
        return tuple(row.name for row in self.parameters if row.defect or (row.norm or 0.0) > threshold)

    def vanishing(self, threshold: float = VANISHING) -> tuple[str, ...]:
        """Return the names of parameters that have a gradient with a norm below ``threshold``, zero included.

        Raises:
            ValueError: the threshold is not above 0.
        """
        require_positive(threshold)
        return tuple(row.name for row in self.parameters if row.norm is not None and row.norm < threshold)


def check_gradients(
    model: Any, loss: Any = None, *, scaler: Any = None, exploding: float = EXPLODING, vanishing: float = VANISHING
) -> GradientCheck:
    """Check the gradients that a backward pass has left in a model, after one transfer from each device.

    Call it between ``backward()`` and ``zero_grad()``. Gradients are divided by the loss scale: that of ``scaler``, or of the
    scaler that a session knows. Without a session, gradients count as scaled until ``scaler.unscale_()`` or
    ``scaler.step()``, and again after ``scaler.update()``: so call it before that.

    Args:
        model: the module; shared parameters count once. Of a DTensor the local shard is checked, without a collective.
        loss: a number, or a tensor with one element, that is reported and checked as well.
        scaler: a ``torch.amp.GradScaler``.
        exploding: norm of one parameter's gradient above which it explodes. The default is for a loss that is a mean; a sum
            over the batch has a norm larger by the batch size.
        vanishing: norm of a weight's gradient below which it vanishes.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``, ``loss`` not one number, or ``scaler`` no loss scaler.
        ValueError: a threshold is not above 0.
    """
    return gradients_of(model, loss, scaler, "check_gradients", exploding, vanishing)


def gradients_of(
    model: Any, loss: Any, scaler: Any, function: str, exploding: float = EXPLODING, vanishing: float = VANISHING
) -> GradientCheck:
    """Do what :func:`check_gradients` does, in the name of that function."""
    require_positive(exploding)
    require_positive(vanishing)
    tensors.require_model(model, function)
    tensors.require_scaler(scaler, function)
    named, taken = list(model.named_parameters()), Rows()
    for name, x in named:
        if x.grad is not None:
            taken.add(name, x.grad)
    at_loss, at_scale = (_add_scalar(taken.numbers, value, function) for value in (loss, scale_in_use(scaler)))
    missing = tuple(name for name, x in named if x.grad is None and x.requires_grad)

    read = taken.numbers.read()
    scale = 1.0 if at_scale is None else read[at_scale][0]
    rows = taken.described(read, scale)
    zero = [row.name for row in rows if _is_weight(row) and row.numel and row.norm == 0]
    with_gradient = {row.name for row in rows if row.norm} if zero else ()
    first = next((name for name, x in named if name in with_gradient and _is_zero(x, name)), None)
    remark = f"{first} is all zeros and has a gradient: until its first step it may pass none on to {', '.join(zero)}"
    check = GradientCheck(
        model=type(model).__name__, gradient_norm=statistics.norm_of(rows), loss=None if at_loss is None else read[at_loss][0],
        loss_scale=scale, has_nan=any(row.nan_count for row in rows), has_inf=any(row.inf_count for row in rows),
        missing=missing, problems=(), remarks=() if first is None else (remark,), parameters=rows,
    )  # fmt: skip
    excused = set[str]() if first is None else set(zero)
    return replace(check, problems=record_findings(function, _findings(check, excused, exploding, vanishing)))


def _add_scalar(numbers: Numbers, value: Any, function: str) -> int | None:
    """Add a number, or a tensor with one element; return its index."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return numbers.add(value.detach().reshape(1).to(wide_type(value.device)))
    if isinstance(value, (int, float)):
        return numbers.add(torch.tensor([float(value)], dtype=torch.float64, device="cpu"))
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TypeError(f"{function}() takes a loss of one number, not {what}: reduce it, or leave it out")


def scale_in_use(scaler: Any) -> Any:
    """Return the loss scale that the gradients still have, as a tensor on its device; ``None`` if they have none."""
    session = current()
    scaling = session.loss_scaling if session is not None else None
    scale = getattr(scaler, "_scale", None)  # a disabled scaler has none, and get_scale() would wait
    if scaling is not None and scaling.losses and (scaler is None or scaling.scale is scale):
        return scaling.scale if scaling.waits_for_unscale else None
    stages = [] if scale is None else [state["stage"].name for state in scaler._per_optimizer_states.values()]
    return scale if all(stage == "READY" for stage in stages) else None


def _is_weight(row: TensorRow) -> bool:
    """Return whether a parameter has two dimensions or more.

    A small gradient is an anomaly for weights alone: that of a bias before a normalisation, or of attention's keys, is zero but
    for rounding.
    """
    return len(row.shape) > 1


def _is_zero(parameter: Any, name: str) -> bool:
    """Return whether a parameter is all zeros: LoRA's B (Hu et al. 2021), a zero-initialised head, gate or scale.

    Until its first step, whatever it is multiplied by has a gradient of exactly zero. A bias of zeros has no such effect.
    """
    values, _ = values_of(parameter)
    return "bias" not in name.rpartition(".")[2] and values is not None and not bool(values.any())


def _findings(check: GradientCheck, excused: set[str], exploding: float, vanishing: float) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and text of each finding; the ``excused`` parameters may have a gradient of zero."""
    if check.loss is not None and not isfinite(check.loss):
        yield "nonfinite_loss", "loss", f"the loss is {check.loss}"
    if not check.parameters and check.missing:
        text = f"no parameter of {check.model} has a gradient: was backward() called, and not yet zero_grad()?"
        yield "no_gradient", check.model, text
    for row in check.parameters:
        if row.defect:
            more = "; a loss scaler skips such a step" if check.loss_scale != 1.0 else ""
            yield "nonfinite_gradient", row.name, f"{row.defect} of the gradient{more}"
        elif row.norm is not None and row.norm > exploding:
            yield "gradient_explosion", row.name, f"the gradient's norm {row.norm:.3g} is above {exploding:.3g} (exploding)"
        elif row.norm is not None and row.norm < vanishing and row.numel and _is_weight(row) and row.name not in excused:
            what = f"norm {row.norm:.3g} is below {vanishing:.3g}" if row.norm else "norm is exactly zero"
            yield "gradient_vanishing", row.name, f"the gradient's {what} (vanishing)"


def require_positive(threshold: Any) -> None:
    """Raise ``ValueError`` if a threshold of a norm is not above 0."""
    if not is_number(threshold) or not threshold > 0:
        raise ValueError(f"a threshold of a norm is above 0, not {threshold!r}")


def before_steps(function: Callable[[Any], None]) -> Callable[[], None]:
    """Call a function with the optimizer before each step, of any optimizer in any thread; return a function that ends it."""

    def before_step(optimizer: Any) -> None:
        if not torch.compiler.is_compiling():
            function(optimizer)

    return taps.BEFORE_STEP.subscribe(before_step)


def norm_of(parameters: Iterable[Any], scale: Any) -> Any:
    """Return the L2 norm of gradients (of a DTensor the local shard), divided by the scale; ``None`` without any."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_device: dict[Any, list[Any]] = {}
    with torch.no_grad():
        for gradient in local([0] * len(gradients), gradients).tensors if gradients else ():
            by_device.setdefault(gradient.device, []).append(gradient)
        norms = [torch.linalg.vector_norm(device_norms(group)[0]) for group in by_device.values()]
        if not norms:
            return None
        # on the first of several devices: models on several are rare, and this copies one number from each
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, non_blocking=True) for norm in norms]))
        return total if scale is None else total / scale.to(total.device, non_blocking=True)


class NanGuard(AbstractContextManager["NanGuard"]):
    """What :func:`nan_guard` returns. As a context manager it ends with the block; else :meth:`remove` ends it."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, agree: bool = False) -> None:
        self._agree = agree
        self.held = 0
        """Number of steps held back"""
        self._gradients: list[tuple[Any, Any]] = []
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after),
        ]  # fmt: skip

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.remove()

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        handles, self._handles = self._handles, []
        if handles:
            taps.remove_hooks(handles)
        self._give_back()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take all gradients away if one is not finite: an optimizer does not change parameters without a gradient."""
        if not self._handles:
            return  # removed, but not by torch yet
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise ValueError("nan_guard() cannot hold back a step with a closure, which computes its gradients within the step")
        self._give_back()  # of a step that raised
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        bad = [] if skips_by_itself(optimizer) else bad_gradients(parameters)
        is_bad = bool(bad)
        if self._agree and is_shared():
            is_bad = bool(greatest(is_bad, next((parameter.device for parameter in parameters), torch.device("cpu"))))
        if not is_bad:
            return
        self.held += 1
        self._gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        session = current()
        context = session.context if session is not None else None
        if context is not None:
            call(context.breaker("nonfinite"), _record, context, optimizer, len(bad), self.held)
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self._give_back()

    def _give_back(self) -> None:
        """Give the gradients back, except to parameters that have new ones."""
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        self._gradients = []


def _record(context: ProbeContext, optimizer: Any, parameters: int, steps_held: int) -> None:
    if parameters:  # else they are on another rank
        context.hooks.nonfinite_gradient.notify(optimizer, frozenset())  # traces them, unless they are traced already
    context.event(catalog.EVENT_STEP_HELD, {"parameters": parameters, "held": steps_held})


def nan_guard(optimizer: torch.optim.Optimizer, *, agree: bool = False) -> NanGuard:
    """Hold ``optimizer.step()`` back whenever a gradient is not finite, so that no weight becomes NaN.

    Parameters and optimizer state do not change in such a step; the gradients stay for the script to look at. Every step
    examines all gradients: one pass over them on the CPU, one transfer that waits for the device on a GPU. Each rank examines
    its own. Under DDP they are the same on all ranks; with shards (FSDP, tensor parallel) ranks would decide differently, and
    ``agree=True`` makes them hold the step back together. Every step held back is an event in the flight file, and the next
    backward pass is watched for the origin of the values.

    Args:
        optimizer: any optimizer of ``torch.optim``; its step must not be given a closure (LBFGS).
        agree: hold a step back on all ranks if one has such a gradient, by an all-reduce of one number in each step. All ranks
            have to step this optimizer equally often.

    Raises:
        TypeError: it is not an optimizer.
        ValueError: in ``step()``, if it is given a closure.
    """
    tensors.require(optimizer, "optim.Optimizer", "nan_guard")
    return NanGuard(optimizer, agree=agree)


def _in_thread(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that computes in a thread, on the caller's CUDA stream."""

    @functools.wraps(function)
    async def wait_for(*args: P.args, **kwargs: P.kwargs) -> T:
        cuda: Any = torch.cuda
        stream = cuda.current_stream() if cuda.is_initialized() else None

        def call_on_stream() -> T:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return function(*args, **kwargs)

        return await asyncio.to_thread(call_on_stream)

    return wait_for


ainspect_tensor = _in_thread(tensors.inspect_tensor)
acheck_gradients = _in_thread(check_gradients)
"""The same in a thread, for ``asyncio``; tensor and gradients must not change meanwhile"""
