"""What waits to be sent, in memory that is bounded: when the receiver is away for long, the oldest goes first.

The newest is worth most: it holds the final state of ranks that have ended, and cumulative points repeat what older ones said.
"""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple

from torchobs.exporter.otlp import counters

if TYPE_CHECKING:
    from torchobs.exporter.otlp.clock import Clock
    from torchobs.exporter.otlp.transport import Outcome


LAST_S = 2.0
"""Between attempts of an exporter that is about to end: after a long outage the usual pauses would outlast its end."""


class Batch(NamedTuple):
    """One request, packed, and how many data points or spans it holds."""

    body: bytes
    items: int


class RequestQueue:
    """A queue of batches with its books. Any thread may put; one takes, and gives each back or settles it."""

    def __init__(self, limit_bytes: int, clock: Clock) -> None:
        self._limit, self._clock = limit_bytes, clock
        self._waiting: deque[Batch] = deque()
        self._bytes = 0
        self._in_hand: Batch | None = None
        self._changed = Condition()
        self._counts = counters.NOTHING
        self._closed = self._hurried = self._ends = False

    @property
    def counts(self) -> counters.Counts:
        """The books; never between two of their entries."""
        return self._counts

    def put(self, batch: Batch) -> None:
        """Add a batch; it, or older ones, are dropped where there is no room."""
        with self._changed:
            self._counts = self._counts._replace(recorded=self._counts.recorded + batch.items)
            if self._closed:
                self._drop(batch, "shutdown")
                return
            self._waiting.append(batch)
            self._bytes += len(batch.body)
            self._make_room()
            self._changed.notify_all()

    def take(self) -> Batch | None:
        """Wait for a batch and take it in hand; ``None`` once the backlog is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            self._in_hand = self._waiting.popleft()
            return self._in_hand

    def settle(self, batch: Batch, outcome: Outcome) -> None:
        """Enter what became of the batch in hand; one that is to be sent again becomes the oldest that waits."""
        with self._changed:
            if self._in_hand is not batch:
                return  # closed meanwhile: it is entered as dropped
            self._in_hand = None
            if outcome.kind == "retry":
                self._counts = self._counts._replace(failures=self._counts.failures + 1)
                self._waiting.appendleft(batch)
                self._make_room()
                return
            self._bytes -= len(batch.body)
            rejected = batch.items if outcome.kind == "refused" else min(outcome.rejected, batch.items)
            if rejected:
                self._counts = counters.dropped(self._counts, "refused" if outcome.kind == "refused" else "rejected", rejected)
            self._counts = counters.sent(self._counts, batch.items - rejected)

    def pause(self, seconds: float, least_s: float = 0.0) -> None:
        """Wait before the next attempt; shorter when the exporter is about to end, and not at all if it has not tried since.

        ``least_s``: what the receiver has asked for, which holds then, too.
        """
        with self._changed:
            end = self._clock.now() + (min(seconds, max(LAST_S, least_s)) if self._ends else seconds)
            while not (self._closed or self._hurried) and (left := end - self._clock.now()) > 0:
                self._clock.wait(self._changed, left)
            self._hurried = False

    def hurry(self) -> None:
        """Have the next attempt made now, and all that follow soon: the exporter is about to end."""
        with self._changed:
            self._hurried = self._ends = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is left. Idempotent."""
        with self._changed:
            self._closed = True
            in_hand, self._in_hand = self._in_hand, None
            for batch in ([in_hand] if in_hand else []) + list(self._waiting):
                self._drop(batch, "shutdown")
            self._waiting.clear()
            self._changed.notify_all()

    def _make_room(self) -> None:
        while self._waiting and self._bytes > self._limit:
            oldest = self._waiting.popleft()
            self._bytes -= len(oldest.body)
            self._drop(oldest, "overflow")

    def _drop(self, batch: Batch, reason: str) -> None:
        self._counts = counters.dropped(self._counts, reason, batch.items)
