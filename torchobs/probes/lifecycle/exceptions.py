"""Describes exceptions by class, message and code location: no source text, no variables."""

from __future__ import annotations

import os
import sysconfig
import traceback
from typing import TYPE_CHECKING, Any

from torchobs.detect import collective_timeout
from torchobs.probes.core.timeline import BACKWARD, DATA, OPTIMIZER
from torchobs.probes.lifecycle.exception_message import first_line, message
from torchobs.probes.lifecycle.worker_exceptions import worker_exception
from torchobs.probes.memory.source_lines import is_installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

_MAX_CHAIN = 100
_PHASES = (
    ("torch/utils/data/dataloader.py", "__next__", DATA), ("torch/utils/data/dataloader.py", "__iter__", DATA),
    ("torch/autograd/graph.py", "_engine_run_backward", BACKWARD), ("torch/autograd/__init__.py", "backward", BACKWARD),
    ("torch/optim/optimizer.py", "wrapper", OPTIMIZER),
)  # fmt: skip
"""Functions of torch that are a phase: file, name, phase"""
_OWN = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  # compared with code's file names, which are text


def describe(error: BaseException, *, messages: bool = True) -> dict[str, Any]:
    """Return the event's attributes: class, message, location, the user's own line, and the same of the root cause.

    ``caller`` is the innermost line outside Python's and installed packages' code: an out-of-memory error raised in
    ``torch/nn/functional.py`` has its reason there. Unknown and redundant attributes are left out.

    For an exception from a data loader's worker, ``location`` and ``caller`` are those in the worker, ``origin`` names the
    worker, and ``reraised`` is the user's line here that waited for it.

    Of a collective's timeout the numbers in torch's message are taken. ``messages``: whether messages are kept.
    """
    found = _described(error)
    return {name: value for name, value in found.items() if messages or not name.endswith(".message")}


def _described(error: BaseException) -> dict[str, Any]:
    first = root_cause(error)
    attributes: dict[str, Any] = _located(error, "") | (_timeout(error) or _timeout(first))
    remote = worker_exception(first)
    if remote is not None and (len(remote.chain) > 1 or not remote.same):
        root = remote.chain[0]
        named = _named(root.kind, first_line(root.message), places(root.frames), "cause.")
        return attributes | named | {"cause.origin": remote.origin}
    return attributes if first is error else attributes | _located(first, "cause.")


def phase_of(error: BaseException) -> int | None:
    """Return the phase of a step that the exception, or the first of its chain, has left; ``None`` if it is not seen."""
    found = None
    for frame, _ in traceback.walk_tb(root_cause(error).__traceback__):
        code = frame.f_code
        found = next((phase for end, name, phase in _PHASES if code.co_name == name and code.co_filename.endswith(end)), found)
    return found


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception in the chain of causes and contexts; of a group, follow its first member.

    ``raise X from None`` cuts the chain.
    """
    seen = set[int]()
    while id(error) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(error))
        members = getattr(error, "exceptions", None)  # of a BaseExceptionGroup, since Python 3.11
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if isinstance(members, tuple) and members and isinstance(members[0], BaseException):
            earlier = members[0]
        if earlier is None:
            break
        error = earlier
    return error


def _timeout(error: BaseException) -> dict[str, Any]:
    """Return what an exception says of a timeout of torch.distributed; nothing of any other."""
    message = error.args[0] if isinstance(error, RuntimeError) and error.args else None
    found = collective_timeout.parse(message) if type(message) is str else None
    if found is None:
        return {}
    attributes: dict[str, Any] = {"timeout": found.kind}
    if found.seconds is not None:
        attributes["timeout_s"] = found.seconds
    return attributes | ({"absent_ranks": list(found.absent)} if found.absent else {})


def _located(error: BaseException, prefix: str) -> dict[str, str]:
    kind, remote, here = type(error), worker_exception(error), places(_frames(error.__traceback__))
    if remote is None or not remote.same:
        return _named(f"{kind.__module__}.{kind.__qualname__}", message(error), here, prefix)
    last, came = remote.chain[-1], here[1]
    found = _named(last.kind, first_line(last.message), places(last.frames), prefix) | {f"{prefix}origin": remote.origin}
    return found | ({f"{prefix}reraised": came} if came else {})


def _named(kind: str, text: str, places: tuple[str, str], prefix: str) -> dict[str, str]:
    location, caller = places
    of_type = prefix or "exception."
    found = {f"{of_type}type": kind, **({f"{of_type}message": text} if text else {}), f"{prefix}location": location}
    return found if caller in {"", location} else {**found, f"{prefix}caller": caller}


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        yield code.co_filename, f"{code.co_filename}:{line} in {code.co_name}"


def places(frames: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return where it was raised, and the nearest line of user code. ``frames``: files and places, the deepest last."""
    location, caller = "unknown", ""
    libraries = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _OWN, "<frozen"})
    for file, place in frames:
        if file.startswith(_OWN) and location != "unknown":
            continue  # a wrapper of ours around what raised
        location = place
        if not file.startswith(libraries) and not is_installed(file):
            caller = location
    return location, caller
