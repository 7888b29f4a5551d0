"""What may be told of an exception: classes and code locations. No message, no value, no source text."""

from __future__ import annotations

import os
import sysconfig
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_DEEPEST = 100
_OWN = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  # compared with code's file names, which are text


def describe(error: BaseException) -> dict[str, str]:
    """Return the attributes of its event: its class, where it was raised, the user's own line, and the root cause's.

    ``caller`` is the innermost line outside of Python's and installed packages' code: an out-of-memory error raised in
    ``torch/nn/functional.py`` has its reason elsewhere. What is not known, or says nothing new, is left out.
    """
    attributes = _located(error, "")
    first = root_cause(error)
    return attributes if first is error else attributes | _located(first, "cause.")


def root_cause(error: BaseException) -> BaseException:
    """Return what it was raised from or while handling, and so on to the first; of a group the first of its members.

    ``raise X from None`` says that what was handled is no cause.
    """
    seen = set[int]()
    while id(error) not in seen and len(seen) < _DEEPEST:
        seen.add(id(error))
        members = getattr(error, "exceptions", None)  # of a BaseExceptionGroup, since Python 3.11
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if isinstance(members, tuple) and members and isinstance(members[0], BaseException):
            earlier = members[0]
        if earlier is None:
            break
        error = earlier
    return error


def _located(error: BaseException, prefix: str) -> dict[str, str]:
    kind = type(error)
    location, caller = _places(error.__traceback__)
    found = {f"{prefix}exception.type" if not prefix else f"{prefix}type": f"{kind.__module__}.{kind.__qualname__}"}
    found[f"{prefix}location"] = location
    if caller not in {"", location}:
        found[f"{prefix}caller"] = caller
    return found


def _places(trace: TracebackType | None) -> tuple[str, str]:
    """Return where it was raised, and the user's own line nearest to that."""
    location, caller = "unknown", ""
    libraries = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _OWN, "<frozen"})
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        location = f"{code.co_filename}:{line} in {code.co_name}"
        if not code.co_filename.startswith(libraries):
            caller = location
    return location, caller
