"""Counters of the push. At any moment, recorded = sent + dropped (by reason) + queued."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

SIGNALS = ("metrics", "traces")
REASONS = ("overflow", "refused", "rejected", "shutdown")


class Counts(NamedTuple):
    """Counts of one signal's data points or spans."""

    recorded: int
    sent: int
    dropped: Mapping[str, int]
    """by reason (:data:`REASONS`)"""
    failures: int = 0
    """failed requests that are retried"""
    unread_bytes: int = 0
    """bytes of spans that were overwritten before they were read"""

    @property
    def queued(self) -> int:
        """Items neither sent nor dropped yet."""
        return self.recorded - self.sent - sum(self.dropped.values())


NOTHING = Counts(0, 0, dict.fromkeys(REASONS, 0))


def sent(counts: Counts, items: int) -> Counts:
    """Return the counts after the receiver accepted ``items``."""
    return counts._replace(sent=counts.sent + items)


def dropped(counts: Counts, reason: str, items: int) -> Counts:
    """Return the counts after ``items`` were dropped for ``reason``."""
    return counts._replace(dropped={**counts.dropped, reason: counts.dropped[reason] + items})
