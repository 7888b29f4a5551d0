"""Run a call that may never return in a thread of its own, so that the caller can go on without the result.

``statvfs`` on a network file system with a dead server does not return, and no signal ends it. Then only one daemon thread
hangs, and no second one is started.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.exporter.exporter_metrics import Sample

STUCK_AFTER_S = 5.0
"""Seconds after which a call is reported as stuck: no working one takes so long."""

FAILS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, RuntimeError, Warning)
"""Exceptions of reading files of an unknown kernel, also by psutil, which warns if it finds less than it expects."""


class Answer(NamedTuple):
    """Result of a call, and when it came, on the caller's clock in seconds."""

    said: tuple[Sample, ...]
    failure: BaseException | None
    at_s: float


class DetachedCall:
    """Repeats a call in a background thread, never twice at a time. To be used by one thread at a time."""

    def __init__(
        self, call: Callable[[], Iterable[Sample]], clock: Callable[[], float] = time.monotonic, fresh_s: float = 0.0
    ) -> None:
        """``fresh_s``: age of a result, in seconds, from which on the call is repeated."""
        self._call, self._clock, self._fresh_s = call, clock, fresh_s
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._answer: Answer | None = None

    @property
    def is_stuck(self) -> bool:
        """True if the call has not returned for :data:`STUCK_AFTER_S`."""
        return self._is_running() and self._clock() - self._began_s >= STUCK_AFTER_S

    def begin(self) -> None:
        """Start the call, unless the last one is still running or its result is fresh."""
        now_s, answer = self._clock(), self._answer
        if not self._is_running() and (answer is None or now_s - answer.at_s >= self._fresh_s):
            self._began_s = now_s
            self._thread = threading.Thread(target=self._run, name="detached-call", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> Answer | None:
        """Wait for the call begun last, at most ``timeout_s``, and return the newest result, if any."""
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
