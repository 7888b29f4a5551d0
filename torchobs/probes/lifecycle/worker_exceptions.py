"""An exception that another process or thread raised: what may be told of it from the traceback's text that it sent.

The workers of torch's data loaders and the replicas of DataParallel send an ``ExceptionWrapper``, of which the training thread
raises an exception of the same class; ``torch.multiprocessing.spawn`` raises a ``ProcessRaisedException``, and the pools of
``multiprocessing`` and ``concurrent.futures`` chain a ``RemoteTraceback``. Each holds what :func:`traceback.format_exception`
made: of that only what has the form of a code location is taken, and the class. Messages and source lines stay where they are.
"""

from __future__ import annotations

import builtins
import re
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_LONGEST = 1 << 18
"""Characters that are looked at. A thousand frames, Python's limit of recursion, have 150,000."""
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
    """its class, as far as a traceback names that"""
    frames: tuple[tuple[str, str], ...]
    """file, and ``file:line in function``; the deepest last"""


class WorkerException(NamedTuple):
    """What was raised elsewhere."""

    origin: str
    """where: ``DataLoader worker process 0``"""
    chain: tuple[Raised, ...]
    """the root cause first"""
    same: bool
    """whether the exception here stands for the chain's last, and not only tells of it"""


def retold(error: BaseException) -> WorkerException | None:
    """Return what an exception retells; ``None`` of one that was raised here."""
    if type(error).__name__ in {"RemoteTraceback", "_RemoteTraceback"}:
        return _made("a pool's process", getattr(error, "tb", ""), same=False)
    frame = _last_frame(error.__traceback__)
    if _is(frame, "reraise", "torch/_utils.py"):
        return _of_wrapper(frame.f_locals.get("self")) if frame else None
    if type(error).__name__ == "ProcessRaisedException" and error.args:
        text, index = str(error.args[0])[:_LONGEST], getattr(error, "error_index", "")
        return _made(f"spawned process {index}", text[max(0, text.find(_HEAD)) :], same=False)
    return None


def parse(text: str) -> tuple[Raised, ...]:
    """Return the exceptions of a traceback's text, the root cause first; empty where it is none, or too long."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST]
    found = [_raised(part) for part in _NEXT.split(text)]
    whole = tuple(one for one in found if one is not None)
    return whole if len(whole) == len(found) else ()


def _of_wrapper(wrapper: Any) -> WorkerException | None:
    """``wrapper``: torch's, the ``self`` of its method; a frame that was cleared has none."""
    where = _ORIGIN.fullmatch(str(getattr(wrapper, "where", "")))
    made = _made(where[1] if where else "background", getattr(wrapper, "exc_msg", ""), same=True)
    kind = getattr(wrapper, "exc_type", None)
    if made is None or not isinstance(kind, type):
        return made
    last = made.chain[-1]._replace(kind=f"{kind.__module__}.{kind.__qualname__}")
    return made._replace(chain=(*made.chain[:-1], last))


def _made(origin: str, text: object, *, same: bool) -> WorkerException | None:
    chain = parse(text.strip('\n"')) if isinstance(text, str) else ()  # a pool's is in quotes, between newlines
    return WorkerException(origin, chain, same) if chain else None


def _raised(text: str) -> Raised | None:
    """Read the frames up to the line with the exception, which is the first that is not indented: what follows is its message.

    A source line is indented by four, so that none passes for a frame. A message can forge the line that stands between two
    exceptions of a chain; then it names a place, which has the form of one, and tells nothing else.
    """
    frames = []
    for line in text.removeprefix(_HEAD).splitlines() if text.startswith(_HEAD) else ():
        if frame := _FRAME.fullmatch(line):
            file, number, function = frame.groups()
            frames.append((file, f"{file}:{number} in {function}"))
        elif line and not line.startswith("  "):
            kind = _KIND.match(line)
            return Raised(_qualified(kind[0]), tuple(frames)) if kind and frames else None
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
