"""Public functions for training scripts: they never raise or block, and do nothing in ``torch.compile(fullgraph=True)``.

Each function has its own circuit breaker (``support.error_guard``): after an error it is off, and reported like a failed probe.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.layout import PHASE_NAMES
from torchobs.flight.step_record import StepFlag
from torchobs.probes.context import ProbeContext
from torchobs.probes.timeline import PIN, UNPIN
from torchobs.runtime.session import current
from torchobs.support import graph_safe
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torchobs.catalog import Event, Metric

MIN_SPAN_NS = 100_000_000
_MOST_WATCHED = 64
"""Models that are kept, the last ones"""
_PHASES = {**{name: index for index, name in enumerate(PHASE_NAMES)}, "rollout": PHASE_NAMES.index("other")}


def step() -> None:
    """Mark the end of a training step where no ``torch.optim`` optimizer steps (fastai, Keras, ``torch.func``, by hand).

    From the first call on, only these calls delimit steps.
    """
    if not graph_safe.is_compiling():
        _call("step", _step)


def log(  # all by keyword
    *,
    loss: Any = None,
    tokens: int = 0,
    samples: int = 0,
    total_steps: int | None = None,
    resumed_from: int | None = None,
    flops: float | None = None,
    **scalars: Any,
) -> None:
    """Record values that only the script knows, for the step in progress or, right after ``optimizer.step()``, for that step.

    With :func:`step`, call this before it.

    Args:
        loss: the step's loss, in place of the one that backward starts from. A number or a one-element tensor; a tensor on a
            device is copied without synchronizing.
        tokens: tokens trained on since the last call, on this rank; from the first call on they are not inferred.
        samples: samples, likewise.
        total_steps: steps that this process will take (after resuming from a checkpoint: the remaining ones); once is enough.
        resumed_from: steps of the run before this process, where its optimizer does not count them (SGD); once is enough.
        flops: floating-point operations of a training step of this rank, forward and backward, in place of the estimate by
            parameters and tokens; once is enough. :func:`torchobs.debug.count_flops` counts them.
        scalars: other numbers by name; each becomes a gauge and a curve. The first 64 names are kept, non-numbers are ignored.
    """
    if not graph_safe.is_compiling():
        steps = {"total": total_steps, "before": resumed_from, "flops": flops}
        _call("log", _log, loss, tokens, samples, steps, scalars)


def event(name: str, **attributes: Any) -> None:
    """Record an event with the current time and these attributes."""
    if not graph_safe.is_compiling():
        _call("event", _event, name, attributes)


def record_event(event: Event, attributes: Mapping[str, Any]) -> None:
    """Record an event of the catalog. For the toolboxes, as are ``count`` and ``set_gauge``."""
    if not graph_safe.is_compiling():
        _call("event", ProbeContext.event, event, attributes)


def count(metric: Metric, amount: float, **attributes: str) -> None:
    """Add to a counter of the catalog; 0 makes it exist."""
    if not graph_safe.is_compiling():
        _call("debug", ProbeContext.count, metric, amount, attributes)


def set_gauge(metric: Metric, value: float, **attributes: str) -> None:
    """Set a gauge of the catalog."""
    if not graph_safe.is_compiling():
        _call("debug", ProbeContext.set_gauge, metric, value, attributes)


def watch(model: Any) -> None:
    """Register the trained module: its class and size are recorded, and its parameters' names are known at once."""
    if not graph_safe.is_compiling():
        _call("watch", _watch, model)


def phase(name: str) -> AbstractContextManager[None]:
    """Attribute the time of the ``with`` block to a phase: ``data``, ``rollout``, ``forward``, ``backward``, ``optimizer`` ...

    ... ``evaluation`` or ``checkpoint``. The block counts as that phase whatever the hooks see in it; ``rollout`` (a
    reinforcement learner's environment steps) counts as ``other``. What follows a ``data`` or ``rollout`` block is ``forward``
    until the backward pass. Other names leave the step's phases alone. A block of 100 ms or more is also recorded as a span.
    """
    return contextlib.nullcontext() if graph_safe.is_compiling() else _Phase(name)


class _Phase:
    """Context manager of :func:`phase`. Reusable and reentrant."""

    __slots__ = ("_name", "_started_ns")

    def __init__(self, name: str) -> None:
        self._name = name
        self._started_ns: list[int] = []

    def __enter__(self) -> None:
        now_ns = time.monotonic_ns()
        self._started_ns.append(now_ns)
        _call("phase", _phase_begins, self._name, now_ns)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _call("phase", _phase_ends, self._name, self._started_ns.pop(), time.monotonic_ns(), kind is not None)


def _call(name: str, function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` with the session's context under that breaker; do nothing without a session or at level ``off``."""
    session = current()
    context = session.context if session is not None else None
    if context is not None and context.hooks.level.value:
        call(context.breaker(name), function, context, *args)


def _step(context: ProbeContext) -> None:
    if context.recorder.plain.metered or not context.recorder.step:
        context.training.loop.record_stack()
    context.recorder.end(time.monotonic_ns())


def _log(  # one call hands on all
    context: ProbeContext, loss: Any, tokens: int, samples: int, steps: dict[str, float | None], scalars: dict[str, Any]
) -> None:
    if loss is not None or tokens or samples:
        _log_step(context, loss, int(tokens), int(samples))
    if steps["total"] is not None:
        context.scalars.set_total_steps(float(steps["total"]))
    if steps["before"] is not None:
        context.scalars.set_resumed_from(float(steps["before"]))
    if steps["flops"] is not None:
        context.scalars.flops = float(steps["flops"])
    for name, value in scalars.items():
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # raised by torch, Python and NumPy for a non-number
            _log_scalar(context, name, value)


def _log_step(context: ProbeContext, loss: Any, tokens: int, samples: int) -> None:
    recorder = context.recorder
    if loss is not None and _is_on_device(loss):
        logged_step, loss_on_device, loss = recorder.expect_loss(), loss, None
        context.device.take(loss_on_device, lambda value: recorder.late(logged_step, StepFlag.LOSS, value, 0.0))
    recorder.log(None if loss is None else _number(loss), tokens, samples)


def _log_scalar(context: ProbeContext, name: str, value: Any) -> None:
    number = None if _is_on_device(value) else _number(value)
    if not context.scalars.has_room(name):
        return
    if number is None:
        context.device.take(value, partial(context.scalars.set, name, context.recorder.ended))
    else:
        context.scalars.set(name, context.recorder.ended, number)


def _is_on_device(value: Any) -> bool:
    """Return True if the value is on a device, where reading it synchronizes. NumPy scalars have a ``device`` too, a string."""
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"


def _number(value: Any) -> float:
    return float(value.detach().item() if hasattr(value, "detach") else value)


def _event(context: ProbeContext, name: str, attributes: dict[str, Any]) -> None:
    context.writer.event(name, attributes, context.recorder.step)


def _watch(context: ProbeContext, model: Any) -> None:
    parameters = list(model.parameters())
    attributes = {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }
    fresh = all(reference() is not model for reference in context.watched)
    alive = [reference for reference in context.watched if reference() is not None and reference() is not model]
    context.watched[:] = [*alive[1 - _MOST_WATCHED :], weakref.ref(model)]
    for watch_names in context.hooks.watched.listeners:
        watch_names(model)
    if fresh:  # a script that calls this in every step would fill the events with it
        context.event(catalog.EVENT_MODEL, attributes)


def _phase_begins(context: ProbeContext, name: str, now_ns: int) -> None:
    if name in _PHASES:
        context.recorder.mark(PIN, now_ns, _PHASES[name])


def _phase_ends(context: ProbeContext, name: str, started_ns: int, now_ns: int, failed: bool) -> None:  # noqa: FBT001  # one call hands on all
    if name in _PHASES:
        context.recorder.mark(UNPIN, now_ns)
    if now_ns - started_ns >= MIN_SPAN_NS:
        attributes = {"phase": name, "step": context.recorder.step}
        context.write_span(catalog.SPAN_PHASE.name, started_ns, now_ns, attributes, failed=failed)
