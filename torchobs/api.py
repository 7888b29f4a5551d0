"""What a training script calls. Nothing here raises or waits; in a ``torch.compile(fullgraph=True)`` region it does nothing.

Each function has a fuse of its own (``guarding``): what fails is off, and shown like a probe that failed.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.format.step_record import PHASE_NAMES, StepFlag
from torchobs.probes.core.boundaries import PIN, UNPIN
from torchobs.runtime.session import current
from torchobs.support import graph_safe
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torchobs.probes.core.context import ProbeContext

SPAN_FROM_NS = 100_000_000
_SEGMENTS = {**{name: index for index, name in enumerate(PHASE_NAMES)}, "rollout": PHASE_NAMES.index("other")}


def step() -> None:
    """Say that a training step has ended, where no optimizer of ``torch.optim`` steps (functional optimizers, ``torch.func``).

    From the first call on these calls alone cut the training into steps.
    """
    if not graph_safe.is_compiling():
        _call("step", _step)


def log(*, loss: Any = None, tokens: int = 0, samples: int = 0, total_steps: int | None = None, **scalars: Any) -> None:
    """Add what only the script knows to the step in progress or, directly after ``optimizer.step()``, to that one.

    Where :func:`step` cuts the training into steps, call this before it.

    Args:
        loss: the step's loss, instead of what its backward passes began from. A number or a tensor with one element; a
            tensor on a device is copied without waiting.
        tokens: tokens trained on since the last call, on this rank.
        samples: samples, likewise.
        total_steps: steps that this process will take (going on from a checkpoint: those to come); once is enough.
        scalars: other numbers by name; each is a gauge and a curve, the first 64 names count. What is no number is left out.
    """
    if not graph_safe.is_compiling():
        _call("log", _log, loss, tokens, samples, total_steps, scalars)


def event(name: str, **attributes: Any) -> None:
    """Record that something happened now, with its attributes."""
    if not graph_safe.is_compiling():
        _call("event", _event, name, attributes)


def watch(model: Any) -> None:
    """Say which module is trained: its class and size go on record, and its parameters' names are known at once."""
    if not graph_safe.is_compiling():
        _call("watch", _watch, model)


def phase(name: str) -> AbstractContextManager[None]:
    """Name what the ``with`` block does: ``data``, ``rollout``, ``forward``, ``backward``, ``optimizer``, ``evaluation`` ...

    ... or ``checkpoint``. Its time counts as that, whatever the hooks see in it, and that of a ``rollout`` (a reinforcement
    learner's, played to train on) as ``other``. What follows a block of ``data`` or ``rollout`` is ``forward``, up to the
    backward pass. Any other name leaves the step's phases alone. A block of 100 ms or longer is recorded as a span, too.
    """
    return contextlib.nullcontext() if graph_safe.is_compiling() else _Phase(name)


class _Phase:
    """The block. Reusable and reentrant."""

    __slots__ = ("_begun_ns", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun_ns: list[int] = []

    def __enter__(self) -> None:
        now_ns = time.monotonic_ns()
        self._begun_ns.append(now_ns)
        _call("phase", _phase_begins, self._name, now_ns)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _call("phase", _phase_ends, self._name, self._begun_ns.pop(), time.monotonic_ns(), kind is not None)


def _call(name: str, function: Callable[..., None], *args: Any) -> None:
    """Call it with the host of the session, on the fuse of that name, unless there is none or its level is off."""
    session = current()
    context = session.context if session is not None else None
    if context is not None and context.level:
        call(context.breaker(name), function, context, *args)


def _step(context: ProbeContext) -> None:
    if context.recorder.metered or not context.recorder.step:
        context.loop.note()
    context.recorder.end(time.monotonic_ns())


def _log(context: ProbeContext, loss: Any, tokens: int, samples: int, total_steps: int | None, scalars: dict[str, Any]) -> None:
    if loss is not None or tokens or samples:
        _log_step(context, loss, int(tokens), int(samples))
    if total_steps is not None:
        context.scalars.set_total_steps(float(total_steps))
    for name, value in scalars.items():
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # what torch, Python and NumPy say to that
            _log_scalar(context, name, value)


def _log_step(context: ProbeContext, loss: Any, tokens: int, samples: int) -> None:
    recorder = context.recorder
    if loss is not None and _is_elsewhere(loss):
        ended = recorder.logged_step()
        context.device.take(loss, lambda value: recorder.late(ended, StepFlag.LOSS, value, 0.0))
        recorder.log_wins, loss = True, None
    recorder.log(None if loss is None else _number(loss), tokens, samples)


def _log_scalar(context: ProbeContext, name: str, value: Any) -> None:
    number = None if _is_elsewhere(value) else _number(value)
    if not context.scalars.has_room(name):
        return
    if number is None:
        context.device.take(value, partial(context.scalars.set, name, context.recorder.ended))
    else:
        context.scalars.set(name, context.recorder.ended, number)


def _is_elsewhere(value: Any) -> bool:
    """Return True if a device has it, where reading would wait. NumPy's numbers have a ``device``, too: a string."""
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
    if context.watched is not None:
        context.watched(model)
    context.writer.event(catalog.EVENT_MODEL.name, attributes, context.recorder.step)


def _phase_begins(context: ProbeContext, name: str, now_ns: int) -> None:
    if name in _SEGMENTS:
        context.recorder.mark(PIN, now_ns, _SEGMENTS[name])


def _phase_ends(context: ProbeContext, name: str, begun_ns: int, now_ns: int, failed: bool) -> None:  # noqa: FBT001  # one call hands on all
    if name in _SEGMENTS:
        context.recorder.mark(UNPIN, now_ns)
    if now_ns - begun_ns >= SPAN_FROM_NS and context.span is not None:
        attributes = {"phase": name, "step": context.recorder.step}
        context.span(catalog.SPAN_PHASE.name, begun_ns, now_ns, attributes, failed=failed)
