"""Find out whether a function can call another one, without running it: search the objects that it refers to.

Decorators keep what they wrap in a closure, in ``__wrapped__``, in a global name or in an object's attribute.
"""

from __future__ import annotations

import functools
from collections import deque
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST = 500
"""Objects that are searched"""
_MOST_ITEMS = 64


def leads_to(function: Any, wanted: Any) -> bool:
    """Return True if calling ``function`` can call ``wanted``."""
    queue, seen = deque([function]), {id(function)}
    while queue and len(seen) < _MOST:
        found = queue.popleft()
        if found is wanted:
            return True
        for referred in _referred(found):
            if id(referred) not in seen:
                seen.add(id(referred))
                queue.append(referred)
    return False


def _referred(found: Any) -> Iterator[Any]:
    """Yield the objects that a call of ``found`` may call."""
    if isinstance(found, FunctionType):
        yield from _of_function(found)
    elif isinstance(found, (MethodType, staticmethod, classmethod)):
        yield found.__func__
        if isinstance(found, MethodType):
            yield found.__self__
    elif isinstance(found, functools.partial):
        yield found.func
        yield from found.args[:_MOST_ITEMS]
    elif isinstance(found, (list, tuple)):
        yield from found[:_MOST_ITEMS]
    elif isinstance(found, dict):
        if len(found) <= _MOST_ITEMS:
            yield from list(found.values())
    elif not isinstance(found, (type, type(functools), str, bytes, int, float)):
        yield from _of_object(found)


def _of_function(found: FunctionType) -> Iterator[Any]:
    for cell in found.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    if (wrapped := found.__dict__.get("__wrapped__")) is not None:
        yield wrapped
    yield from found.__defaults__ or ()
    yield from (found.__kwdefaults__ or {}).values()
    if not str(found.__globals__.get("__name__", "")).startswith(("torch.", "torchobs.")):  # they reach too much
        yield from (found.__globals__[name] for name in found.__code__.co_names if name in found.__globals__)


def _of_object(found: Any) -> Iterator[Any]:
    """Yield ``__call__`` and the attributes: a function may be held there, or a method used as the replacement."""
    if isinstance(call := getattr(type(found), "__call__", None), FunctionType):  # noqa: B004  # which function it is
        yield call
    held = getattr(found, "__dict__", None)
    if isinstance(held, dict) and not str(type(found).__module__).startswith(("torch.", "torchobs.")):
        yield from list(held.values())[:_MOST_ITEMS]
