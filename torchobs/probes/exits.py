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
from torchobs.flight.layout import Exit
from torchobs.guarding import call, settle
from torchobs.probes.patching import Patch
from torchobs.probes.raised import describe
from torchobs.process import exit_status

if TYPE_CHECKING:
    from types import TracebackType

    from torchobs.probes.host import Host

INTERRUPTED = 130
"""The status that a shell gives to what SIGINT has ended."""


class ExitProbe:
    """Chains the excepthooks, and notes what ``sys.exit`` is given."""

    name = "exits"

    def __init__(self) -> None:
        self._host: Host | None = None
        self._patches: list[Patch] = []
        self._fatal: tuple[int, int] | None = None
        self._left: tuple[int, int] | None = None
        self._left_in = 0
        self._told = self._last = 0

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        self._host, fuse = host, host.fuse(self.name)
        before, before_thread, before_exit = sys.excepthook, threading.excepthook, sys.exit

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            settle(fuse, self.raised, error, fatal=not hasattr(sys, "ps1"))  # with a prompt, the process goes on
            before(kind, error, trace)

        def thread_excepthook(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and args.exc_type is not SystemExit:
                settle(fuse, self.raised, args.exc_value, thread=args.thread.name if args.thread else "unknown")
            before_thread(args)

        def exit(status: Any = None, /) -> None:  # noqa: A001  # it stands for sys.exit
            call(fuse, self.leaves, status, sys.exc_info()[1])
            before_exit(status)

        self._last = id(getattr(sys, "last_value", None))
        self._patches = [
            Patch(sys, "excepthook", excepthook), Patch(threading, "excepthook", thread_excepthook), Patch(sys, "exit", exit),
        ]  # fmt: skip

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`: restore hooks only if they are still ours."""
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
        host = self._host
        if host is None:
            return
        if id(error) != self._told:
            self._told = id(error)
            attributes = describe(error) | ({"thread": thread} if thread else {})
            host.writer.event(catalog.EVENT_EXCEPTION.name, attributes, _last_step(host))
        if fatal:
            self._fatal = (Exit.INTERRUPTED, INTERRUPTED) if isinstance(error, KeyboardInterrupt) else (Exit.EXCEPTION, 1)
            host.writer.exit(*self._fatal)

    def leaves(self, status: object, handled: BaseException | None) -> None:
        """Note that the program asks for its end, perhaps while it handles an exception, which is the reason then.

        It is believed if no step follows: somebody may catch the ``SystemExit`` and train on.
        """
        host, code = self._host, exit_status(status)
        if host is None or threading.current_thread() is not threading.main_thread():
            return
        reason = Exit.EXIT_CODE if code else Exit.FINISHED
        if code and handled is not None and not isinstance(handled, SystemExit):
            self.raised(handled)
            reason = Exit.INTERRUPTED if isinstance(handled, KeyboardInterrupt) else Exit.EXCEPTION
        self._left, self._left_in = (reason, code), host.cycle.step

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
        left = self._left if self._host is not None and self._host.cycle.step - self._left_in <= 1 else None
        if noted is not None and (left is None or left[1] != noted[1]):
            return noted
        return left or (Exit.FINISHED, 0)


def _last_step(host: Host) -> int:
    """Return the number of the last step that was complete: the one that the cycle will write at the rank's end, included."""
    cycle = host.cycle
    return cycle.ended + (cycle.likely_end is not None and not cycle.direct)
