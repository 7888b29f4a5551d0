"""A question that may never be answered, in a thread of its own: what asks it goes on without the answer.

``statvfs`` on a network file system whose server is gone does not return, and no signal ends it; a counter of an InfiniBand
adapter whose firmware is ill takes a minute. A daemon thread is all that hangs then, and no second one is started.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from torchobs.exporter.host.tree import FAILS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.exporter.exporter_metrics import Sample

STUCK_AFTER_S = 5.0
"""Nothing that works takes so long."""

FRESH_S = 1.0
"""An answer this young is not asked for again: several scrapers are no reason to trouble a file server or an adapter more."""


class Answer(NamedTuple):
    """What a question has brought, and when."""

    said: tuple[Sample, ...]
    failure: Exception | None
    at_s: float


def ask(question: Callable[[], Iterable[Sample]], clock: Callable[[], float] = time.monotonic) -> Answer:
    """Return the answer to a question; one of ``tree.FAILS`` is an answer as well."""
    try:
        return Answer(tuple(question()), None, clock())
    except FAILS as failure:
        return Answer((), failure, clock())


class Lane:
    """Asks one question, over and over, but never twice at a time. To be used by one thread."""

    def __init__(self, question: Callable[[], Iterable[Sample]], clock: Callable[[], float] = time.monotonic) -> None:
        self._question, self._clock = question, clock
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._answer: Answer | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a question has been without an answer for too long."""
        return self._is_asking() and self._clock() - self._began_s >= STUCK_AFTER_S

    def begin(self) -> None:
        """Ask, unless the answer of the last time is still to come, or young."""
        now_s, answer = self._clock(), self._answer
        if not self._is_asking() and (answer is None or now_s - answer.at_s >= FRESH_S):
            self._began_s = now_s
            self._thread = threading.Thread(target=self._ask, name="host-lane", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> Answer | None:
        """Return the newest answer there is, after waiting so long for the one that was asked for last."""
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
        return self._answer

    def _is_asking(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _ask(self) -> None:
        self._answer = ask(self._question, self._clock)
