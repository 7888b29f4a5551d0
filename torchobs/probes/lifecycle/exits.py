"""How the rank ends: by an uncaught exception, ``sys.exit(n)``, Ctrl-C, or normally.

SIGKILL and ``os._exit`` leave no trace: such a rank is *lost*. The default SIGTERM leaves a mark by a handler in C
(:mod:`torchobs.flight.files.endings`): a Python handler does not run while a rank is stuck in a collective, and would make
it ignore SIGTERM.

An exception that ends a notebook cell, a test or a line at the prompt does not end the rank. IPython, pytest and Python's own
prompt store it in ``sys.last_value``, where the sampler finds it unless another one follows within a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
from threading import RLock
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.flight.format.layout import Exit
from torchobs.identity.process import exit_status
from torchobs.probes.core.patch import Patch
from torchobs.probes.core.training_state import LeftPhase
from torchobs.probes.lifecycle.exceptions import describe, phase_of, root_cause
from torchobs.probes.memory.device_memory import host_shortage
from torchobs.support import signal_handlers
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import call, settle

if TYPE_CHECKING:
    from types import TracebackType

    from torchobs.probes.core.context import ProbeContext

_REASONS = {
    Exit.FINISHED: "finished", Exit.EXCEPTION: "exception", Exit.EXIT_CODE: "exit_code", Exit.INTERRUPTED: "interrupted",
    Exit.TERMINATED: "terminated",
}  # fmt: skip
INTERRUPTED = 130
"""Shell's exit status of a process ended by SIGINT"""


def _has_shell() -> bool:
    """Return True under IPython: no exception of a cell comes to ``sys.excepthook``, which it puts back after each cell."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and get_shell() is not None


def _cause(error: BaseException) -> int | None:
    """Return the signal whose handler raised the exception, or the first of its chain."""
    if (found := signal_handlers.raising(error)) is not None:
        return found
    first = root_cause(error)
    if first is not error and (found := signal_handlers.raising(first)) is not None:
        return found
    interrupted = isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and isinstance(first, KeyboardInterrupt)
    )
    return signal.SIGINT if interrupted else None


def _signal(number: int | None) -> dict[str, str]:
    return {} if number is None else {"signal": signal_handlers.name(number)}


def _by_signal(number: int | None, code: int, otherwise: int) -> int:
    """Return the reason of an end that a signal led to: who was told to end, and left otherwise than by 0, has not failed."""
    if not code or number not in {signal.SIGTERM, signal.SIGINT}:
        return otherwise
    return Exit.TERMINATED if number == signal.SIGTERM else Exit.INTERRUPTED


class Ending(NamedTuple):
    """How a rank ends."""

    reason: int
    """one of ``layout.Exit``"""
    code: int
    signal: int | None = None
    """the signal whose handler led to it, if one did"""

    @property
    def attributes(self) -> dict[str, object]:
        """Those of the event."""
        return {"reason": _REASONS[self.reason], "code": self.code, **_signal(self.signal)}


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
        """See :class:`~torchobs.probes.core.context.Probe`."""
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
        """Watch what ``multiprocessing`` prints of a child's exception: since Python 3.14 it finalizes only afterwards."""
        breaker = self._breaker

        def print_exc(*args: Any, **kwargs: Any) -> None:
            error = sys.exc_info()[1]
            if error is not None and sys._getframe(1).f_globals.get("__name__") == "multiprocessing.process":
                settle(breaker, self.record_exception, error, fatal=True)
            before(*args, **kwargs)

        return print_exc

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: restore hooks only if they are still ours."""
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
            for explain in context.explain_error:
                described |= explain(error) or {}
            attributes = described | ({"thread": thread} if thread else {}) | _signal(_cause(error))
            context.writer.event(catalog.EVENT_EXCEPTION.name, attributes, context.recorder.last_complete)
            self._recorded = id(error)  # only now: a signal's handler that raises may have interrupted it
        if id(error) != self._followed:
            self._followed = id(error)
            self._note_phase(context, error)
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

    def _note_phase(self, context: ProbeContext, error: BaseException) -> None:
        """Note in which phase the training thread was: as the exception leaves it, its hooks record its end."""
        phase = phase_of(error) if threading.get_ident() == context.training.thread else None
        begun_ns = context.recorder.phase_begun(phase) if phase is not None else 0
        if phase is not None and begun_ns:
            context.training.left = LeftPhase(phase, begun_ns, monotonic_ns())

    def note_sys_exit(self, status: object, handled: BaseException | None, caught: BaseException | None = None) -> None:
        """Note a call of ``sys.exit``; an exception that is being handled then is the reason, or a signal whose handler runs.

        It counts as the end if no step follows: somebody may catch the ``SystemExit`` and train on. ``caught``: where it has
        been caught already.
        """
        context, code = self._context, exit_status(status)
        if context is None or threading.current_thread() is not threading.main_thread():
            return
        reason = Exit.EXIT_CODE if code else Exit.FINISHED
        known = self._sys_exit is not None and self._sys_exit_step == context.recorder.step and self._sys_exit.code == code
        if known and handled is None:
            return  # a spawned child's own main function, with the status that the program's has asked for
        cause = signal_handlers.running(sys._getframe()) if caught is None else signal_handlers.raising(caught)
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
