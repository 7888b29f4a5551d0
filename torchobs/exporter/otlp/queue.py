"""Bounded queue of the requests that wait to be sent. When it is full, the oldest are dropped.

The newest are worth most: they hold the final state of ranks that have ended, and cumulative points supersede older ones.
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
"""Pause between attempts while the exporter shuts down: after a long outage the usual pauses would outlast it."""


class Batch(NamedTuple):
    """One packed request and the number of its data points or spans."""

    body: bytes
    items: int


class RequestQueue:
    """A queue of batches with its counters. Any thread may ``put``; one thread takes each batch and settles it."""

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
        """A consistent copy of the counters."""
        return self._counts

    def put(self, batch: Batch) -> None:
        """Add a batch; older ones, or this one, are dropped if there is no room."""
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
        """Wait for the oldest batch and return it; ``None`` once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            self._in_hand = self._waiting.popleft()
            return self._in_hand

    def settle(self, batch: Batch, outcome: Outcome) -> None:
        """Record the outcome of the batch taken; one to be retried becomes the oldest in the queue again."""
        with self._changed:
            if self._in_hand is not batch:
                return  # closed meanwhile, which counted it as dropped
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
        """Wait before the next attempt: shorter during shutdown, and not at all before the first attempt after its start.

        ``least_s``: the delay that the receiver asked for, which holds during shutdown, too.
        """
        with self._changed:
            end = self._clock.now() + (min(seconds, max(LAST_S, least_s)) if self._ends else seconds)
            while not (self._closed or self._hurried) and (left := end - self._clock.now()) > 0:
                self._clock.wait(self._changed, left)
            self._hurried = False

    def hurry(self) -> None:
        """Shorten the pauses, because the exporter shuts down: the next attempt is made now, later ones soon."""
        with self._changed:
            self._hurried = self._ends = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all queued batches. Idempotent."""
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
