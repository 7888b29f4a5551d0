"""How a rank ends: by an exception, which is recorded by class, place and message, ``sys.exit(n)``, Ctrl-C, or normally.

SIGKILL and ``os._exit`` leave no trace: such a rank is *lost*. The default SIGTERM leaves a mark by a handler in C
(:mod:`torchobs.flight.endings`): a Python handler does not run in a stuck collective, and would make the rank ignore SIGTERM.

An exception that ends a notebook cell, a test or a line at the prompt does not end the rank. IPython, pytest and Python's own
prompt store it in ``sys.last_value``, where the sampler finds it unless another one follows within a tenth of a second.
"""

from __future__ import annotations

import builtins
import multiprocessing
import re
import signal
import sys
import threading
import traceback
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.config.identity import exit_status
from torchobs.config.provenance import redacted_text
from torchobs.detect import hangs
from torchobs.flight.layout import Exit
from torchobs.probes.device_memory import host_shortage
from torchobs.support import error_guard
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import call, settle
from torchobs.support.source_lines import is_ours, is_users
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from torchobs.probes.context import ProbeContext


MAX_MESSAGE = 100
_MAX_READ = 4096
"""Characters of a message that are searched; patterns of secrets take their time"""
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""A terminal's control sequence (ECMA-48): its first character alone is no printable one"""
_PLAIN = (str, int, float, bool, type(None))


def message(error: BaseException) -> str:
    """Return the first line of its message; empty if it has none.

    An argument that is no plain value is not formatted, but by a class that does so itself: a tensor would wait for its device.
    """
    if type(error).__str__ in {BaseException.__str__, KeyError.__str__}:
        plain = all(type(x) in _PLAIN or (type(x) is tuple and all(type(item) in _PLAIN for item in x)) for x in error.args)
        return first_line(str(error) if plain else next((text for text in error.args if type(text) is str), ""))
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # the class' own method, which may raise anything
        return ""
    return first_line(text)


def first_line(text: str) -> str:
    """Return the first line that is not blank, as it is recorded."""
    line = next((line for line in text[:_MAX_READ].splitlines() if line.strip()), "")
    printable = "".join(char if char.isprintable() else " " if char.isspace() else "" for char in _COLOUR.sub("", line))
    clean = redacted_text(printable.strip())
    return clean if len(clean) <= MAX_MESSAGE else f"{clean[: MAX_MESSAGE - 1]}…"


_MAX_LENGTH = 1 << 18
"""Most characters of a traceback that are parsed: a thousand frames, Python's recursion limit, have 150,000"""
_NEXT = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n(?=Traceback )"
)
_ONE = re.compile(r"Traceback \(most recent call last\):\n((?:(?:  .*)?\n)*)([^\W\d][\w.]{0,199})(?:: )?(.*)")
"""Frames, up to the first line that is not indented: the exception's class, and the first line of its message"""
_FRAME = re.compile(
    r'^  File "((?:/[^"\n]{1,1000}|[^"\n]{1,1000}\.pyx?|<[\w .-]{1,100}>))", line (\d{1,9}), in ([\w<>.]{1,200})$', re.MULTILINE
)
_ORIGIN = re.compile(r"(?:in )?(\w[\w :.-]{0,79})")


class Raised(NamedTuple):
    """One exception of a chain."""

    kind: str
    """its class, as named in the traceback"""
    frames: tuple[tuple[str, str], ...]
    """file, and ``file:line in function``; the deepest last"""
    message: str
    """first line of its message, as it is recorded"""


def worker_chain(error: BaseException) -> tuple[str, tuple[Raised, ...]]:
    """Return the worker that raised the exception, ``DataLoader worker process 0``, and its chain, the root cause first.

    Both are empty if it was raised here. Workers of torch's data loaders and replicas of DataParallel send an
    ``ExceptionWrapper``, from which the training thread raises an exception of the same class. It holds the output of
    :func:`traceback.format_exception`: only the class, the message's first line and code locations are taken.
    """
    frame = None
    for frame, _ in traceback.walk_tb(error.__traceback__):  # noqa: B007  # the last is wanted
        pass
    if frame is None or frame.f_code.co_name != "reraise" or not frame.f_code.co_filename.endswith("torch/_utils.py"):
        return "", ()
    wrapper = frame.f_locals.get("self")  # none in a cleared frame
    where, text = _ORIGIN.fullmatch(str(getattr(wrapper, "where", ""))), getattr(wrapper, "exc_msg", "")
    chain, kind = parse(text.strip("\n")) if isinstance(text, str) else (), getattr(wrapper, "exc_type", None)
    if chain and isinstance(kind, type):
        chain = (*chain[:-1], chain[-1]._replace(kind=f"{kind.__module__}.{kind.__qualname__}"))
    return (where[1] if where else "background", chain) if chain else ("", ())


def parse(text: str) -> tuple[Raised, ...]:
    """Return the exceptions of a traceback's text, the root cause first; empty if it is no complete traceback.

    Source lines are indented by four, so none looks like a frame. A message can forge the line between two exceptions of a
    chain; the result is a wrong location, but nothing else leaks.
    """
    chain = []
    for part in _NEXT.split(text[:_MAX_LENGTH]):
        match = _ONE.match(part)
        frames = tuple((file, f"{file}:{line} in {name}") for file, line, name in _FRAME.findall(match[1])) if match else ()
        if match is None or not frames:
            return ()
        kind = f"builtins.{match[2]}" if hasattr(builtins, match[2]) else match[2]
        chain.append(Raised(kind, frames, first_line(match[3])))
    return tuple(chain)


_MAX_CHAIN = 100


def describe(error: BaseException, *, messages: bool = True) -> dict[str, Any]:
    """Return the event's attributes: class, message, location, the user's own line, and the same of the root cause.

    ``caller`` is the innermost line outside Python's and installed packages' code: an out-of-memory error raised in
    ``torch/nn/functional.py`` has its reason there. Unknown and redundant attributes are left out.

    For an exception from a data loader's worker, ``location`` and ``caller`` are those in the worker, ``origin`` names the
    worker, and ``reraised`` is the user's line here that waited for it.

    Of a collective's timeout the numbers in torch's message are taken. ``messages``: whether messages are kept.
    """
    first, here = root_cause(error), _raised(error)
    origin, chain = worker_chain(error)
    roots = chain if first is error else worker_chain(first)[1] or (_raised(first),)
    shown = chain[-1] if chain else here
    attributes: dict[str, Any] = _located(shown, "") | (_timeout(error) or _timeout(first))
    if origin:
        attributes |= {"origin": origin} | ({"reraised": caller} if (caller := places(here.frames)[1]) else {})
    if roots and roots[0] is not shown:
        attributes |= _located(roots[0], "cause.")
    return {name: value for name, value in attributes.items() if messages or not name.endswith(".message")}


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception in the chain of causes and contexts; of a group, follow its first member.

    ``raise X from None`` cuts the chain.
    """
    visited = set[int]()
    while id(error) not in visited and len(visited) < _MAX_CHAIN:
        visited.add(id(error))
        members = getattr(error, "exceptions", None)  # of a BaseExceptionGroup, since Python 3.11
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if isinstance(members, tuple) and members and isinstance(members[0], BaseException):
            earlier = members[0]
        if earlier is None:
            break
        error = earlier
    return error


def runtime_message(error: BaseException) -> str:
    """Return the text of a ``RuntimeError``, which is torch's; empty for any other error."""
    message = error.args[0] if isinstance(error, RuntimeError) and error.args else None
    return message if type(message) is str else ""


def _timeout(error: BaseException) -> dict[str, Any]:
    """Return the attributes of a timeout of torch.distributed, by the exception's message; none of any other."""
    timeout = hangs.parse_timeout(runtime_message(error))
    if timeout is None:
        return {}
    attributes: dict[str, Any] = {"timeout": timeout.kind}
    if timeout.seconds is not None:
        attributes["timeout_s"] = timeout.seconds
    return attributes | ({"absent_ranks": list(timeout.absent)} if timeout.absent else {})


def _raised(error: BaseException) -> Raised:
    kind = type(error)
    return Raised(f"{kind.__module__}.{kind.__qualname__}", tuple(_frames(error.__traceback__)), message(error))


def _located(raised: Raised, prefix: str) -> dict[str, str]:
    location, caller = places(raised.frames)
    of_type = prefix or "exception."
    message = {f"{of_type}message": raised.message} if raised.message else {}
    attributes = {f"{of_type}type": raised.kind, **message, f"{prefix}location": location}
    return attributes if caller in {"", location} else {**attributes, f"{prefix}caller": caller}


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        yield code.co_filename, f"{code.co_filename}:{line} in {code.co_name}"


def places(frames: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return the place of the error, and the nearest line of user code. ``frames``: files and places, the deepest last."""
    location, caller = "unknown", ""
    for file, place in frames:
        if is_ours(file) and location != "unknown":
            continue  # a wrapper of ours around what raised
        location = place
        if is_users(file):
            caller = location
    return location, caller


INTERRUPTED = 130
"""Shell's exit status of a process ended by SIGINT"""


def _has_shell() -> bool:
    """Return whether IPython runs: no exception of a cell comes to ``sys.excepthook``, which it puts back after each cell."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and get_shell() is not None


def _cause(error: BaseException) -> int | None:
    """Return the signal with the handler that raised the exception, or the first of its chain."""
    if (number := error_guard.raising(error)) is not None:
        return number
    first = root_cause(error)
    if first is not error and (number := error_guard.raising(first)) is not None:
        return number
    interrupted = isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and isinstance(first, KeyboardInterrupt)
    )
    return signal.SIGINT if interrupted else None


def _signal(number: int | None) -> dict[str, str]:
    return {} if number is None else {"signal": error_guard.name(number)}


def _by_signal(number: int | None, code: int, otherwise: int) -> int:
    """Return the reason of an end after a signal: a status other than 0 on request is no failure."""
    if not code or number not in {signal.SIGTERM, signal.SIGINT}:
        return otherwise
    return Exit.TERMINATED if number == signal.SIGTERM else Exit.INTERRUPTED


class Ending(NamedTuple):
    """How a rank ends."""

    reason: int
    """one of ``layout.Exit``"""
    code: int
    signal: int | None = None
    """the signal with the handler that led to it, if any"""

    @property
    def attributes(self) -> dict[str, object]:
        """Those of the event."""
        return {"reason": catalog.EXIT_REASONS[self.reason - Exit.FINISHED], "code": self.code, **_signal(self.signal)}


class ExitProbe:
    """Wraps the excepthooks and ``sys.exit``."""

    name = "exits"

    def __init__(self) -> None:
        self._context: ProbeContext | None = None
        self._patches: list[Patch] = []
        self._fatal: Ending | None = None
        self.last_error: BaseException | None = None
        """The exception, or ``SystemExit``, that ends the program, if it is known"""
        self._sys_exit: Ending | None = None
        self._sys_exit_step = 0
        self._recorded = self._followed = self._last = 0
        self._recording = RLock()
        renew_in_child(self, _recording=RLock)

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._breaker = context, context.breaker(self.name)
        self._last = id(getattr(sys, "last_value", None))
        context.writer.mark_signals()
        watched = [(threading, "excepthook", self._watched_thread_hook), (sys, "exit", self._watched_exit)]
        if not _has_shell():
            watched.append((sys, "excepthook", self._watched_hook))
        if sys.version_info >= (3, 14) and multiprocessing.parent_process() is not None:
            watched.append((traceback, "print_exc", self._watched_print))
        self._patches = [Patch(owner, name, make, probe=self.name, nests=True) for owner, name, make in watched]

    def _watched_hook(self, before: Any) -> Any:
        breaker = self._breaker

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            settle(breaker, self.record_exception, error, fatal=not hasattr(sys, "ps1"))  # with a prompt, the process goes on
            before(kind, error, trace)

        return excepthook

    def _watched_thread_hook(self, before: Any) -> Any:
        breaker = self._breaker

        def thread_excepthook(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and args.exc_type is not SystemExit:
                settle(breaker, self.record_exception, args.exc_value, thread=args.thread.name if args.thread else "unknown")
            before(args)

        return thread_excepthook

    def _watched_exit(self, before: Any) -> Any:
        breaker = self._breaker

        def exit(status: Any = None, /) -> None:  # noqa: A001  # it replaces sys.exit
            call(breaker, self.note_sys_exit, status, sys.exc_info()[1])
            before(status)

        return exit

    def _watched_print(self, before: Any) -> Any:
        """Watch how ``multiprocessing`` prints a child's exception: since Python 3.14 it finalizes only afterwards."""
        breaker = self._breaker

        def print_exc(*args: Any, **kwargs: Any) -> None:
            error = sys.exc_info()[1]
            if error is not None and sys._getframe(1).f_globals.get("__name__") == "multiprocessing.process":
                settle(breaker, self.record_exception, error, fatal=True)
            before(*args, **kwargs)

        return print_exc

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`: restore hooks only if they are still ours."""
        for patch in self._patches:
            patch.undo()
        self._patches = []

    def sample(self) -> None:
        """Record an exception that a prompt or notebook has handled and that would have ended a script."""
        error = getattr(sys, "last_value", None)
        if id(error) == self._last or not self._recording.acquire(blocking=False):
            return  # Python sets it before it calls the excepthook, which may be recording it
        try:
            self._last = id(error)
            if isinstance(error, BaseException):
                self.record_exception(error)
        finally:
            self._recording.release()

    def record_exception(self, error: BaseException, *, fatal: bool = False, thread: str = "") -> None:
        """Record an exception: as an event, once, and as the rank's end if it is ``fatal`` (in a thread it is not)."""
        context = self._context
        if context is not None:
            with self._recording:
                self._record(context, error, fatal=fatal, thread=thread)

    def _record(self, context: ProbeContext, error: BaseException, *, fatal: bool, thread: str) -> None:
        if id(error) != self._recorded:
            described = describe(error, messages=context.settings.run_details)
            for more in context.hooks.explain_error.ask(error):
                described |= more
            attributes = described | ({"thread": thread} if thread else {}) | _signal(_cause(error))
            context.writer.event(catalog.EVENT_EXCEPTION.name, attributes, context.recorder.ended)
            self._recorded = id(error)  # only now: a signal's handler that raises may have interrupted it
        if id(error) != self._followed:
            self._followed = id(error)
            shortage = call(context.breaker("oom"), host_shortage, context, root_cause(error))
            if shortage is not None:
                context.event(catalog.EVENT_OUT_OF_MEMORY, shortage)
            if fatal and not isinstance(error, KeyboardInterrupt):
                context.hooks.ends_by_error.notify(error)
        if fatal:
            self.last_error = error
            cause, code = _cause(error), INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
            self._fatal = Ending(_by_signal(cause, code, Exit.EXCEPTION), code, cause)
            context.writer.exit(self._fatal.reason, code)

    def note_sys_exit(self, status: object, handled: BaseException | None, caught: BaseException | None = None) -> None:
        """Record a call of ``sys.exit``; the exception that is being handled is the reason, or a signal with a running handler.

        It counts as the end if no step follows: the ``SystemExit`` may be caught. ``caught``: if it was already.
        """
        context, code = self._context, exit_status(status)
        if context is None or threading.current_thread() is not threading.main_thread():
            return
        reason = Exit.EXIT_CODE if code else Exit.FINISHED
        again = self._sys_exit is not None and self._sys_exit_step == context.recorder.step and self._sys_exit.code == code
        if again and handled is None:
            return  # a spawned child's own main function, with the status that the program's has asked for
        cause = error_guard.running(sys._getframe()) if caught is None else error_guard.raising(caught)
        if cause is None and handled is not None:
            cause = _cause(handled)
        if code and handled is not None and not isinstance(handled, SystemExit):
            self.record_exception(handled)
            reason = Exit.EXCEPTION
        self._sys_exit, self._sys_exit_step = Ending(_by_signal(cause, code, reason), code, cause), context.recorder.step
        if self._sys_exit.reason in {Exit.EXIT_CODE, Exit.EXCEPTION}:
            context.hooks.ends_by_error.notify(handled if reason == Exit.EXCEPTION else None)

    def record_escaping(self, error: BaseException) -> None:
        """Record an exception that leaves the session's block, or a child process's main function."""
        if isinstance(error, SystemExit):
            self.note_sys_exit(error.code, error.__context__, error)
        elif not isinstance(error, GeneratorExit):
            self.record_exception(error, fatal=True)

    def leaving(self, code: int, error: SystemExit | None) -> Ending:
        """Return the end by a ``SystemExit``, or without one, that ``torchobs run`` sees."""
        self.last_error = error
        cause = _cause(error) if error is not None else None
        return Ending(_by_signal(cause, code, Exit.EXIT_CODE if code else Exit.FINISHED), code, cause)

    def ended(self, noted: Ending | None) -> Ending:
        """Return how the rank ends. ``noted`` is the end that ``torchobs run`` saw, if it runs the program."""
        if self._fatal is not None:
            return self._fatal
        # the step pending at sys.exit is counted only now
        recent = self._context is not None and self._context.recorder.step - self._sys_exit_step <= 1
        exit_called = self._sys_exit if recent else None
        if noted is not None and (exit_called is None or exit_called.code != noted.code):
            return noted
        return exit_called or Ending(Exit.FINISHED, 0)
