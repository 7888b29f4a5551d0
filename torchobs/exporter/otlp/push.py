"""The push: one thread makes requests of snapshots, and one for each signal sends them, from a bounded queue with its counters.

The event loop only hands over each snapshot. A rank that has ended, is gone or is new is pushed at once: when a pod is deleted,
no time is left after the training's end; and a counter that the receiver knows from 0 on loses no first increase.

A request is of one rank, so that data which a receiver refuses costs no other rank its own. The oldest go first, and each is
tried until it is accepted or refused. When the queue is full, the oldest are dropped: the newest are worth most, for they hold
the final state of ranks that have ended, and cumulative points supersede older ones.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from random import random
from threading import Condition, Thread
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.exporter.exporter_metrics import PushCounts
from torchobs.exporter.otlp import send, source
from torchobs.exporter.otlp.source import Metrics, Rings
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.exporter.config import ExporterConfig, PushConfig
    from torchobs.exporter.exporter_metrics import ScrapeInput
    from torchobs.exporter.otlp.send import Outcome, Transport
    from torchobs.exporter.otlp.source import Batch, Item
    from torchobs.ranks.snapshot import Rank

REASONS = catalog.OTLP_DROPPED.attributes[1].values

FIRST_S, MOST_S = 1.0, 60.0
"""First and longest pause between attempts: doubled each time, half of it random, as in OpenTelemetry's exporters."""

MOST_DOUBLINGS = 6
"""A minute is reached by then; after an outage of days the power would overflow."""

LAST_S = 2.0
"""Pause between attempts while the exporter shuts down: after a long outage the usual pauses would outlast it."""

LONGEST_RETRY_AFTER_S = 300.0
"""Upper limit of ``Retry-After``: a mistaken value of a year must not stop the push."""

_NUMBER = re.compile(r"[0-9]+")
_LOG_EVERY_S = 3600.0
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


class Sender:
    """The queue of one signal, and the thread that sends it: a receiver of spans that hangs does not delay metrics."""

    def __init__(self, signal: str, transport: Transport, limit_bytes: int, clock: Clock) -> None:
        self._signal, self._transport, self._limit, self._clock = signal, transport, limit_bytes, clock
        self._waiting: deque[Batch] = deque()
        """besides the one that is being sent, which is counted as queued, too"""
        self._bytes = self._queued = self._sent = self._failures = 0
        self._dropped = dict.fromkeys(REASONS, 0)
        self._changed = Condition()
        self._closed = self._ends = False
        self._attempts = 0
        """failed ones since the last success"""
        self._causes = RateLimiter(_LOG_EVERY_S)
        self._thread = Thread(target=self._run, name=f"otlp-{signal}", daemon=True)

    @property
    def counts(self) -> PushCounts:
        """The counters at one moment."""
        with self._changed:
            return PushCounts(self._sent, dict(self._dropped), self._queued, self._failures)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Add a request; older ones, or this one, are dropped if there is no room."""
        with self._changed:
            self._waiting.append(batch)
            self._bytes += len(batch.body)
            self._queued += batch.items
            self._make_room()
            self._changed.notify_all()

    def hurry(self) -> None:
        """Shorten the pauses, the present one included, because the exporter shuts down."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Stop. Unsent requests are dropped; the one in progress has ``timeout_s`` to succeed. Idempotent."""
        with self._changed:
            self._closed = True
            self._make_room()
            self._changed.notify_all()
        self._transport.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                outcome = self._transport.send(batch.body)
            except Exception as problem:  # noqa: BLE001  # the thread goes on: the next request may be accepted
                _log.exception("OTLP %s: a request could not be sent", self._signal)
                outcome = send.Outcome("refused", words=repr(problem), of_address=True)
            self._settle(batch, outcome)
            self._log_outcome(outcome, batch.owner)
            if outcome.kind == "retry":
                self._pause(outcome.after_s)

    def _next_batch(self) -> Batch | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popleft()

    def _settle(self, batch: Batch, outcome: Outcome) -> None:
        """Count the outcome of a request; one to be retried becomes the oldest in the queue again."""
        with self._changed:
            if outcome.kind == "retry":
                self._failures += 1
                self._attempts += 1
                self._waiting.appendleft(batch)
                self._make_room()
                return
            self._attempts = 0
            self._forget(batch)
            rejected = batch.items if outcome.kind == "refused" else min(outcome.rejected, batch.items)
            self._dropped["refused" if outcome.kind == "refused" else "rejected"] += rejected
            self._sent += batch.items - rejected

    def _make_room(self) -> None:
        while self._waiting and (self._closed or self._bytes > self._limit):
            batch = self._waiting.popleft()
            self._forget(batch)
            self._dropped["shutdown" if self._closed else "overflow"] += batch.items

    def _forget(self, batch: Batch) -> None:
        self._bytes -= len(batch.body)
        self._queued -= batch.items

    def _pause(self, after_s: float | None) -> None:
        """Wait before the next attempt, shorter during shutdown. ``after_s``: the pause that the receiver has asked for."""
        asked_s = min(after_s or 0.0, LONGEST_RETRY_AFTER_S)
        longest_s = min(FIRST_S * 2.0 ** min(self._attempts - 1, MOST_DOUBLINGS), MOST_S)
        pause_s = longest_s * (0.5 + random() / 2)  # noqa: S311  # spreads retries, protects nothing
        with self._changed:
            began_s = self._clock.now()
            while not self._closed:
                wanted_s = max(min(pause_s, LAST_S) if self._ends else pause_s, asked_s)
                if (left_s := began_s + wanted_s - self._clock.now()) <= 0:
                    return
                self._clock.wait(self._changed, left_s)

    def _log_outcome(self, outcome: Outcome, owner: str) -> None:
        """Log an outcome that is an error; ``owner``: of the data.

        Each cause of a refusal is logged once an hour: a receiver without this signal would fill the log. Numbers in the
        receiver's words, such as times, make no other cause.
        """
        if outcome.kind == "retry":
            _log.warning("OTLP %s: not sent, they will be sent again: %s", self._signal, outcome.words)
        elif outcome.kind == "refused":
            if self._causes.take(self._clock.now(), _NUMBER.sub("0", outcome.words)):
                refused = "them" if outcome.of_address else f"those of {owner}"
                _log.error("OTLP %s: the receiver refuses %s: %s", self._signal, refused, outcome.words)
        elif outcome.rejected or outcome.words:
            _log.warning("OTLP %s: the receiver rejected %d: %s", self._signal, outcome.rejected, outcome.words)


class Push:
    """Pushes all signals. Call from one thread; ``counts`` and ``settled`` may be called from any."""

    def __init__(self, config: PushConfig, exporter: ExporterConfig, clock: Clock | None = None) -> None:
        self._config, self._clock = config, clock or Clock()
        self._senders = {
            signal: Sender(signal, send.transport(signal, target), config.queue_bytes, self._clock)
            for signal, target in config.targets()
        }
        self._metrics = Metrics(self._clock.wall_ns())
        self._rings = Rings(exporter, spans="traces" in self._senders)
        self._spans: list[Item] = []
        """spans that wait for their time"""
        self._ended: set[str] = set()
        self._replaced_since: dict[str, Rank] = {}
        """ranks replaced by other incarnations since the last snapshot that was processed"""
        self._next_metrics_s = self._next_spans_s = 0.0
        self._changed = Condition()
        self._scrape: ScrapeInput | None = None
        self._closed = self._final = False
        self._thread = Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._next_metrics_s = self._clock.now() + self._config.interval_s
        for sender in self._senders.values():
            sender.start()
        self._thread.start()

    @property
    def counts(self) -> Mapping[str, PushCounts]:
        """What was sent and dropped, by signal."""
        return {signal: sender.counts for signal, sender in self._senders.items()}

    @property
    def settled(self) -> bool:
        """True once the final state was processed and everything is sent or dropped."""
        return not self._final and not any(counts.queued for counts in self.counts.values())

    @property
    def due(self) -> bool:
        """True if the next snapshot will be pushed as metrics."""
        return "metrics" in self._senders and self._clock.now() >= self._next_metrics_s

    def accept(self, scrape: ScrapeInput, *, final: bool = False) -> None:
        """Hand over a snapshot to push what is due; ``final``: everything, because the exporter ends. Returns at once."""
        with self._changed:
            self._scrape, self._final = scrape, final or self._final
            self._replaced_since |= {rank.incarnation: rank for rank in scrape.snapshot.left}
            self._changed.notify_all()
        if final:
            for sender in self._senders.values():
                sender.hurry()

    def close(self, timeout_s: float = 0.5) -> None:
        """Stop; unsent items are dropped and counted. Waits at most ``timeout_s`` for each thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sender in self._senders.values():
            sender.close(timeout_s)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            scrape, left, final = work
            ranks = scrape.snapshot.ranks
            # their streams end one snapshot later
            replaced = [rank for rank in left if rank.incarnation not in self._ended]
            self._push_rings((*ranks, *replaced), final=final)
            self._push_metrics(scrape, replaced, final=final)
            self._ended = {rank.incarnation for rank in (*ranks, *left) if not rank.up}
            with self._changed:
                self._final = self._final and self._scrape is not None  # one handed over meanwhile is the final one
        self._rings.close()

    def _next(self) -> tuple[ScrapeInput, list[Rank], bool] | None:
        """Wait for a snapshot; return it, the ranks replaced since the last one, and whether it is the final one."""
        with self._changed:
            while self._scrape is None and not self._closed:
                self._changed.wait()
            if self._closed or self._scrape is None:
                return None
            scrape, self._scrape = self._scrape, None
            replaced, self._replaced_since = self._replaced_since, {}
            served = {rank.incarnation for rank in scrape.snapshot.ranks}
            return scrape, [rank for incarnation, rank in replaced.items() if incarnation not in served], self._final

    def _push_rings(self, ranks: Sequence[Rank], *, final: bool) -> None:
        """Push new events at once: whoever is to hear of an anomaly should not wait for it. Spans wait for their time."""
        if not {"traces", "logs"} & self._senders.keys():
            return
        spans, records = self._rings.read(ranks, self._clock.wall_ns())
        self._spans += spans
        self._put("logs", records)
        now_s, most = self._clock.now(), source.MOST_ITEMS["traces"]
        if final or now_s >= self._next_spans_s or len(self._spans) >= most or any(map(self._has_just_ended, ranks)):
            self._next_spans_s = now_s + self._config.span_delay_s
            spans, self._spans = self._spans, []
            self._put("traces", spans)

    def _push_metrics(self, scrape: ScrapeInput, replaced: Sequence[Rank], *, final: bool) -> None:
        if "metrics" not in self._senders:
            return
        ranks, now_s = scrape.snapshot.ranks, self._clock.now()
        gone, everything = self._metrics.gone((*ranks, *replaced)), final or now_s >= self._next_metrics_s
        if everything:
            self._next_metrics_s = now_s + self._config.interval_s
        else:
            ranks = tuple(rank for rank in ranks if self._metrics.is_new(rank) or self._has_just_ended(rank))
        ranks = (*ranks, *(rank for rank in replaced if final or not rank.up))
        if ranks or gone or everything:
            counted = scrape._replace(pushed=self.counts) if everything else None
            self._put("metrics", [*self._metrics.collect(ranks, gone, self._clock.wall_ns(), counted)])

    def _has_just_ended(self, rank: Rank) -> bool:
        return not rank.up and rank.incarnation not in self._ended

    def _put(self, signal: str, items: Sequence[Item]) -> None:
        if signal in self._senders:
            for batch in source.batches(signal, items):
                self._senders[signal].put(batch)
