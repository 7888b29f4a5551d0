"""The one place where an exception of ours is caught: the observer never breaks the observed.

The first exception inside a probe blows its fuse: every guarded function of that probe does nothing from then on, the error
is counted and shown (``torchobs.probe.errors``, ``torchobs.probe.disabled``, an event) and logged once, by the sampler thread.
The pattern is trio's instruments: the first exception removes the instrument, and the program goes on.

What a **signal's handler** raises while our code happens to run is none of ours: a time limit of the user's, or the
``RuntimeError`` by which a ``DataLoader`` says that a worker was killed. It passes. That is no rare coincidence: a signal
that came while torch was busy in C++ is handled at the next call of a Python function, which is often the hook at its end.
"""

from __future__ import annotations

import functools
import signal
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

P = ParamSpec("P")
R = TypeVar("R")


class ProbeFailure(NamedTuple):
    """What blew a fuse: the exception's class and where it was raised. No values, no source text."""

    probe: str
    exception: str
    location: str


class CircuitBreaker:
    """One probe's fuse. ``trips`` is filled by any thread and emptied by the sampler."""

    __slots__ = ("blown", "errors", "probe", "trips")

    def __init__(self, probe: str) -> None:
        self.probe = probe
        self.blown = False
        """Whether guarded functions do nothing"""
        self.errors = 0
        self.trips: list[ProbeFailure] = []

    def trip(self, error: BaseException) -> None:
        """Switch the probe off."""
        self.blown = True
        self.errors += 1
        frames = traceback.extract_tb(error.__traceback__)
        location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
        self.trips.append(ProbeFailure(self.probe, type(error).__name__, location))

    def guard(self, function: Callable[..., R]) -> Callable[..., R | None]:
        """Return ``function`` for use in a hook: it raises nothing of its own, and returns ``None`` once the fuse has blown."""

        def guarded(*args: Any) -> Any:
            if self.blown:
                return None
            try:
                return function(*args)
            except Exception as error:  # this is the guard
                if _is_of_a_signal(error):
                    raise
                self.trip(error)
                return None

        return guarded


def call(breaker: CircuitBreaker, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Call ``function`` unless the fuse has blown; what it raises itself blows the fuse and goes no further."""
    if breaker.blown:
        return None
    try:
        return function(*args, **kwargs)
    except Exception as error:  # this is the guard
        if _is_of_a_signal(error):
            raise
        breaker.trip(error)
        return None


def settle(breaker: CircuitBreaker, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
    """As :func:`call`, for what has to be done before the process ends: begun anew if a signal's handler broke into it.

    At an end workers die, each with a signal whose handler raises; that is told no better by leaving the end unwritten.
    """
    for _ in range(_SETTLE_TRIES):
        try:
            return call(breaker, function, *args, **kwargs)
        except Exception:  # noqa: BLE001, S112  # a signal's handler raised it, and the process ends
            continue
    return None


_SETTLE_TRIES = 5
_CALL = "__call__"


def _is_of_a_signal(error: BaseException) -> bool:
    """Return True if a Python handler of a signal raised it, or what that called: its frame is in the traceback."""
    handlers = {code for number in signal.valid_signals() for code in _codes(signal.getsignal(number))}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _codes(handler: object) -> Iterator[CodeType]:
    """Yield the code that runs when it is called: that of a function, a method, a partial, or an object with ``__call__``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, getattr(handler, "__func__", None), getattr(type(handler), _CALL, None)):
        if (code := getattr(function, "__code__", None)) is not None:
            yield code
