"""How the rank ends: an exception that nobody caught, ``sys.exit(n)``, Ctrl-C, or in order.

SIGKILL, the default SIGTERM and ``os._exit`` leave nothing: such a rank is *lost*. No signal handler is installed: a Python
handler never runs while a rank is stuck in a collective, which would make it ignore SIGTERM.

An exception that ends a cell of a notebook, a test or a line of the prompt ends no rank. IPython, pytest and Python's own
prompt leave it in ``sys.last_value``, where the sampler finds it unless another one follows within a tenth of a second.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.format.layout import Exit
from torchobs.identity.process import exit_status
from torchobs.probes.core.patch import Patch
from torchobs.probes.lifecycle.exceptions import describe
from torchobs.support.error_guard import call, settle

if TYPE_CHECKING:
    from types import TracebackType

    from torchobs.probes.core.context import ProbeContext

INTERRUPTED = 130
"""The status that a shell gives to what SIGINT has ended."""


class ExitProbe:
    """Chains the excepthooks, and notes what ``sys.exit`` is given."""

    name = "exits"

    def __init__(self) -> None:
        self._context: ProbeContext | None = None
        self._patches: list[Patch] = []
        self._fatal: tuple[int, int] | None = None
        self._left: tuple[int, int] | None = None
        self._left_in = 0
        self._told = self._last = 0

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context, self._breaker = context, context.breaker(self.name)
        self._last = id(getattr(sys, "last_value", None))
        self._patches = [
            Patch(owner, name, make, probe=self.name, nests=True)
            for owner, name, make in (
                (sys, "excepthook", self._watched_hook),
                (threading, "excepthook", self._watched_thread_hook),
                (sys, "exit", self._watched_exit),
            )
        ]

    def _watched_hook(self, before: Any) -> Any:
        breaker = self._breaker

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            settle(breaker, self.raised, error, fatal=not hasattr(sys, "ps1"))  # with a prompt, the process goes on
            before(kind, error, trace)

        return excepthook

    def _watched_thread_hook(self, before: Any) -> Any:
        breaker = self._breaker

        def thread_excepthook(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and args.exc_type is not SystemExit:
                settle(breaker, self.raised, args.exc_value, thread=args.thread.name if args.thread else "unknown")
            before(args)

        return thread_excepthook

    def _watched_exit(self, before: Any) -> Any:
        breaker = self._breaker

        def exit(status: Any = None, /) -> None:  # noqa: A001  # it stands for sys.exit
            call(breaker, self.leaves, status, sys.exc_info()[1])
            before(status)

        return exit

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: restore hooks only if they are still ours."""
        for patch in self._patches:
            patch.undo()
        self._patches = []

    def sample(self) -> None:
        """Look whether somebody has handled an exception that would have ended a script."""
        error = getattr(sys, "last_value", None)
        if id(error) == self._last:
            return
        self._last = id(error)
        if isinstance(error, BaseException):
            self.raised(error)

    def raised(self, error: BaseException, *, fatal: bool = False, thread: str = "") -> None:
        """Record an exception: as an event, once, and as the rank's end if it is ``fatal`` (a thread's is not)."""
        context = self._context
        if context is None:
            return
        if id(error) != self._told:
            self._told = id(error)
            attributes = describe(error) | ({"thread": thread} if thread else {})
            context.writer.event(catalog.EVENT_EXCEPTION.name, attributes, _last_step(context))
        if fatal:
            self._fatal = (Exit.INTERRUPTED, INTERRUPTED) if isinstance(error, KeyboardInterrupt) else (Exit.EXCEPTION, 1)
            context.writer.exit(*self._fatal)

    def leaves(self, status: object, handled: BaseException | None) -> None:
        """Note that the program asks for its end, perhaps while it handles an exception, which is the reason then.

        It is believed if no step follows: somebody may catch the ``SystemExit`` and train on.
        """
        context, code = self._context, exit_status(status)
        if context is None or threading.current_thread() is not threading.main_thread():
            return
        reason = Exit.EXIT_CODE if code else Exit.FINISHED
        if code and handled is not None and not isinstance(handled, SystemExit):
            self.raised(handled)
            reason = Exit.INTERRUPTED if isinstance(handled, KeyboardInterrupt) else Exit.EXCEPTION
        self._left, self._left_in = (reason, code), context.recorder.step

    def passes(self, error: BaseException) -> None:
        """Record what ends the rank by passing out of its session, or out of a child process's main function."""
        if isinstance(error, SystemExit):
            self.leaves(error.code, error.__context__)
        elif not isinstance(error, GeneratorExit):
            self.raised(error, fatal=True)

    def ended(self, noted: tuple[int, int] | None) -> tuple[int, int]:
        """Return reason and code of the end. ``noted`` is what ``torchobs run`` saw, for sure, if it runs the program."""
        if self._fatal is not None:
            return self._fatal
        # the step that was pending when the program left is counted only now
        left = self._left if self._context is not None and self._context.recorder.step - self._left_in <= 1 else None
        if noted is not None and (left is None or left[1] != noted[1]):
            return noted
        return left or (Exit.FINISHED, 0)


def _last_step(context: ProbeContext) -> int:
    """Return the number of the last step that was complete: the one that the cycle will write at the rank's end, included."""
    recorder = context.recorder
    return recorder.ended + (recorder.likely_end is not None and not recorder.direct)
