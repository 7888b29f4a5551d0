"""Exceptions as they are recorded: class, place and first line of the message, also from other processes and threads.

Workers of torch's data loaders and replicas of DataParallel send an ``ExceptionWrapper``, from which the training thread
raises an exception of the same class; ``torch.multiprocessing.spawn`` raises a ``ProcessRaisedException``, and the pools of
``multiprocessing`` and ``concurrent.futures`` chain a ``RemoteTraceback``. Each holds the output of
:func:`traceback.format_exception`: only the class, the message's first line and what has the form of a code location are taken.
"""

from __future__ import annotations

import builtins
import os
import re
import sysconfig
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.detect import hangs
from torchobs.identity.redaction import redacted_text
from torchobs.probes.core.timeline import BACKWARD, DATA, OPTIMIZER
from torchobs.probes.memory.source_lines import is_installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType, TracebackType


MAX_MESSAGE = 100
_MAX_READ = 4096
"""Characters of a message that are looked at; patterns of secrets take their time"""
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""A terminal's control sequence (ECMA-48): its first character alone is no printable one"""
_PLAIN = (str, int, float, bool, type(None))


def message(error: BaseException) -> str:
    """Return the first line of its message; empty if it has none.

    An argument that is no plain value is not formatted, but by a class that does so itself: a tensor would wait for its device.
    """
    if type(error).__str__ in {BaseException.__str__, KeyError.__str__}:
        plain = all(_is_plain(argument) for argument in error.args)
        return first_line(str(error) if plain else next((text for text in error.args if type(text) is str), ""))
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # the class' own method, which may raise anything
        return ""
    return first_line(text)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value))


def first_line(text: str) -> str:
    """Return the first line that is not blank, as it is recorded."""
    line = next((line for line in text[:_MAX_READ].splitlines() if line.strip()), "")
    printable = "".join(char if char.isprintable() else " " if char.isspace() else "" for char in _COLOUR.sub("", line))
    clean = redacted_text(printable.strip())
    return clean if len(clean) <= MAX_MESSAGE else f"{clean[: MAX_MESSAGE - 1]}…"


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
    found = hangs.parse_timeout(message) if type(message) is str else None
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
