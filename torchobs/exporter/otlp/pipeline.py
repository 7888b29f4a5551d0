"""The push pipeline: one thread builds requests from snapshots, and one sender thread per signal delivers them.

The event loop only hands over each snapshot. A rank that has ended, is gone or is new is pushed at once: when a pod is deleted,
no time is left after the training's end; and a counter that the receiver knows from 0 on loses no first increase.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Condition, Thread
from typing import TYPE_CHECKING

from torchobs.exporter.otlp.batches import OLDER_NS, Logs, Metrics, Traces, key_of
from torchobs.exporter.otlp.delivery import Batch, Clock, RequestQueue, Sender
from torchobs.exporter.otlp.ring_reader import RingReader
from torchobs.flight.format.layout import Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.exporter_metrics import ScrapeInput
    from torchobs.exporter.otlp.delivery import Counts
    from torchobs.exporter.otlp.options import PushConfig, PushTarget
    from torchobs.exporter.otlp.request_size import Packed
    from torchobs.exporter.otlp.transport import Transport
    from torchobs.ranks.snapshot import Rank, Snapshot

_FULL = 0.25
"""Share of a rank's event ring; when so much is unread, the ring is read ahead of schedule, before it is overwritten."""


class PushPipeline:
    """Pushes all signals. Call from one thread; ``counts`` and ``settled`` may be called from any."""

    def __init__(self, config: PushConfig, exporter: ExporterConfig, clock: Clock | None = None) -> None:
        self._config, self._clock = config, clock or Clock()
        self._queues = {signal: RequestQueue(config.queue_bytes, self._clock) for signal, _ in config.targets()}
        self._transports = {signal: _connect(signal, target) for signal, target in config.targets()}
        self._senders = [Sender(name, queue, self._transports[name]) for name, queue in self._queues.items()]
        born_ns = self._clock.wall_ns()
        self._metrics = Metrics(delta=config.delta, series_limit=exporter.series_limit, born_ns=born_ns)
        self._rings = {signal: RingReader(exporter, born_ns - OLDER_NS) for signal in ("traces", "logs")}
        self._traces = Traces(self._rings["traces"], with_events=config.span_events)
        self._logs = Logs(self._rings["logs"])
        self._ended: set[str] = set()
        self._replaced_since: dict[str, Rank] = {}
        """ranks replaced by other incarnations since the last snapshot that was processed"""
        self._next_metrics_s = self._next_traces_s = 0.0
        self._changed = Condition()
        self._scrape: ScrapeInput | None = None
        self._closed = self._final = False
        self._thread = Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._next_metrics_s = self._clock.now() + self._config.interval_s
        for sender in self._senders:
            sender.start()
        self._thread.start()

    @property
    def counts(self) -> Mapping[str, Counts]:
        """Counts of what was recorded, sent and dropped, by signal."""
        counts = {signal: queue.counts for signal, queue in self._queues.items()}
        for signal, rings in self._rings.items():
            if signal in counts:
                counts[signal] = counts[signal]._replace(unread_bytes=rings.unread_bytes)
        return counts

    @property
    def settled(self) -> bool:
        """True once the final state was processed and everything is sent or dropped."""
        return not self._final and not any(one.counts.queued for one in self._queues.values())

    @property
    def due(self) -> bool:
        """True if the next snapshot will be pushed as metrics."""
        return "metrics" in self._queues and self._clock.now() >= self._next_metrics_s

    def look(self, scrape: ScrapeInput, *, final: bool = False) -> None:
        """Hand over a snapshot to push what is due; ``final``: everything, because the exporter ends. Returns at once."""
        with self._changed:
            self._scrape, self._final = scrape, final or self._final
            self._replaced_since |= {rank.incarnation: rank for rank in scrape.snapshot.left}
            self._changed.notify_all()
        if final:
            for queue in self._queues.values():
                queue.hurry()

    def close(self, timeout_s: float = 0.5) -> None:
        """Stop; unsent items are dropped and counted. Waits at most ``timeout_s`` for each thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sender in self._senders:
            sender.close(timeout_s)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            scrape, final = work
            self._push_logs(scrape.snapshot)
            self._push_traces(scrape, final=final)
            self._push_metrics(scrape, final=final)
            self._ended = {rank.incarnation for rank in (*scrape.snapshot.ranks, *scrape.snapshot.left) if not rank.up}
            with self._changed:
                self._final = self._final and self._scrape is not None  # one handed over meanwhile is the final one
        for rings in self._rings.values():
            rings.close()

    def _next(self) -> tuple[ScrapeInput, bool] | None:
        with self._changed:
            while self._scrape is None and not self._closed:
                self._changed.wait()
            if self._closed or self._scrape is None:
                return None
            scrape, self._scrape = self._scrape, None
            left, self._replaced_since = self._replaced_since, {}
            served = {rank.incarnation for rank in scrape.snapshot.ranks}
            left = {incarnation: rank for incarnation, rank in left.items() if incarnation not in served}
            return scrape._replace(snapshot=replace(scrape.snapshot, left=(*left.values(),))), self._final

    def _push_logs(self, snapshot: Snapshot) -> None:
        """Push the new events of every look: whoever is to be told of an anomaly should not wait for it."""
        if "logs" in self._queues:
            ranks = (*snapshot.ranks, *self._replaced(snapshot))
            self._put("logs", self._logs.collect(ranks, self._clock.wall_ns()))

    def _push_metrics(self, scrape: ScrapeInput, *, final: bool) -> None:
        if "metrics" not in self._queues:
            return
        ranks, replaced, now_s = scrape.snapshot.ranks, self._replaced(scrape.snapshot), self._clock.now()
        gone, everything = self._metrics.gone((*ranks, *replaced)), final or now_s >= self._next_metrics_s
        if everything:
            self._next_metrics_s = now_s + self._config.interval_s
        else:
            new = {key_of(rank) for rank in self._metrics.unknown(ranks)}
            ranks = tuple(rank for rank in ranks if key_of(rank) in new or self._has_just_ended(rank))
        ranks = (*ranks, *(rank for rank in replaced if final or not rank.up))
        if ranks or gone or everything:
            own = scrape._replace(pushed=self.counts) if everything else None
            self._put("metrics", self._metrics.collect(ranks, gone, self._clock.wall_ns(), own))

    def _push_traces(self, scrape: ScrapeInput, *, final: bool) -> None:
        if "traces" not in self._queues:
            return
        ranks, replaced, now_s = scrape.snapshot.ranks, self._replaced(scrape.snapshot), self._clock.now()
        due = final or now_s >= self._next_traces_s
        if due:
            self._next_traces_s = now_s + self._config.span_delay_s
        chosen = [rank for rank in (*ranks, *replaced) if self._wants_reading(rank, due=due, final=final)]
        if chosen:
            self._put("traces", self._traces.collect(chosen, self._clock.wall_ns()))
        self._traces.keep((*ranks, *replaced))

    def _wants_reading(self, rank: Rank, *, due: bool, final: bool) -> bool:
        written = self._rings["traces"].written(rank)
        ring = rank.view.header.regions[Region.EVENTS].length
        if final or self._has_just_ended(rank) or written > _FULL * ring:
            return True
        return due and rank.up and written != 0

    def _replaced(self, snapshot: Snapshot) -> list[Rank]:
        """Return the replaced ranks whose end is not processed yet: their streams end one snapshot later."""
        return [rank for rank in snapshot.left if rank.incarnation not in self._ended]

    def _has_just_ended(self, rank: Rank) -> bool:
        return not rank.up and rank.incarnation not in self._ended

    def _put(self, signal: str, requests: Packed) -> None:
        pack = self._transports[signal].pack
        for message, items in requests:
            self._queues[signal].put(Batch(pack(message), items))


def _connect(signal: str, target: PushTarget) -> Transport:
    """Return the transport of a signal. Raises ``ModuleNotFoundError`` for gRPC without its extra."""
    if target.protocol == "grpc":
        from torchobs.exporter.otlp.grpc_transport import GrpcTransport

        return GrpcTransport(signal, target)
    from torchobs.exporter.otlp.http_transport import HttpTransport

    return HttpTransport(signal, target)
