"""Build the requests of a push from the ranks' metrics, spans and events, and keep per-rank state of what was sent before."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import Resource

from torchobs._version import __version__
from torchobs.exporter import exporter_metrics
from torchobs.exporter.otlp import attributes, log_encoder, span_encoder
from torchobs.exporter.otlp.log_encoder import RankLog
from torchobs.exporter.otlp.metric_encoder import Requests
from torchobs.exporter.otlp.metric_source import Source
from torchobs.exporter.otlp.request_size import packed
from torchobs.exporter.otlp.span_encoder import Trace, spans_of
from torchobs.flight.reader.reader import MAX_FILES
from torchobs.ranks import labels
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
    from opentelemetry.sdk.trace import ReadableSpan

    from torchobs.exporter.exporter_metrics import HostFacts, ScrapeInput
    from torchobs.exporter.otlp.request_size import Packed
    from torchobs.exporter.otlp.ring_reader import RingReader
    from torchobs.exporter.otlp.span_encoder import Frame
    from torchobs.ranks.snapshot import Rank

OLDER_NS = 10_000_000_000
"""A rank this much older than the exporter was served by an earlier exporter; a node's first rank starts its own exporter."""

_log = logging.getLogger(__name__)


Key = tuple[str, str]
"""A rank's incarnation and label: when a second process claims the same rank, the labels of both change."""


def key_of(rank: Rank) -> Key:
    """Return the key of a rank's streams."""
    return rank.incarnation, rank.rank


class Metrics:
    """Builds the metric requests of all ranks and of the exporter itself."""

    def __init__(self, *, delta: bool, series_limit: int, born_ns: int) -> None:
        """``born_ns``: start of the exporter, Unix ns."""
        self._delta, self._limit, self._born_ns = delta, series_limit, born_ns
        self._sources: dict[Key, Source] = {}
        self._collected: dict[str, None] = {}
        """incarnations with metrics collected so far, least recently collected first"""
        more: dict[str, str | int] = {"service.version": __version__, "process.pid": os.getpid()}
        own = _resource("torchobs-exporter", str(uuid.uuid4()), more)
        self._own = Source(own, {}, born_ns, series_limit, known=False)
        self._host: Source | None = None

    def unknown(self, ranks: Iterable[Rank]) -> list[Rank]:
        """Return the ranks that have not been collected yet."""
        return [rank for rank in ranks if key_of(rank) not in self._sources]

    def gone(self, ranks: Iterable[Rank]) -> list[Key]:
        """Return the keys that were collected before and are not among ``ranks``."""
        return [*self._sources.keys() - {key_of(rank) for rank in ranks}]

    def collect(self, ranks: Iterable[Rank], gone: Iterable[Key], at_ns: int, own: ScrapeInput | None = None) -> Packed:
        """Return the requests for ``ranks``, the final ones for ``gone``, and those for the exporter itself (``own``)."""
        requests = Requests(delta=self._delta)
        for rank in ranks:
            try:
                self._add(requests, rank, at_ns)
            except READ_ERRORS as problem:
                _log.warning("OTLP: metrics of rank %s cannot be made: %s", rank.rank, problem)
        for key in gone:
            self._sources.pop(key).end(requests, at_ns)
        if own is not None:
            self._own.add_to(requests, (), exporter_metrics.of_exporter(own, {}), at_ns)
            if own.host is not None:
                self._add_host(requests, own.host, at_ns)
        return requests.finish()

    def _add_host(self, requests: Requests, host: HostFacts, at_ns: int) -> None:
        if self._host is None:  # in Prometheus with a ``job`` of its own, and the host name as ``instance``
            resource = _resource("torchobs-host", socket.gethostname(), {"os.type": "linux"})
            self._host = Source(resource, {}, host.booted_ns or self._born_ns, self._limit, known=True)  # it counts since boot
        self._host.add_to(requests, (), host.said, at_ns)

    def _add(self, requests: Requests, rank: Rank, at_ns: int) -> None:
        source = self._sources.get(key_of(rank))
        if source is None:
            source = self._sources[key_of(rank)] = self._new(rank)
        source.reopened(rank.opened)
        self._remember(rank.incarnation)
        source.add_to(requests, rank.view.points, exporter_metrics.of_rank(rank), at_ns, recent=rank.exemplars, up=rank.up)

    def _new(self, rank: Rank) -> Source:
        header = rank.view.header
        identity = dict(zip(labels.IDENTITY, (rank.job_name, rank.run_id, rank.rank), strict=True))
        known = rank.incarnation in self._collected or header.wall_ns < self._born_ns - OLDER_NS
        return Source(attributes.resource_of(header), identity, header.wall_ns, self._limit, known=known)

    def _remember(self, incarnation: str) -> None:
        """Note that a rank was collected: it may return, or change its label, after its source was deleted."""
        self._collected.pop(incarnation, None)
        self._collected[incarnation] = None
        if len(self._collected) > MAX_FILES:
            del self._collected[next(iter(self._collected))]


class Traces:
    """Builds the span requests of all ranks."""

    def __init__(self, rings: RingReader, *, with_events: bool = True) -> None:
        """``with_events``: the run's span holds torchobs' events."""
        self._rings, self._with_events = rings, with_events
        self._traces: dict[str, Trace] = {}

    def collect(self, ranks: Iterable[Rank], wall_ns: int) -> Packed:
        """Return the requests for the new spans of ``ranks``."""
        spans: list[tuple[ReadableSpan, Frame]] = []
        for rank in ranks:
            try:
                self._add(spans, rank, wall_ns)
            except READ_ERRORS as problem:
                _log.warning("OTLP: spans of rank %s cannot be made: %s", rank.rank, problem)
        return packed(spans, span_encoder.request_of)

    def keep(self, ranks: Iterable[Rank]) -> None:
        """Drop the state of all other ranks."""
        served = {rank.incarnation for rank in ranks}
        self._rings.keep(served)
        for gone in self._traces.keys() - served:
            del self._traces[gone]

    def _add(self, spans: list[tuple[ReadableSpan, Frame]], rank: Rank, wall_ns: int) -> None:
        header, live = rank.view.header, rank.view.live
        if rank.incarnation not in self._traces:
            self._traces[rank.incarnation] = Trace(header, with_events=self._with_events)
        trace = self._traces[rank.incarnation]
        spans += spans_of(trace, trace.take(self._rings.fresh(rank, wall_ns)))
        if not rank.up:
            last_ns = header.wall_ns + (live.heartbeat_ns or header.monotonic_ns) - header.monotonic_ns
            spans += spans_of(trace, trace.finish(rank.reason, last_ns))


class Logs:
    """Builds the log requests of all ranks."""

    def __init__(self, rings: RingReader) -> None:
        self._rings = rings
        self._logs: dict[str, RankLog] = {}

    def collect(self, ranks: Iterable[Rank], wall_ns: int) -> Packed:
        """Return the requests for the new events of ``ranks``, and drop the state of all other ranks."""
        records: list[tuple[RankLog, LogRecord]] = []
        served = set()
        for rank in ranks:
            served.add(rank.incarnation)
            if rank.incarnation not in self._logs:
                self._logs[rank.incarnation] = RankLog(rank.view.header)
            log = self._logs[rank.incarnation]
            if self._rings.written(rank):
                records += ((log, record) for record in log.records(self._rings.fresh(rank, wall_ns), wall_ns))
        self._rings.keep(served)
        for gone in self._logs.keys() - served:
            del self._logs[gone]
        return packed(records, log_encoder.request_of)


def _resource(service: str, instance: str, more: Mapping[str, str | int]) -> Resource:
    given = {
        "service.name": service,
        "service.instance.id": instance,
        "host.name": socket.gethostname(),
        "telemetry.sdk.name": attributes.SCOPE,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
    }
    return Resource({**given, **more})
