"""Describes an exception raised in another process or thread, from the traceback text that it sent.

Workers of torch's data loaders and replicas of DataParallel send an ``ExceptionWrapper``, from which the training thread
raises an exception of the same class; ``torch.multiprocessing.spawn`` raises a ``ProcessRaisedException``, and the pools of
``multiprocessing`` and ``concurrent.futures`` chain a ``RemoteTraceback``. Each holds the output of
:func:`traceback.format_exception`: only the class, the message's first line and what has the form of a code location are taken.
"""

from __future__ import annotations

import builtins
import re
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_MAX_LENGTH = 1 << 18
"""Characters that are parsed. A thousand frames, Python's recursion limit, have 150,000."""
_HEAD = "Traceback (most recent call last):\n"
_NEXT = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n(?=Traceback )"
)
_FRAME = re.compile(
    r'  File "((?:/[^"\n]{1,1000}|[^"\n]{1,1000}\.pyx?|<[\w .-]{1,100}>))", line (\d{1,9}), in ([\w<>.]{1,200})'
)
_KIND = re.compile(r"[^\W\d][\w.]{0,199}")
_ORIGIN = re.compile(r"(?:in )?(\w[\w :.-]{0,79})")


class Raised(NamedTuple):
    """One exception of a chain."""

    kind: str
    """its class, as named in the traceback"""
    frames: tuple[tuple[str, str], ...]
    """file, and ``file:line in function``; the deepest last"""
    message: str = ""
    """first line of its message, as raised"""


class WorkerException(NamedTuple):
    """Exception chain raised in another process or thread."""

    origin: str
    """where it was raised: ``DataLoader worker process 0``"""
    chain: tuple[Raised, ...]
    """the root cause first"""
    same: bool
    """True if the local exception stands for the chain's last one, rather than only reporting it"""


def worker_exception(error: BaseException) -> WorkerException | None:
    """Return the remote exception that this one reports; ``None`` if it was raised here."""
    if type(error).__name__ in {"RemoteTraceback", "_RemoteTraceback"}:
        return _from_text("a pool's process", getattr(error, "tb", ""), same=False)
    frame = _last_frame(error.__traceback__)
    if _is(frame, "reraise", "torch/_utils.py"):
        return _from_wrapper(frame.f_locals.get("self")) if frame else None
    if type(error).__name__ == "ProcessRaisedException" and error.args:
        text, index = str(error.args[0])[:_MAX_LENGTH], getattr(error, "error_index", "")
        return _from_text(f"spawned process {index}", text[max(0, text.find(_HEAD)) :], same=False)
    return None


def parse(text: str) -> tuple[Raised, ...]:
    """Return the exceptions of a traceback's text, the root cause first; empty if it is no complete traceback."""
    if len(text) > _MAX_LENGTH:
        text = text[:_MAX_LENGTH]
    found = [_parse_one(part) for part in _NEXT.split(text)]
    whole = tuple(one for one in found if one is not None)
    return whole if len(whole) == len(found) else ()


def _from_wrapper(wrapper: Any) -> WorkerException | None:
    """Read torch's ``ExceptionWrapper``, the ``self`` of its method; a cleared frame has none."""
    where = _ORIGIN.fullmatch(str(getattr(wrapper, "where", "")))
    made = _from_text(where[1] if where else "background", getattr(wrapper, "exc_msg", ""), same=True)
    kind = getattr(wrapper, "exc_type", None)
    if made is None or not isinstance(kind, type):
        return made
    last = made.chain[-1]._replace(kind=f"{kind.__module__}.{kind.__qualname__}")
    return made._replace(chain=(*made.chain[:-1], last))


def _from_text(origin: str, text: object, *, same: bool) -> WorkerException | None:
    chain = parse(text.strip('\n"')) if isinstance(text, str) else ()  # a pool's is in quotes, between newlines
    return WorkerException(origin, chain, same) if chain else None


def _parse_one(text: str) -> Raised | None:
    """Parse frames up to the line with the exception, the first unindented line; what follows is its message.

    Source lines are indented by four, so none looks like a frame. A message can forge the line between two exceptions of a
    chain; the result is a wrong location, but nothing else leaks.
    """
    frames = []
    for line in text.removeprefix(_HEAD).splitlines() if text.startswith(_HEAD) else ():
        if frame := _FRAME.fullmatch(line):
            file, number, function = frame.groups()
            frames.append((file, f"{file}:{number} in {function}"))
        elif line and not line.startswith("  "):
            kind = _KIND.match(line)
            message = line[kind.end() :].removeprefix(": ") if kind else ""
            return Raised(_qualified(kind[0]), tuple(frames), message) if kind and frames else None
    return None


def _qualified(kind: str) -> str:
    return f"builtins.{kind}" if hasattr(builtins, kind) else kind


def _last_frame(trace: TracebackType | None) -> FrameType | None:
    frame = None
    for frame, _ in traceback.walk_tb(trace):  # noqa: B007  # the last is wanted
        pass
    return frame


def _is(frame: FrameType | None, function: str, file: str) -> bool:
    return frame is not None and frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file)
