"""Circuit breakers that keep torchobs' own exceptions out of the training; no other module catches them.

The hooks of every step do without the frame of :meth:`CircuitBreaker.guard`: they look at ``is_open`` themselves, and have an
``except Exception`` that asks :meth:`CircuitBreaker.takes` and raises again if it does not.

An **error of the device** that the user's work caused propagates, too. A device works behind the program's back: its failure
(an illegal memory access) is raised by whichever call comes next, perhaps ours. Most such errors come again with every later
call (CUDA's runtime API, "sticky"), but a launch that was refused is raised once (``cudaGetLastError``).

The first exception inside a probe trips its breaker: every guarded function of that probe does nothing from then on, the
error is counted and published (``torchobs.probe.errors``, ``torchobs.probe.disabled``, an event) and logged once, by the
sampler thread. The pattern is trio's instruments: the first exception removes the instrument, and the program goes on.

An exception raised by a **signal handler** while our code runs is the user's and propagates: a time limit, or the
``RuntimeError`` with which ``DataLoader`` reports a killed worker. That is common: a signal that arrives while torch is busy in
C++ is handled at the next call of a Python function, which is often our hook.
"""

from __future__ import annotations

import functools
import inspect
import re
import signal
import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import CodeType, FrameType


_CALL = "__call__"


def raising(error: BaseException) -> int | None:
    """Return the signal if a handler of it, or a function below one, raised the error; ``None`` for any other error."""
    return _handled(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def running(frame: FrameType) -> int | None:
    """Return the signal if a handler of it runs in that frame or called it; ``None`` if none does."""
    return _handled(outer for outer, _ in traceback.walk_stack(frame))


def name(number: int) -> str:
    """Return a signal's name; of a real-time signal without one its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _handled(frames: Iterable[FrameType]) -> int | None:
    handlers: dict[CodeType, list[int]] = {}
    for number in signal.valid_signals():
        for code in _codes(signal.getsignal(number)):
            handlers.setdefault(code, []).append(int(number))
    for frame in frames if handlers else ():
        if numbers := handlers.get(frame.f_code):
            return _called_for(frame, numbers)
    return None


def _called_for(frame: FrameType, numbers: list[int]) -> int:
    """Return the signal that a handler of several was called for: it is one of the arguments."""
    if len(numbers) == 1:
        return numbers[0]
    arguments = inspect.getargvalues(frame)
    values = [arguments.locals.get(argument) for argument in arguments.args]
    values += arguments.locals.get(arguments.varargs, ()) if arguments.varargs else ()
    return next((int(value) for value in values if isinstance(value, int) and value in numbers), numbers[0])


def _codes(handler: object) -> Iterator[CodeType]:
    """Yield the code of a callable: a function, a method, a partial, or an object with ``__call__``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, getattr(handler, "__func__", None), getattr(type(handler), _CALL, None)):
        if (code := getattr(function, "__code__", None)) is not None:
            yield code


P = ParamSpec("P")
R = TypeVar("R")


function_modes: Callable[[], int] = int
"""Counts the function modes of this thread; before torch is imported there are none."""
no_function_modes: Callable[[], AbstractContextManager[object]] = nullcontext
"""Returns a block in which torch calls none of them, nor ``__torch_function__`` of a tensor's class."""


def use_torch() -> None:
    """Keep function modes out from now on. Called once torch is imported."""
    global function_modes, no_function_modes  # a guard has no other place for them
    import torch  # it has been imported

    count = getattr(torch._C, "_len_torch_function_stack", int)  # noqa: SLF001  # there is no public API; ``int()`` is 0
    function_modes, no_function_modes = count, torch._C.DisableTorchFunction  # noqa: SLF001  # as above


class ProbeFailure(NamedTuple):
    """Exception that tripped a breaker: its class and where it was raised. No values, no source text."""

    probe: str
    exception: str
    location: str


class CircuitBreaker:
    """Circuit breaker of one probe. ``failures`` is filled by any thread and emptied by the sampler."""

    __slots__ = ("errors", "failures", "is_open", "probe")

    def __init__(self, probe: str) -> None:
        self.probe = probe
        self.is_open = False
        """True once tripped: guarded functions do nothing"""
        self.errors = 0
        self.failures: list[ProbeFailure] = []

    def trip(self, error: BaseException) -> None:
        """Record the error and disable the probe."""
        self.is_open = True
        self.errors += 1
        frames = traceback.extract_tb(error.__traceback__)
        location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
        self.failures.append(ProbeFailure(self.probe, type(error).__name__, location))

    def takes(self, error: Exception) -> bool:
        """Record the error and disable the probe; return whether it is ours: the user's has to be raised again."""
        if raising(error) is not None:
            return False
        if is_of_device(error):
            self.is_open = True
            return False
        self.trip(error)
        return True

    def guard(self, function: Callable[..., R]) -> Callable[..., R | None]:
        """Return ``function`` for use in a hook: it lets none of our exceptions out, and returns ``None`` once tripped.

        A ``TorchFunctionMode`` of the user's (``torch.set_default_device`` is one) does not see its operations on tensors.
        """

        def guarded(*args: Any) -> Any:
            if self.is_open:
                return None
            try:
                if function_modes():
                    with no_function_modes():
                        return function(*args)
                return function(*args)
            except Exception as error:  # this is the guard
                if not self.takes(error):
                    raise
                return None

        return guarded


def call(breaker: CircuitBreaker, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Call ``function`` unless the breaker has tripped; its exception trips the breaker and goes no further."""
    if breaker.is_open:
        return None
    try:
        return function(*args, **kwargs)
    except Exception as error:  # this is the guard
        if not breaker.takes(error):
            raise
        return None


def settle(breaker: CircuitBreaker, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Call as :func:`call` does, for work at the end of the process: retried if a signal handler's exception interrupts it.

    At the end workers die, each with a signal and a handler that raises; that must not prevent recording the end. Nor must a
    Ctrl-C or a handler that leaves by ``SystemExit``, which are raised again when that is done.
    """
    result, leaving = None, list[BaseException]()
    for _ in range(_SETTLE_TRIES):
        try:
            result = call(breaker, function, *args, **kwargs)
            break
        except Exception:  # noqa: BLE001, S112  # a signal's handler raised it, and the process ends
            continue
        except (KeyboardInterrupt, SystemExit) as interrupt:
            leaving.append(interrupt)
    if leaving:
        raise leaving[0]
    return result


_SETTLE_TRIES = 5
_OF_DEVICE = re.compile(r"\A(?:CUDA|HIP) error: (.*)")
_FAILURES = (
    "an illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address",
    "an illegal instruction", "uncorrectable ECC error", "invalid program counter", "hardware stack error",
    "the launch timed out", "operation not supported on global/shared address space", "uncorrectable NVLink error",
    "invalid configuration argument", "too many resources requested for launch",
)  # fmt: skip
"""Parts of CUDA's texts (``cudaGetErrorString``) for failures of a device's work or its launch, which no call of ours causes"""


def is_of_device(error: BaseException) -> bool:
    """Return whether the error is a failure of the user's own work on a device (``torch.AcceleratorError``)."""
    match = _OF_DEVICE.match(str(error)) if isinstance(error, RuntimeError) else None
    return match is not None and any(text in match[1] for text in _FAILURES)
