"""Time as the push sees it: a seam, so that a test can let an outage of ten minutes pass in seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from threading import Condition


class Clock(Protocol):
    """Seconds, and waiting for them."""

    def now(self) -> float:
        """Return seconds that only grow."""

    def wall_ns(self) -> int:
        """Return Unix time in ns."""

    def wait(self, condition: Condition, seconds: float) -> None:
        """Wait on a condition that is held, for so long at most."""


class SystemClock:
    """The machine's."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """See :class:`Clock`."""
        return time.time_ns()

    def wait(self, condition: Condition, seconds: float) -> None:
        """See :class:`Clock`."""
        condition.wait(seconds)
