"""What may be told of an exception: classes and code locations. No message, no value, no source text."""

from __future__ import annotations

import os
import sysconfig
import traceback
from typing import TYPE_CHECKING

from torchobs.probes.lifecycle.worker_exceptions import retold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

_DEEPEST = 100
_INSTALLED = ("/site-packages/", "/dist-packages/")
"""Of any environment: torch may be in another one than this Python's, by PYTHONPATH or a .pth file."""
_OWN = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  # compared with code's file names, which are text


def describe(error: BaseException) -> dict[str, str]:
    """Return the attributes of its event: its class, where it was raised, the user's own line, and the root cause's.

    ``caller`` is the innermost line outside of Python's and installed packages' code: an out-of-memory error raised in
    ``torch/nn/functional.py`` has its reason elsewhere. What is not known, or says nothing new, is left out.

    An exception that a data loader's worker has sent is told with the place where the worker raised it (``location``,
    ``caller``), which worker that was (``origin``), and the user's line that waited for it here (``reraised``).
    """
    attributes, first = _located(error, ""), root_cause(error)
    elsewhere = retold(first)
    if elsewhere is not None and (len(elsewhere.chain) > 1 or not elsewhere.same):
        root = elsewhere.chain[0]
        return attributes | _named(root.kind, _places(root.frames), "cause.") | {"cause.origin": elsewhere.origin}
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
    kind, elsewhere, here = type(error), retold(error), _places(_frames(error.__traceback__))
    if elsewhere is None or not elsewhere.same:
        return _named(f"{kind.__module__}.{kind.__qualname__}", here, prefix)
    last, came = elsewhere.chain[-1], here[1]
    found = _named(last.kind, _places(last.frames), prefix) | {f"{prefix}origin": elsewhere.origin}
    return found | ({f"{prefix}reraised": came} if came else {})


def _named(kind: str, places: tuple[str, str], prefix: str) -> dict[str, str]:
    location, caller = places
    found = {f"{prefix}type" if prefix else "exception.type": kind, f"{prefix}location": location}
    return found if caller in {"", location} else {**found, f"{prefix}caller": caller}


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        yield code.co_filename, f"{code.co_filename}:{line} in {code.co_name}"


def _places(frames: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return where it was raised, and the user's own line nearest to that. ``frames``: files and places, the deepest last."""
    location, caller = "unknown", ""
    libraries = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _OWN, "<frozen"})
    for file, place in frames:
        if file.startswith(_OWN) and location != "unknown":
            continue  # a wrapper of ours around what raised
        location = place
        if not file.startswith(libraries) and not any(part in file for part in _INSTALLED):
            caller = location
    return location, caller
