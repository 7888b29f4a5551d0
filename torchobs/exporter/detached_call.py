"""Call something that may never return, in a thread of its own: who asks goes on without the answer.

``statvfs`` on a network file system whose server is gone does not return, and no signal ends it. A daemon thread is all that
hangs then, and no second one is started.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.exporter.exporter_metrics import Sample

STUCK_AFTER_S = 5.0
"""Nothing that works takes so long."""

FAILS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, RuntimeError, Warning)
"""What reading files of an unknown kernel can raise, by psutil as well, which warns where it finds less than it expects."""


class Answer(NamedTuple):
    """What a call has brought, and when, on the clock of the caller."""

    said: tuple[Sample, ...]
    failure: BaseException | None
    at_s: float


class DetachedCall:
    """Repeats one call, never twice at a time. To be used by one thread at a time."""

    def __init__(
        self, call: Callable[[], Iterable[Sample]], clock: Callable[[], float] = time.monotonic, fresh_s: float = 0.0
    ) -> None:
        """``fresh_s``: seconds for which an answer serves before the call is made again."""
        self._call, self._clock, self._fresh_s = call, clock, fresh_s
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._answer: Answer | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the call has not returned for too long."""
        return self._is_running() and self._clock() - self._began_s >= STUCK_AFTER_S

    def begin(self) -> None:
        """Make the call, unless the last one has not returned yet, or its answer is fresh."""
        now_s, answer = self._clock(), self._answer
        if not self._is_running() and (answer is None or now_s - answer.at_s >= self._fresh_s):
            self._began_s = now_s
            self._thread = threading.Thread(target=self._run, name="detached-call", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> Answer | None:
        """Return the newest answer there is, after waiting so long for the call that was begun last."""
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
        return self._answer

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._answer = Answer(tuple(self._call()), None, self._clock())
        except FAILS as failure:
            self._answer = Answer((), failure, self._clock())
