"""What a training script calls. Nothing here raises or waits; in a ``torch.compile(fullgraph=True)`` region it does nothing."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.record import PHASE_NAMES, Flag
from torchobs.guarding import Fuse, call
from torchobs.probes.trace import PIN, UNPIN
from torchobs.session import current

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torchobs.probes.host import Host

MAX_SCALARS = 64
SPAN_FROM_NS = 100_000_000
_fuse = Fuse("facade")


def _never() -> bool:
    return False


_is_compiling: Callable[[], bool] = _never


def torch_is_here() -> None:
    """Ask torch from now on whether a region is being compiled."""
    global _is_compiling  # noqa: PLW0603  # Dynamo reads it as a constant
    import torch  # it has been imported

    _is_compiling = torch.compiler.is_compiling


def step() -> None:
    """Say that a training step has ended, where no optimizer of ``torch.optim`` steps (functional optimizers, ``torch.func``).

    From the first call on these calls alone cut the training into steps.
    """
    if not _is_compiling():
        call(_fuse, _step)


def log(*, loss: Any = None, tokens: int = 0, samples: int = 0, total_steps: int | None = None, **scalars: Any) -> None:
    """Add what only the script knows to the step in progress or, directly after ``optimizer.step()``, to that one.

    Where :func:`step` cuts the training into steps, call this before it.

    Args:
        loss: the step's loss, instead of what its backward passes began from. A number or a tensor with one element; a
            tensor on a device is copied without waiting.
        tokens: tokens trained on since the last call, on this rank.
        samples: samples, likewise.
        total_steps: steps that the run will take; once is enough.
        scalars: other numbers by name; each is a gauge, the first 64 names count.
    """
    if not _is_compiling():
        call(_fuse, _log, loss, tokens, samples, scalars)
        if total_steps is not None:
            call(_fuse, _set_total, total_steps)


def event(name: str, **attributes: Any) -> None:
    """Record that something happened now, with its attributes."""
    if not _is_compiling():
        call(_fuse, _event, name, attributes)


def watch(model: Any) -> None:
    """Say which module is trained: its class and the size of its parameters go on record."""
    if not _is_compiling():
        call(_fuse, _watch, model)


def phase(name: str) -> AbstractContextManager[None]:
    """Name what the ``with`` block does: ``data``, ``forward``, ``backward``, ``optimizer``, ``evaluation`` or ``checkpoint``.

    Its time counts as that, whatever the hooks see in it. Any other name leaves the step's phases alone. A block of 100 ms
    or longer is recorded as a span, too.
    """
    return contextlib.nullcontext() if _is_compiling() else _Phase(name)


class _Phase:
    """The block. Reusable and reentrant."""

    __slots__ = ("_begun_ns", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun_ns: list[int] = []

    def __enter__(self) -> None:
        now_ns = time.monotonic_ns()
        self._begun_ns.append(now_ns)
        call(_fuse, _phase_begins, self._name, now_ns)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        call(_fuse, _phase_ends, self._name, self._begun_ns.pop(), time.monotonic_ns(), failed=kind is not None)


def _recording() -> Host | None:
    """Return the host of the session, unless there is none or its level is off."""
    session = current()
    host = session.host if session is not None else None
    return host if host is not None and host.level else None


def _step() -> None:
    host = _recording()
    if host is not None:
        host.cycle.end(time.monotonic_ns())


def _log(loss: Any, tokens: int, samples: int, scalars: dict[str, Any]) -> None:
    host = _recording()
    if host is None:
        return
    cycle = host.cycle
    if loss is not None and getattr(getattr(loss, "device", None), "type", "cpu") != "cpu":
        ended = cycle.logged_step()
        host.device.take(loss, lambda value: cycle.late(ended, Flag.LOSS, value, 0.0))
        cycle.log_wins, loss = True, None
    cycle.log(None if loss is None else _number(loss), int(tokens), int(samples))
    for name, value in scalars.items():
        cell = host.writer.table.cell(catalog.SCALAR_VALUE, {"name": name}) if _has_room(host, name) else None
        if cell is not None:
            host.device.take(value, cell.set) if hasattr(value, "device") else cell.set(_number(value))


def _set_total(total_steps: int) -> None:
    session = current()
    cell = session.writer.table.cell(catalog.TOTAL_STEPS, {}) if session is not None and session.writer is not None else None
    if cell is not None:
        cell.set(float(total_steps))


def _has_room(host: Host, name: str) -> bool:
    if name not in host.scalars and len(host.scalars) >= MAX_SCALARS:
        host.writer.table.dropped += 1
        return False
    host.scalars.add(name)
    return True


def _number(value: Any) -> float:
    return float(value.detach().item() if hasattr(value, "detach") else value)


def _event(name: str, attributes: dict[str, Any]) -> None:
    host = _recording()
    if host is not None:
        host.writer.event(name, attributes, host.cycle.step)


def _watch(model: Any) -> None:
    host = _recording()
    if host is None:
        return
    parameters = list(model.parameters())
    attributes = {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }
    host.writer.event(catalog.EVENT_MODEL.name, attributes, host.cycle.step)


def _phase_begins(name: str, now_ns: int) -> None:
    host = _recording()
    if host is not None and name in PHASE_NAMES:
        host.cycle.mark(PIN, now_ns, PHASE_NAMES.index(name))


def _phase_ends(name: str, begun_ns: int, now_ns: int, *, failed: bool) -> None:
    host = _recording()
    if host is None:
        return
    if name in PHASE_NAMES:
        host.cycle.mark(UNPIN, now_ns)
    if now_ns - begun_ns >= SPAN_FROM_NS and host.span is not None:
        attributes = {"phase": name, "step": host.cycle.step}
        host.span(catalog.SPAN_PHASE.name, begun_ns, now_ns, attributes, failed=failed)
