"""``context`` and ``@operation``: time, memory, gradient norm and problems of a part of a program."""

from __future__ import annotations

import functools
import inspect
import resource
import sys
import time
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch

from torchobs.debug.findings import record_finding, record_operation
from torchobs.debug.gradients import before_steps, norm_of, scale_in_use
from torchobs.debug.tensors import require
from torchobs.flight.control import LEVELS
from torchobs.probes.device_memory import used_devices
from torchobs.probes.process_memory import ProcessStats
from torchobs.runtime.session import current
from torchobs.support.after_fork import renew_in_child
from torchobs.support.result import Checked, Problem, Result, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torchobs.debug.operator_watch import Birth


@dataclass(frozen=True, slots=True)
class MemoryUse(Result):
    """Memory before and after, and the most in between."""

    before_bytes: int
    after_bytes: int
    peak_bytes: int
    """Exact if the process reached a new maximum meanwhile; else the greater of both, a lower bound"""


class Reading(NamedTuple):
    """Bytes in use, and the most so far; no peak is reset."""

    host: int
    host_peak: int
    device: int | None
    device_peak: int


def read() -> Reading:
    """Read the process's resident memory, and the memory of tensors on all devices, by torch's allocators."""
    devices = used_devices(torch)
    allocated = sum(device.allocated for device in devices) if devices else None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Reading(ProcessStats().resident().all, peak, allocated, sum(device.peak or device.allocated for device in devices))


def wait_for_devices() -> None:
    """Wait for all CUDA devices that this process uses."""
    cuda: Any = torch.cuda
    c: Any = torch._C
    for index in range(cuda.device_count()) if cuda.is_initialized() else ():
        if c._cuda_hasPrimaryContext(index):  # waiting for an unused one would make a context there
            cuda.synchronize(index)


def use(before: Reading, after: Reading) -> tuple[MemoryUse, MemoryUse | None]:
    """Return the memory used on the host, and on CUDA devices; ``None`` without these."""
    host = MemoryUse(before.host, after.host, _peak(before.host, after.host, before.host_peak, after.host_peak))
    if after.device is None:
        return host, None
    begun = before.device or 0
    peak = _peak(begun, after.device, before.device_peak, after.device_peak)
    return host, MemoryUse(begun, after.device, peak)


def _peak(before: int, after: int, peak_before: int, peak_after: int) -> int:
    return max(before, after, peak_after if peak_after > peak_before else 0)


_lock = Lock()
renew_in_child(sys.modules[__name__], _lock=Lock)
_raising: list[tuple[bool, bool]] = []
"""Torch's anomaly mode, which is the process's, as it was before the first context with ``raise``; one element"""
_count = 0


@contextmanager
def anomaly_mode(anomaly: str, on_birth: Callable[[Birth], object]) -> Iterator[None]:
    """Look for anomalies in that way (``off``, ``warn``, ``raise``) during the block."""
    if anomaly == "raise":
        with _torch_raises():
            yield
    elif anomaly == "warn":
        from torchobs.debug.operator_watch import operators_watched

        with operators_watched(on_birth):
            yield
    else:
        yield


@contextmanager
def _torch_raises() -> Iterator[None]:
    """Switch on torch's anomaly mode, from the first context that wants it to the end of the last."""
    global _count  # noqa: PLW0603  # of the process, as the mode is
    with _lock:
        _count += 1
        if _count == 1:
            _raising.append((torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()))
            torch.autograd.set_detect_anomaly(mode=True, check_nan=True)  # as a function it does not warn
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if _count == 0:
                torch.autograd.set_detect_anomaly(*_raising.pop())


Anomaly = Literal["off", "warn", "raise"]
ANOMALY = ("off", "warn", "raise")
MOST_PROBLEMS = 32
"""Most problems kept of one operation, one for each operator and line"""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DebugInfo(Checked):
    """One operation; measured fields are ``None`` or empty before its end."""

    operation: str
    model_name: str | None = None
    epoch: int | None = None
    batch: int | None = None
    mode: str = "off"
    """How values that are not finite are found: ``off``, ``warn`` or ``raise``"""
    level: str = "off"
    """Level of the session; ``off`` without one"""
    parent: str | None = None
    """The enclosing operation of the same task"""
    timestamp_s: float | None = None
    """When it began, in seconds since 1970"""
    time_s: float | None = None
    cpu_time_s: float | None = None
    """Time that this process's threads computed: if it is far less than ``time_s``, they waited"""
    samples: int | None = None
    sample_time_s: float | None = None
    samples_per_s: float | None = None
    memory: MemoryUse | None = None
    """Resident memory of the process"""
    gpu_memory: MemoryUse | None = None
    """Memory that tensors have on all devices; ``None`` where none is used"""
    gradient_norm: float | None = None
    """L2 norm, unscaled, of the gradients of the last optimizer step inside, or of ``model`` at the end"""
    problems: tuple[Problem, ...] = ()
    error: str | None = None
    """Class of the exception that ended it"""


class _Open:
    """An operation that has begun."""

    def __init__(self, info: DebugInfo, parent: _Open | None) -> None:
        self.info, self.parent = info, parent
        self.norm: Any = None
        self.problems: dict[Problem, None] = {}

    def enclosing(self) -> Iterator[_Open]:
        """Yield this operation and those around it."""
        opened: _Open | None = self
        while opened is not None:
            yield opened
            opened = opened.parent

    def keep_norm(self, optimizer: Any) -> None:
        """Keep the gradient norm of a step that begins, if it is within this operation of this task."""
        innermost = _current.get()
        if innermost is not None and self in innermost.enclosing():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            norm = norm_of(parameters, getattr(optimizer, "grad_scale", None))  # a fused optimizer unscales in its kernel
            self.norm = self.norm if norm is None else norm

    def add_problem(self, kind: str, text: str, where: str = "") -> None:
        """Keep a problem for this operation and those around it."""
        problem = Problem(kind, where or self.info.operation, text)
        for opened in self.enclosing():
            if len(opened.problems) < MOST_PROBLEMS:
                opened.problems[problem] = None


_current: ContextVar[_Open | None] = ContextVar("torchobs_debug_operation", default=None)


def context(  # noqa: PLR0913  # what is recorded of a part
    operation: str, model_name: str | None = None, epoch: int | None = None, batch: int | None = None,
    anomaly: Anomaly = "off", *, model: Any = None, samples: int | None = None, slow_s: float | None = None,
) -> AbstractContextManager[DebugInfo]:  # fmt: skip
    """Measure a ``with`` block: time, memory, gradient norm, problems. It yields a :class:`DebugInfo` that the end fills.

    Blocks nest, separately in each thread and task of an event loop; an exception is recorded and goes on. Each block
    counts in ``debug.summary()`` and, where a session runs, in the flight file.

    Args:
        operation: name under which it counts; a few names, not one for each step.
        model_name: recorded as it is; by default ``model``'s class.
        epoch: recorded as it is.
        batch: its number, recorded as it is.
        anomaly: ``raise``: torch's anomaly mode, which raises at a backward function that returns NaN. ``warn``: find the
            operator, forward or backward, that makes NaN or infinity from finite inputs, and let training go on; it sees every
            operator of this thread, and compiled functions run eagerly in it. The mode that was set before is restored.
        model: module that has its gradients measured at the end, if no optimizer steps inside.
        samples: samples that it processes, for the time by sample. With it, or with ``slow_s``, the block waits for CUDA
            devices at both ends.
        slow_s: seconds above which it is too slow: a problem.

    Raises:
        TypeError: the operation is no text, or ``model`` no module.
        ValueError: ``anomaly`` is none of the three, ``slow_s`` or ``samples`` is not above 0.
    """
    _check(operation, anomaly, model, samples, slow_s)
    name = model_name if model_name is not None or model is None else type(model).__name__
    return _measured(DebugInfo(operation, name, epoch, batch, anomaly, samples=samples), model, slow_s)


def _check(operation: object, anomaly: object, model: Any, samples: object, slow_s: object) -> None:
    if not isinstance(operation, str) or not operation:
        raise TypeError(f"an operation's name is a text, not {operation!r}")
    if anomaly not in ANOMALY:
        raise ValueError(f"anomaly is one of {', '.join(map(repr, ANOMALY))}, not {anomaly!r}")
    if model is not None:
        require(model, "nn.Module", "context")
    if not (samples is None or (isinstance(samples, int) and samples >= 1)):
        raise ValueError(f"samples is a whole number, 1 or more, not {samples!r}")
    if not (slow_s is None or (isinstance(slow_s, (int, float)) and slow_s > 0)):
        raise ValueError(f"slow_s is a number of seconds above 0, not {slow_s!r}")


@contextmanager
def _measured(template: DebugInfo, model: Any, slow_s: float | None) -> Iterator[DebugInfo]:
    parent, session = _current.get(), current()
    level = "off" if session is None or session.context is None else LEVELS[session.context.hooks.level.value]
    enclosing = parent.info.operation if parent is not None else None
    opened = _Open(replace(template, parent=enclosing, level=level, timestamp_s=time.time()), parent)
    waits = slow_s is not None or template.samples is not None
    with ExitStack() as undo:
        undo.callback(_current.set, parent)
        undo.enter_context(anomaly_mode(template.mode, record_birth))
        undo.callback(before_steps(opened.keep_norm))
        _current.set(opened)
        if waits:
            wait_for_devices()
        before, begun, cpu_begun = read(), time.perf_counter(), time.process_time()
        try:
            yield opened.info
            if waits:
                wait_for_devices()
        except BaseException as error:
            fill(opened.info, error=type(error).__name__)
            if isinstance(error, RuntimeError) and "returned nan values in its" in str(error):  # torch's anomaly mode
                opened.add_problem("nonfinite_backward", str(error).splitlines()[0])
            raise
        finally:
            elapsed, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
            undo.close()
            if slow_s is not None and elapsed > slow_s:
                opened.add_problem("slow", f"it took {elapsed:.3g} s, more than {slow_s:g} s")
            if template.samples:
                fill(opened.info, sample_time_s=elapsed / template.samples, samples_per_s=template.samples / elapsed)
            fill(opened.info, time_s=elapsed, cpu_time_s=cpu_s)
            _finish(opened, elapsed, before, model)


def _finish(opened: _Open, elapsed: float, before: Reading, model: Any) -> None:
    info, (host, device) = opened.info, use(before, read())
    on_device = opened.norm if opened.norm is not None or model is None else norm_of(model.parameters(), scale_in_use(None))
    norm = None if on_device is None else float(on_device.item())
    if norm is not None and not isfinite(norm):
        opened.add_problem("nonfinite_gradient", f"the gradient norm is {norm}")
    problems = tuple(opened.problems)
    fill(info, memory=host, gpu_memory=device, gradient_norm=norm, problems=problems)
    record_operation(
        info.operation, elapsed, host.peak_bytes, None if device is None else device.peak_bytes,
        has_problems=bool(problems), has_raised=info.error is not None,
    )  # fmt: skip
    about = {"operation": info.operation, "epoch": info.epoch, "batch": info.batch, "model": info.model_name}
    fields = {name: value for name, value in about.items() if value is not None}
    for problem in problems:
        if opened.parent is None or problem not in opened.parent.problems:  # else the outermost reports it
            record_finding(problem.kind, problem.text, function="context", name=problem.where, **fields)


def record_birth(birth: Birth) -> bool:
    """Add it to this task's innermost operation with ``warn``; return whether there is one."""
    current_operation = _current.get()
    for opened in current_operation.enclosing() if current_operation is not None else ():
        if opened.info.mode == "warn":
            opened.add_problem("nonfinite_result", birth.text, birth.location)
            return True
    return False


def operation(
    name: str | None = None, model_name: str | None = None, *, anomaly: Anomaly = "off", samples: int | None = None,
    slow_s: float | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:  # fmt: skip
    """Decorate a function, or a coroutine function: :func:`context` measures its calls, with the same arguments.

    Args:
        name: the operation's name; by default the function's.
        model_name: recorded as it is.
        anomaly: how values that are not finite are found.
        samples: samples that each call processes.
        slow_s: seconds above which a call is too slow.

    Raises:
        TypeError: it decorates a generator, which does not run when it is called, or the name is no text.
        ValueError: as for :func:`context`.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"@debug.operation() takes a name, or nothing, in parentheses, not {type(name).__name__}")

    def decorate(function: Any) -> Any:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} is a generator: use debug.context() inside it")
        label = name if name is not None else function.__qualname__
        if not inspect.iscoroutinefunction(function):
            measured: Any = context(label, model_name, anomaly=anomaly, samples=samples, slow_s=slow_s)
            return measured(function)

        @functools.wraps(function)
        async def measured_coroutine(*args: Any, **kwargs: Any) -> Any:
            with context(label, model_name, anomaly=anomaly, samples=samples, slow_s=slow_s):
                return await function(*args, **kwargs)

        return measured_coroutine

    return decorate
