"""The books of the push: whatever was recorded is sent, dropped for a reason, or queued, at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

SIGNALS = ("metrics", "traces")
REASONS = ("overflow", "refused", "rejected", "shutdown")


class Counts(NamedTuple):
    """What became of one signal's data points or spans."""

    recorded: int
    sent: int
    dropped: Mapping[str, int]
    """by reason (:data:`REASONS`)"""
    failures: int = 0
    """requests that failed and are sent again"""
    unread_bytes: int = 0
    """of spans, that were lost before they could be recorded here"""

    @property
    def queued(self) -> int:
        """What is neither sent nor dropped yet."""
        return self.recorded - self.sent - sum(self.dropped.values())


NOTHING = Counts(0, 0, dict.fromkeys(REASONS, 0))


def sent(counts: Counts, items: int) -> Counts:
    """Return the counts after the receiver took so many."""
    return counts._replace(sent=counts.sent + items)


def dropped(counts: Counts, reason: str, items: int) -> Counts:
    """Return the counts after so many were given up."""
    return counts._replace(dropped={**counts.dropped, reason: counts.dropped[reason] + items})
