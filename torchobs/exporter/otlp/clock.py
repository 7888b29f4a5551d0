"""Clock interface of the push, so that a test can simulate an outage of ten minutes in seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from threading import Condition


class Clock(Protocol):
    """Time, and waiting with a timeout."""

    def now(self) -> float:
        """Return monotonic time in seconds."""

    def wall_ns(self) -> int:
        """Return Unix time in ns."""

    def wait(self, condition: Condition, seconds: float) -> None:
        """Wait on a condition, which the caller holds, for at most ``seconds``."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """See :class:`Clock`."""
        return time.time_ns()

    def wait(self, condition: Condition, seconds: float) -> None:
        """See :class:`Clock`."""
        condition.wait(seconds)
