"""Find the signal whose Python handler runs, or has raised an exception: by its frame."""

from __future__ import annotations

import functools
import inspect
import signal
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType

_CALL = "__call__"


def raising(error: BaseException) -> int | None:
    """Return the signal whose handler, or a function it called, raised the error; ``None`` for any other error."""
    return _handled(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def running(frame: FrameType) -> int | None:
    """Return the signal whose handler runs in that frame or called it; ``None`` if none does."""
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
            return _given(frame, numbers)
    return None


def _given(frame: FrameType, numbers: list[int]) -> int:
    """Return which of the signals that have this handler it was called for: it is an argument."""
    if len(numbers) == 1:
        return numbers[0]
    found = inspect.getargvalues(frame)
    values = [found.locals.get(argument) for argument in found.args]
    values += found.locals.get(found.varargs, ()) if found.varargs else ()
    return next((int(value) for value in values if isinstance(value, int) and value in numbers), numbers[0])


def _codes(handler: object) -> Iterator[CodeType]:
    """Yield the code of a callable: a function, a method, a partial, or an object with ``__call__``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, getattr(handler, "__func__", None), getattr(type(handler), _CALL, None)):
        if (code := getattr(function, "__code__", None)) is not None:
            yield code
