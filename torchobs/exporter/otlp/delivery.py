"""Delivery of one signal's requests: a bounded queue with its counters, and the thread that sends them.

The oldest are sent first, and each is tried until it is accepted or refused. A refused request goes out once more in parts, one
for each rank: one rank's data may be the cause, and must not cost the others theirs. When the queue is full, the oldest are
dropped: the newest are worth most, for they hold the final state of ranks that have ended, and cumulative points supersede
older ones.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from random import Random
from threading import Condition, Thread
from typing import TYPE_CHECKING, NamedTuple

from torchobs.exporter.otlp.request_size import by_resource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.exporter.otlp.transport import Outcome, Transport

REASONS = ("overflow", "refused", "rejected", "shutdown")

FIRST_S, MOST_S = 1.0, 60.0
"""First and longest pause between attempts: doubled each time, half of it random, as in OpenTelemetry's exporters."""

LAST_S = 2.0
"""Pause between attempts while the exporter shuts down: after a long outage the usual pauses would outlast it."""

LONGEST_RETRY_AFTER_S = 300.0
"""Upper limit of ``Retry-After``: a mistaken value of a year must not stop the push."""

_NUMBER = re.compile(r"[0-9]+")
_MOST_CAUSES, _PAST_S = 100, 3600.0

_log = logging.getLogger(__name__)


class Clock:
    """The machine's clock; a test has another, to simulate an outage of ten minutes in seconds."""

    def now(self) -> float:
        """Return monotonic time in seconds."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Return Unix time in ns."""
        return time.time_ns()

    def wait(self, condition: Condition, seconds: float) -> None:
        """Wait on a condition, which the caller holds, for at most ``seconds``."""
        condition.wait(seconds)


class Batch(NamedTuple):
    """One packed request and the number of its data points, spans or log records."""

    body: bytes
    items: int
    of: str = ""
    """the rank that a part of a refused request is of, in words; empty: it is no such part"""


class Counts(NamedTuple):
    """Counts of one signal's data points, spans or log records. At any moment, recorded = sent + dropped + queued."""

    recorded: int
    sent: int
    dropped: Mapping[str, int]
    """by reason (:data:`REASONS`)"""
    failures: int = 0
    """failed requests that are retried"""
    unread_bytes: int = 0
    """bytes of spans and events that were overwritten before they were read"""

    @property
    def queued(self) -> int:
        """Items neither sent nor dropped yet."""
        return self.recorded - self.sent - sum(self.dropped.values())


class RequestQueue:
    """Any thread may ``put``; one thread takes each batch and settles it."""

    def __init__(self, limit_bytes: int, clock: Clock) -> None:
        self._limit, self._clock = limit_bytes, clock
        self._waiting: deque[Batch] = deque()
        self._bytes = 0
        self._in_hand: Batch | None = None
        self._changed = Condition()
        self._counts = Counts(0, 0, dict.fromkeys(REASONS, 0))
        self._closed = self._hurried = self._ends = False

    @property
    def counts(self) -> Counts:
        """A consistent copy of the counters."""
        return self._counts

    def put(self, batch: Batch) -> None:
        """Add a batch; older ones, or this one, are dropped if there is no room."""
        with self._changed:
            self._counts = self._counts._replace(recorded=self._counts.recorded + batch.items)
            if self._closed:
                self._drop(batch.items, "shutdown")
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
            self._drop(rejected, "refused" if outcome.kind == "refused" else "rejected")
            self._counts = self._counts._replace(sent=self._counts.sent + batch.items - rejected)

    def divide(self, batch: Batch, parts: Sequence[Batch]) -> None:
        """Replace the batch taken by its parts, which have as many items and are the oldest then."""
        with self._changed:
            if self._in_hand is not batch:
                return  # closed meanwhile
            self._in_hand = None
            self._waiting.extendleft(reversed(parts))
            self._bytes += sum(len(part.body) for part in parts) - len(batch.body)
            self._make_room()

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
            if self._in_hand is not None:
                self._waiting.appendleft(self._in_hand)
            self._in_hand = None
            self._drop(sum(batch.items for batch in self._waiting), "shutdown")
            self._waiting.clear()
            self._changed.notify_all()

    def _make_room(self) -> None:
        while self._waiting and self._bytes > self._limit:
            oldest = self._waiting.popleft()
            self._bytes -= len(oldest.body)
            self._drop(oldest.items, "overflow")

    def _drop(self, items: int, reason: str) -> None:
        dropped = {**self._counts.dropped, reason: self._counts.dropped[reason] + items}
        self._counts = self._counts._replace(dropped=dropped)


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()  # noqa: S311  # spreads retries, protects nothing
        self._failures = 0

    def succeeded(self) -> None:
        """Reset the pause to its first value."""
        self._failures = 0

    def next_s(self, after_s: float | None) -> float:
        """Return the seconds to wait after a failure; at least ``after_s``, up to :data:`LONGEST_RETRY_AFTER_S`."""
        longest_s = min(FIRST_S * 2.0**self._failures, MOST_S)
        self._failures = min(self._failures + 1, 16)
        waiting_s = longest_s * (0.5 + self._random.random() / 2)
        return waiting_s if after_s is None else max(waiting_s, min(after_s, LONGEST_RETRY_AFTER_S))


class RefusalCauses:
    """Causes that are on the log: each is logged once, and again when it comes back after an hour without it."""

    def __init__(self) -> None:
        self._latest_s: dict[str, float] = {}

    def is_new(self, words: str, now_s: float) -> bool:
        """Return whether to log a refusal in these words. Numbers in them, such as times, make no other cause."""
        cause = _NUMBER.sub("0", words)
        before_s = self._latest_s.pop(cause, None)
        self._latest_s[cause] = now_s  # at the end
        if len(self._latest_s) > _MOST_CAUSES:
            del self._latest_s[next(iter(self._latest_s))]
        return before_s is None or now_s - before_s > _PAST_S


class Sender:
    """Sends one signal, so that a receiver of spans that hangs does not delay metrics."""

    def __init__(self, signal: str, queue: RequestQueue, transport: Transport) -> None:
        self._signal, self._queue, self._transport = signal, queue, transport
        self._backoff = Backoff()
        self._refused = False
        """the last request was, whatever it held, and that is on the log"""
        self._causes = RefusalCauses()
        self._thread = Thread(target=self._run, name=f"otlp-{signal}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop: unsent batches are dropped, and a request in progress is cancelled."""
        self._queue.close()
        self._transport.cancel()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._queue.take()) is not None:
            outcome = self._transport.send(batch.body)
            of = batch.of
            if outcome.kind == "refused" and not outcome.of_address and not of:
                parts = self._parts(batch)
                if len(parts) > 1:
                    self._queue.divide(batch, parts)
                    continue
                of = parts[0].of
            self._queue.settle(batch, outcome)
            self._log_outcome(outcome, of)
            if outcome.kind == "retry":
                self._queue.pause(self._backoff.next_s(outcome.after_s), outcome.after_s or 0.0)
            else:
                self._backoff.succeeded()
        self._transport.close()

    def _parts(self, batch: Batch) -> list[Batch]:
        parts = by_resource(self._signal, self._transport.unpack(batch.body))
        return [Batch(self._transport.pack(part.message), part.items, part.of) for part in parts]

    def _log_outcome(self, outcome: Outcome, of: str) -> None:
        """Log it; ``of``: the only rank that the request was of, or empty."""
        if outcome.kind == "refused" and of:
            if self._causes.is_new(outcome.words, time.monotonic()):
                _log.error("OTLP %s: the receiver refuses those of %s: %s", self._signal, of, outcome.words)
        elif outcome.kind == "refused":
            if not self._refused:  # a receiver without this signal would fill the log
                _log.error("OTLP %s: the receiver refuses them: %s", self._signal, outcome.words)
            self._refused = True
        elif outcome.kind == "retry":
            _log.warning("OTLP %s: not sent, they will be sent again: %s", self._signal, outcome.words)
        elif outcome.rejected or outcome.words:
            _log.warning("OTLP %s: the receiver rejected %d: %s", self._signal, outcome.rejected, outcome.words)
        if outcome.kind == "sent":
            self._refused = False
