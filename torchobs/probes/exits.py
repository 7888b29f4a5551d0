"""How the rank ends: an exception that nobody caught, ``sys.exit(n)`` under ``torchobs run``, or in order.

SIGKILL, the default SIGTERM and ``os._exit`` leave nothing: such a rank is *lost*. No signal handler is installed: a Python
handler never runs while a rank is stuck in a collective, which would make it ignore SIGTERM. Locations only: no values, no
source text.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.layout import Exit
from torchobs.guarding import call

if TYPE_CHECKING:
    from types import TracebackType

    from torchobs.probes.host import Host


class ExitProbe:
    """Chains the excepthooks."""

    name = "exits"

    def __init__(self) -> None:
        self._installed: tuple[Any, Any] | None = None

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        self._host = host
        self.ended: tuple[int, int] | None = None
        fuse = host.fuse(self.name)
        before, before_thread = sys.excepthook, threading.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            call(fuse, self.note, kind, trace, fatal=True)
            before(kind, error, trace)

        def thread_excepthook(args: threading.ExceptHookArgs) -> None:
            if args.exc_type is not SystemExit:
                call(fuse, self.note, args.exc_type, args.exc_traceback, fatal=False)
            before_thread(args)

        self._before = (before, before_thread)
        self._installed = (excepthook, thread_excepthook)
        sys.excepthook, threading.excepthook = excepthook, thread_excepthook

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`: restore hooks only if they are still ours."""
        if self._installed is None:
            return
        if sys.excepthook is self._installed[0]:
            sys.excepthook = self._before[0]
        if threading.excepthook is self._installed[1]:
            threading.excepthook = self._before[1]
        self._installed = None

    def note(self, kind: type[BaseException], trace: TracebackType | None, *, fatal: bool) -> None:
        """Record an exception: as an event, and as the rank's end if it is ``fatal`` (a thread's is not)."""
        frames = traceback.extract_tb(trace)
        location = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown"
        attributes = {"exception.type": f"{kind.__module__}.{kind.__qualname__}", "location": location}
        self._host.writer.event(catalog.EVENT_EXCEPTION.name, attributes, self._host.cycle.step)
        if fatal:
            self._host.writer.exit(Exit.EXCEPTION, 1)
            self.ended = (Exit.EXCEPTION, 1)
