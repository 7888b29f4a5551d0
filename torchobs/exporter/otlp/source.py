"""The push's requests: data points of snapshots, spans and log records of the ranks' event rings.

The messages are protobuf's: the data classes of OpenTelemetry's SDK lack *no recorded value*, trace flags and trace state, and
its encoder of log records is not stable.

docs/otlp.md has what they hold. When a stream loses its value (a gauge that is not finite, the state of a rank that has ended,
a rank after its grace period), one point with the flag *no recorded value* ends the series in Prometheus. A restarted exporter
sends the frames that are still in the ring again, with the same identifiers, which are the file's.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags, HistogramDataPoint, NumberDataPoint
from opentelemetry.proto.metrics.v1.metrics_pb2 import Exemplar as ExemplarMessage
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from torchobs import catalog
from torchobs._version import __version__
from torchobs.catalog import BY_NAME, UNNAMED, Kind, Severity, cumulative, prometheus_name
from torchobs.config.launchers import LAUNCH, LAUNCHED_BY
from torchobs.exporter import exporter_metrics
from torchobs.flight import events, reader
from torchobs.flight.events import Event, Late, SpanId, SpanIds, Tail
from torchobs.flight.files import file_name
from torchobs.flight.layout import PROCESS_BEGUN, Region, encodable
from torchobs.flight.reader import Distribution
from torchobs.flight.series import Scope, Series, ValueType
from torchobs.ranks import labels
from torchobs.ranks.events import with_unit
from torchobs.ranks.labels import NO_EXEMPLARS, exemplars_of
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.scanner import Directory
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.exporter_metrics import HostFacts, Sample, ScrapeInput
    from torchobs.flight.layout import Header
    from torchobs.flight.reader import FlightFile, Value
    from torchobs.ranks.labels import Exemplar, Shown
    from torchobs.ranks.snapshot import Rank

SCOPE = "torchobs"
"""Instrumentation scope of torchobs' own metrics and spans."""
MOST_ITEMS = {"metrics": 5_000, "traces": 512, "logs": 512}
"""Data points, spans or log records of one request: of the latter two the SDK's default.

A full flight file makes a request of 0.8 MiB at most (measured with long attributes); gRPC receivers accept 4 MiB by default.
"""
STEP = "torchobs.step.number"
"""Attribute for the number of a step. ``torchobs.step`` would be an attribute and a namespace at once, which must not be."""

_INT64 = 1 << 63
_DEPTH = 8
_CONVENTIONS = {
    "job_name": "service.name",
    "host": "host.name",
    "python_version": "process.runtime.version",
    "torchobs_version": "telemetry.sdk.version",
}
"""Attributes of a resource that have a name in OpenTelemetry's semantic conventions."""
_NAMESPACED = (
    "run_id", "rank", "local_rank", "world_size", "local_world_size", "node_rank", "restart", "launcher", "script",
    "torch_version", "replica_group",
)  # fmt: skip
_SDK = {"telemetry.sdk.name": SCOPE, "telemetry.sdk.language": "python"}
_LEFT_OUT = frozenset({"trace_id", "pid", LAUNCH, LAUNCHED_BY, PROCESS_BEGUN})
_DATA = {Kind.COUNTER: "sum", Kind.UPDOWN: "sum", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
_CUMULATIVE = 2
_BEFORE_NS = 1_000_000
"""Time between a stream's last value and its end: Prometheus' timestamps are in milliseconds."""
_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK

_CONVENTIONAL = re.compile(r"(exception|hw)\.")
"""Attributes of the catalog's events and spans that are named as in the semantic conventions."""
_RENAMED = {"step": STEP, "thread": "thread.name"}
_ROOTS = (catalog.SPAN_RUN.name, catalog.SPAN_SEGMENT.name)
_SPANS = frozenset(span.name for span in catalog.SPANS)
_KINDS = {name.removeprefix("SPAN_KIND_").lower(): value for name, value in Span.SpanKind.items()}
_STATUSES = {"unset": Status.STATUS_CODE_UNSET, "ok": Status.STATUS_CODE_OK, "error": Status.STATUS_CODE_ERROR}
_SEVERITIES = {
    Severity.INFO: ("INFO", SeverityNumber.SEVERITY_NUMBER_INFO),
    Severity.WARNING: ("WARN", SeverityNumber.SEVERITY_NUMBER_WARN),
    Severity.ERROR: ("ERROR", SeverityNumber.SEVERITY_NUMBER_ERROR),
}
_SAMPLED, _FLAGS = 0x01, 0xFF
_MOST_BODY = 1000
_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)

Key = tuple[str, str]
"""A rank's incarnation and label: when a second process claims the same rank, the labels of both change."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A resource and an instrumentation scope, the place of items in a request. Compared by identity."""

    resource: Resource
    scope: InstrumentationScope
    schema_url: str = ""
    owner: str = ""
    """the resource's rank or service in words, for the log"""
    _others: dict[str, Place] = field(default_factory=dict)
    """those of the application's scopes"""

    def of_scope(self, name: str, version: str, schema_url: str, attributes: Mapping[str, object]) -> Place:
        """Return the place of an application's items in the same resource."""
        key = repr((name, version, schema_url, attributes))
        if key not in self._others:
            self._others[key] = Place(self.resource, _scope(name, version, attributes), encodable(schema_url), self.owner)
        return self._others[key]


class MetricKey(NamedTuple):
    """A metric; its data points stand together."""

    name: str
    kind: Kind
    unit: str
    brief: str


class Item(NamedTuple):
    """A data point, span or log record as a message. ``metric``: of a data point."""

    place: Place
    message: Any
    metric: MetricKey | None = None


class Batch(NamedTuple):
    """One serialised request and the number of its items. ``owner``: the rank or service of them all."""

    body: bytes
    items: int
    owner: str = ""


_REQUESTS: dict[str, tuple[Any, str, str]] = {
    "metrics": (ExportMetricsServiceRequest, "metrics", "metrics"),
    "traces": (ExportTraceServiceRequest, "spans", "spans"),
    "logs": (ExportLogsServiceRequest, "logs", "log_records"),
}
"""For each signal the request, the names of its levels, and the field of its items"""


def batches(signal: str, items: Iterable[Item]) -> list[Batch]:
    """Return requests with the items in order, each of one resource: a receiver refuses a whole request."""
    most, owned = MOST_ITEMS[signal], dict[int, list[Item]]()
    for item in items:
        owned.setdefault(id(item.place.resource), []).append(item)
    parts = (group[begin : begin + most] for group in owned.values() for begin in range(0, len(group), most))
    return [_batch(signal, part) for part in parts]


def _batch(signal: str, items: Sequence[Item]) -> Batch:
    """Return the request with these items of one resource."""
    kind, level, field = _REQUESTS[signal]
    request = kind()
    levels = getattr(getattr(request, f"resource_{level}").add(resource=items[0].place.resource), f"scope_{level}")
    scopes: dict[Place, Any] = {}
    metrics: dict[tuple[Place, MetricKey | None], Any] = {}
    for place, message, metric in items:
        points = metrics.get((place, metric))
        if points is None:
            if place not in scopes:
                scopes[place] = getattr(levels.add(scope=place.scope, schema_url=place.schema_url), field)
            points = metrics[place, metric] = scopes[place] if metric is None else _points(scopes[place], metric)
        points.append(message)
    return Batch(request.SerializeToString(), len(items), items[0].place.owner)


def _points(metrics: Any, metric: MetricKey) -> Any:
    data = getattr(metrics.add(name=metric.name, unit=metric.unit, description=metric.brief), _DATA[metric.kind])
    if metric.kind is not Kind.GAUGE:
        data.aggregation_temporality = _CUMULATIVE
    if metric.kind is Kind.COUNTER:
        data.is_monotonic = True
    return data.data_points


def any_value(value: object, depth: int = _DEPTH) -> AnyValue:
    """Return a value with a type of OTLP; other types, and values nested deeper than 8 levels, become text."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return AnyValue(int_value=value)
    if isinstance(value, float) and isfinite(value):
        return AnyValue(double_value=value)
    if isinstance(value, dict) and depth:
        return AnyValue(kvlist_value=KeyValueList(values=pairs(value, depth - 1)))
    if isinstance(value, (list, tuple)) and depth:
        return AnyValue(array_value=ArrayValue(values=[any_value(item, depth - 1) for item in value]))
    return AnyValue() if value is None else AnyValue(string_value=labels.text(value))


def pairs(attributes: Mapping[str, object], depth: int = _DEPTH) -> list[KeyValue]:
    """Return attributes as messages, without nameless ones."""
    return [KeyValue(key=encodable(name), value=any_value(value, depth)) for name, value in attributes.items() if name]


def accepted_names(attributes: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return attributes by names that Prometheus' OTLP endpoint accepts: for one that it does not, it refuses the request.

    As on the metrics page, those that get one name share it, with their values joined by a semicolon.
    """
    accepted: dict[str, object] = {}
    for original, value in attributes:
        name = labels.pushed_name(original)
        accepted[name] = f"{labels.text(accepted[name])};{labels.text(value)}" if name in accepted else value
    return accepted


def place_of(header: Header) -> Place:
    """Return the place of torchobs' own items of an incarnation: its resource, with the semantic conventions' names.

    Attributes from ``OTEL_RESOURCE_ATTRIBUTES``, and Kubernetes' attributes, keep their names where Prometheus accepts them.
    """
    job_name, run_id, rank = labels.identity(header.resource)
    rest = {name: value for name, value in header.resource.items() if name not in _LEFT_OUT}
    namespaced = {f"{SCOPE}.{name}": rest.pop(name) for name in _NAMESPACED if name in rest}
    conventional = {convention: rest.pop(name) for name, convention in _CONVENTIONS.items() if name in rest}
    fixed = {"service.name": job_name, "service.instance.id": header.incarnation.hex(), "process.pid": header.pid, **_SDK}
    resource = Resource(attributes=pairs({**accepted_names(rest.items()), **namespaced, **conventional, **fixed}))
    version = labels.text(header.resource.get("torchobs_version", ""))
    return Place(resource, _scope(SCOPE, version), owner=f"job {job_name}, run {run_id}, rank {rank}")


def _exporter_place(service: str, instance: str, more: Mapping[str, object]) -> Place:
    """Return the place of what the exporter measures itself."""
    attributes = {"service.name": service, "service.instance.id": instance, "host.name": socket.gethostname()}
    sdk = {**_SDK, "telemetry.sdk.version": __version__}
    return Place(Resource(attributes=pairs({**attributes, **sdk, **more})), _scope(SCOPE, __version__), owner=service)


def _scope(name: str, version: str, attributes: Mapping[str, object] | None = None) -> InstrumentationScope:
    return InstrumentationScope(name=encodable(name), version=encodable(version), attributes=pairs(attributes or {}))


class _Stream:
    """One series, and the parts that its points share."""

    __slots__ = ("_common", "_has_sum", "_kind", "_place", "is_open", "metric", "series", "survives")

    def __init__(self, series: Series, place: Place, attributes: Mapping[str, object]) -> None:
        self.series, self._place = series, place
        is_unnamed = prometheus_name(series.name, series.unit, series.kind) == UNNAMED  # which Prometheus would refuse
        self.metric = MetricKey(UNNAMED if is_unnamed else series.name, series.kind, series.unit, series.brief)
        described = BY_NAME.get(series.name) if series.scope is None else None
        self.survives = cumulative(series.kind) or (described is not None and described.survives)
        self.is_open = False
        """whether the last point sent has a value, which receivers keep until a point ends the series"""
        self._kind: Any = HistogramDataPoint if series.kind is Kind.HISTOGRAM else NumberDataPoint
        bounds = {"explicit_bounds": series.bounds} if series.kind is Kind.HISTOGRAM else {}
        self._common: dict[str, Any] = {"attributes": pairs(attributes), **bounds}
        self._has_sum = True

    def point(self, value: Value, start_ns: int, at_ns: int, recent: Mapping[int, Exemplar]) -> Item:
        """Return the point of a value counted since ``start_ns``; ``recent``: exemplars by bucket."""
        self.is_open = True
        fields: dict[str, Any] = {"time_unix_nano": at_ns}
        if self.series.kind is not Kind.GAUGE:
            fields["start_time_unix_nano"] = start_ns
        if isinstance(value, Distribution):
            # a histogram that has observed negative values has a sum that is not monotonic, and OTLP forbids it then
            self._has_sum = value.least is None or value.least >= 0
            fields |= {"count": sum(value.counts), "sum": value.sum if self._has_sum else None, "bucket_counts": value.counts}
            # a span can precede the fold of its step
            exemplars = [_exemplar(exemplar) for index, exemplar in recent.items() if value.counts[index]]
            fields |= {"min": value.least, "max": value.greatest, "exemplars": exemplars}
        else:
            fields["as_int" if isinstance(value, int) and abs(value) < _INT64 else "as_double"] = value
        return self._item(fields)

    def end(self, at_ns: int) -> Item:
        """Return the point that ends the series (*no recorded value*)."""
        self.is_open = False
        fields: dict[str, Any] = {"time_unix_nano": at_ns, "flags": _NO_VALUE}
        if self.series.kind is Kind.HISTOGRAM:  # Prometheus ends only the buckets and the sum that the point has
            fields |= {"bucket_counts": (0,) * (len(self.series.bounds) + 1), "sum": 0.0 if self._has_sum else None}
        return self._item(fields)

    def _item(self, fields: Mapping[str, Any]) -> Item:
        return Item(self._place, self._kind(**self._common, **fields), self.metric)


def _exemplar(exemplar: Exemplar) -> ExemplarMessage:
    return ExemplarMessage(
        filtered_attributes=pairs({"step": exemplar.step}),
        time_unix_nano=exemplar.at_ns,
        as_double=exemplar.value,
        span_id=bytes.fromhex(exemplar.span_id),
        trace_id=bytes.fromhex(exemplar.trace_id),
    )


class _Source:
    """The streams of one resource: a rank's incarnation, the host, or the exporter itself."""

    def __init__(self, place: Place, identity: Mapping[str, str], born_ns: int) -> None:
        self._identity, self._born_ns = identity, born_ns
        self._streams: dict[Series, _Stream | None] = {}
        self._sampled: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._place = place
        self._taken: set[tuple[Scope | None, str, str]] = set()
        self._up = False

    def collect(
        self, points: Iterable[tuple[Series, Value]], samples: Iterable[Sample], at_ns: int, *,
        recent: Shown = NO_EXEMPLARS, up: bool = True,
    ) -> Iterator[Item]:  # fmt: skip
        """Yield the points of all series that have a value, and end the streams of those that have lost it.

        ``recent``: the rank's exemplars. A gauge of a rank that has just ended gets both points: its last value, which may not
        have been sent yet, and its end.
        """
        at_ns = max(at_ns, self._born_ns)  # the wall clock may have been set back
        valued: set[_Stream] = set()
        has_just_ended, self._up = self._up and not up, up
        for series, value in (*points, *self._as_series(samples)):
            if series not in self._streams:
                if _is_quiet(series, value):
                    continue  # what it counts first is exact all the same: a point says since when it counts
                self._streams[series] = self._open(series)
            stream = self._streams[series]
            if stream is None:
                continue
            if up or stream.survives:
                valued.add(stream)
                yield stream.point(value, self._born_ns, at_ns, exemplars_of(series, recent))
            elif has_just_ended:
                yield stream.point(value, self._born_ns, at_ns - _BEFORE_NS, {})
        yield from self.end(at_ns, valued)

    def end(self, at_ns: int, valued: Collection[_Stream] = ()) -> Iterator[Item]:
        """End all streams except those that have a value."""
        at_ns = max(at_ns, self._born_ns)
        streams = filter(None, self._streams.values())
        return (stream.end(at_ns) for stream in streams if stream.is_open and stream not in valued)

    def _as_series(self, samples: Iterable[Sample]) -> Iterator[tuple[Series, Value]]:
        for metric, attributes, value in samples:
            key = metric.name, tuple(sorted(attributes.items()))
            series = self._sampled.get(key)
            if series is None:
                series = Series(metric.name, metric.kind, metric.unit, metric.brief, key[1], (), ValueType.FLOAT, -1, -1)
                self._sampled[key] = series
            yield series, int(value) if metric.integer else value

    def _open(self, series: Series) -> _Stream | None:
        """Return a new stream; ``None`` for a series that repeats another's name.

        OpenTelemetry's names of the machine's metrics are free for an application's as well; torchobs' own are not.
        """
        scope, is_sample = series.scope, series.block < 0  # the attributes of a sample are labels already
        is_ours = scope is not None and series.name in BY_NAME and not series.name.startswith("system.")
        if is_ours:
            return None
        labelled = dict(series.attributes) if is_sample else accepted_names(series.attributes)
        attributes = {**labelled, **self._identity}
        key = scope, series.name, repr(attributes)
        if key in self._taken:
            return None
        self._taken.add(key)
        place = self._place if scope is None else self._place.of_scope(*scope[:3], dict(scope.attributes))
        return _Stream(series, place, attributes)


def _is_quiet(series: Series, value: Value) -> bool:
    """Return whether a series says nothing yet (:class:`~torchobs.catalog.Metric`)."""
    described = BY_NAME.get(series.name) if series.scope is None else None
    return described is not None and described.quiet is not None and value == described.quiet


class Metrics:
    """The data points of all ranks, of the machine, and of the exporter itself."""

    def __init__(self, born_ns: int) -> None:
        """``born_ns``: start of the exporter, Unix ns."""
        self._born_ns = born_ns
        self._sources: dict[Key, _Source] = {}
        more = {"service.version": __version__, "process.pid": os.getpid()}
        place = _exporter_place("torchobs-exporter", str(uuid.uuid4()), more)
        self._exporter = _Source(place, {}, born_ns)
        self._host: _Source | None = None

    def is_new(self, rank: Rank) -> bool:
        """Return whether a rank has not been collected yet."""
        return (rank.incarnation, rank.rank) not in self._sources

    def gone(self, ranks: Iterable[Rank]) -> list[Key]:
        """Return the keys that were collected before and are not among ``ranks``."""
        return [*self._sources.keys() - {(rank.incarnation, rank.rank) for rank in ranks}]

    def collect(
        self, ranks: Iterable[Rank], gone: Iterable[Key], at_ns: int, scrape: ScrapeInput | None = None
    ) -> Iterator[Item]:
        """Yield the points of ``ranks``, the ends of ``gone``, and the exporter's and the machine's points (``scrape``)."""
        for rank in ranks:
            try:
                yield from [*self._of_rank(rank, at_ns)]
            except READ_ERRORS as problem:
                _log.warning("OTLP: metrics of rank %s cannot be made: %s", rank.rank, problem)
        for key in gone:
            yield from self._sources.pop(key).end(at_ns)
        if scrape is not None:
            yield from self._exporter.collect((), exporter_metrics.of_exporter(scrape, {}), at_ns)
            if scrape.host is not None:
                yield from self._of_host(scrape.host, at_ns)

    def _of_host(self, host: HostFacts, at_ns: int) -> Iterator[Item]:
        if self._host is None:  # in Prometheus with a ``job`` of its own, and the host name as ``instance``
            place = _exporter_place("torchobs-host", socket.gethostname(), {"os.type": "linux"})
            self._host = _Source(place, {}, host.booted_ns or self._born_ns)  # it counts since boot
        return self._host.collect((), host.said, at_ns)

    def _of_rank(self, rank: Rank, at_ns: int) -> Iterator[Item]:
        source = self._sources.get((rank.incarnation, rank.rank))
        if source is None:
            header = rank.view.header
            identity = dict(zip(labels.IDENTITY, (rank.job_name, rank.run_id, rank.rank), strict=True))
            source = self._sources[(rank.incarnation, rank.rank)] = _Source(place_of(header), identity, header.wall_ns)
        samples = exporter_metrics.of_rank(rank)
        return source.collect(rank.view.points, samples, at_ns, recent=rank.exemplars, up=rank.up)


class Rings:
    """Reads every rank's event ring, by its own file descriptors: the scanner's belong to another thread. For one thread."""

    def __init__(self, config: ExporterConfig, *, spans: bool) -> None:
        """``spans``: read spans as well."""
        self._directory, self._spans = Directory(config), spans
        self._rings: dict[str, _Ring] = {}
        self._warnings = RateLimiter(_WARN_EVERY_S)

    def read(self, ranks: Iterable[Rank], wall_ns: int) -> tuple[list[Item], list[Item]]:
        """Return the spans and the log records that are new since the last call; drop what is kept of all other ranks."""
        spans: list[Item] = []
        records: list[Item] = []
        served = {rank.incarnation: rank for rank in ranks}
        for incarnation, rank in served.items():
            if incarnation not in self._rings:
                self._rings[incarnation] = _Ring(rank.view.header, spans=self._spans)
            ring = self._rings[incarnation]
            for item in self._fresh(ring, rank):
                with _left_out(rank):
                    ring.add(item, wall_ns, spans, records)
            if not rank.up:
                with _left_out(rank):
                    spans += ring.finish(rank.reason, rank.view.live.heartbeat_ns)
        for incarnation in self._rings.keys() - served.keys():
            self._rings.pop(incarnation).close()
        return spans, records

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.read((), 0)
        self._directory.close()

    def _fresh(self, ring: _Ring, rank: Rank) -> list[Event | events.Span | Late]:
        """Return the records of a rank's ring since the last call, oldest first; nothing if it cannot be read."""
        if rank.view.live.event_head == ring.head:
            return []
        try:
            self._directory.open()
            fresh = ring.read(self._directory)
        except READ_ERRORS as problem:
            ring.close()
            _log.warning("OTLP: events of rank %s cannot be read: %s", rank.rank, problem)
            return []
        is_first, ring.head = not ring.head, rank.view.live.event_head
        if ring.tail.missed and not is_first and self._warnings.take(time.monotonic()):  # at first, another may have read it
            _log.warning("OTLP: rank %s writes more spans and events than its ring holds between two looks", rank.rank)
        return fresh


@contextmanager
def _left_out(rank: Rank) -> Iterator[None]:
    """Drop and log a frame that cannot become a message: its application gave it a time that is no integer."""
    try:
        yield
    except READ_ERRORS as problem:
        _log.warning("OTLP: a span or an event of rank %s cannot be sent: %r", rank.rank, problem)


class _Ring:
    """The ring of one incarnation: its file, and the root span that is open."""

    def __init__(self, header: Header, *, spans: bool) -> None:
        self.tail, self.head = Tail(header.regions[Region.EVENTS].length, header.seed), 0
        """``head``: the end of the ring as it was read last"""
        self._header, self._ids, self._spans = header, SpanIds(header), spans
        self._place = place_of(header)
        self._file: FlightFile | None = None
        self._root: events.Span | None = None
        """the root span that is open"""
        self._root_ids: SpanId = self._ids.run
        self._flags = _SAMPLED

    def read(self, directory: Directory) -> list[Event | events.Span | Late]:
        """Return the new records. Raises ``READ_ERRORS``."""
        name = file_name(self._header)
        if self._file is None:
            self._file = reader.open_file(directory.fd, name, directory.owner)
            if self._file.header != self._header:
                raise ValueError("another file has its name")
        else:
            self._file.follow(directory.fd, name)
        return self._file.fresh_events(self.tail, self._file.live().event_head)

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def add(self, item: Event | events.Span | Late, wall_ns: int, spans: list[Item], records: list[Item]) -> None:
        """Add a span that has ended, or the record of an event; ``wall_ns``: when it was read, Unix ns."""
        if isinstance(item, events.Span):
            if item.name in _ROOTS and item.is_ours:
                fields = item.fields
                self._flags, self._root_ids = fields["flags"] & _SAMPLED, SpanId(fields["trace_id"], fields["span_id"])
                self._root = item if item.ended_ns is None else None
            if item.ended_ns is not None:
                spans += self._span(item, item.ended_ns)
        # points of curves are pushed as a metric
        if isinstance(item, Event) and item.name != catalog.EVENT_SCALARS.name:
            record = self._event(item)
            frame_id = self._header.incarnation + item.position.to_bytes(8, "little")
            uid = uuid.UUID(bytes=blake2b(frame_id, digest_size=16).digest())
            record.attributes.extend(pairs({"log.record.uid": str(uid)}))
            record.observed_time_unix_nano = wall_ns
            records.append(Item(self._place, record))

    def finish(self, reason: str, heartbeat_ns: int | None) -> list[Item]:
        """Return the root span if it is open, as ended at the last heartbeat (CLOCK_MONOTONIC)."""
        root, self._root = self._root, None
        if root is None:
            return []
        end_ns = max(self._header.wall_ns_of(heartbeat_ns or self._header.monotonic_ns), root.begun_ns)
        ended = {"status": "error", "description": f"the rank ended before it: {reason}"}
        if reason == "finished":
            ended = {"status": "unset"}
        return self._span(
            root._replace(attributes={**root.attributes, "reason": reason}, fields={**root.fields, **ended}), end_ns
        )

    def _event(self, record: Event) -> LogRecord:
        """Return the record of an event; its body is a sentence: what happened, the details, sizes and times with units."""
        name, details, step = record.name, record.attributes, record.step
        event, severity = catalog.EVENT_BY_NAME.get(name), catalog.event_severity(name, details)
        attributes, ids = namespaced(name, details) if event else details, self._root_ids
        if step is not None:
            attributes, details, ids = {**attributes, STEP: step}, {**details, "step": step}, self._ids.step(step)
        sentence = event.brief.partition(". ")[0].partition(": ")[0].rstrip(".") if event else name
        values = {key: with_unit(name, key, value) or labels.text(value) for key, value in details.items()}
        words = ", ".join(f"{labels.text(key)} {value}" for key, value in values.items())
        word, number = _SEVERITIES[severity]
        return LogRecord(
            event_name=name,
            severity_text=word,
            severity_number=number,
            body=any_value((f"{sentence}: {words}" if words else sentence)[:_MOST_BODY]),
            attributes=pairs(attributes),
            time_unix_nano=record.time_ns,
            flags=self._flags,
            trace_id=bytes.fromhex(ids.trace),
            span_id=bytes.fromhex(ids.span),
        )

    def _span(self, span: events.Span, ended_ns: int) -> list[Item]:
        """Return the message of a span; none if its trace is not sampled."""
        if not self._spans or not span.fields["flags"] & _SAMPLED:
            return []
        name, version, schema_url, attributes = span.fields["scope"]
        is_ours = name == SCOPE and not version
        place = self._place if is_ours else self._place.of_scope(name, version or "", schema_url or "", attributes or {})
        return [Item(place, _span(span, ended_ns))]


def namespaced(owner: str, attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes of a span or event of the catalog by their names in OTLP.

    That is the name of the semantic conventions where there is one, else one in the namespace of the span or event.
    """
    return {
        _RENAMED.get(key) or (key if _CONVENTIONAL.match(key) else f"{owner}.{key}"): value for key, value in attributes.items()
    }


def _span(span: events.Span, ended_ns: int) -> Span:
    name, attributes, frame = span.name, span.attributes, span.fields
    if span.is_ours and name in _SPANS:
        attributes = namespaced(name, attributes)
    if cut := frame.get("cut"):
        attributes = {**attributes, "torchobs.cut": cut}
    dropped_attributes, dropped_events, dropped_links = frame.get("dropped", (0, 0, 0))
    flags = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | (frame["flags"] & _FLAGS)
    if frame.get("remote"):
        flags |= SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    return Span(
        trace_id=bytes.fromhex(frame["trace_id"]),
        span_id=bytes.fromhex(frame["span_id"]),
        parent_span_id=bytes.fromhex(frame.get("parent", "")),
        trace_state=frame.get("state", ""),
        flags=flags,
        name=name,
        kind=_KINDS[frame["kind"]],
        start_time_unix_nano=span.begun_ns,
        end_time_unix_nano=ended_ns,
        attributes=pairs(attributes),
        dropped_attributes_count=dropped_attributes,
        events=[
            Span.Event(time_unix_nano=at_ns, name=event, attributes=pairs(values), dropped_attributes_count=dropped)
            for at_ns, event, values, dropped in frame.get("events", ())
        ],
        dropped_events_count=dropped_events,
        links=[
            Span.Link(
                trace_id=bytes.fromhex(trace_id),
                span_id=bytes.fromhex(span_id),
                trace_state=state,
                flags=link_flags & _FLAGS,
                attributes=pairs(values),
                dropped_attributes_count=dropped,
            )
            for trace_id, span_id, link_flags, state, values, dropped in frame.get("links", ())
        ],
        dropped_links_count=dropped_links,
        status=Status(code=_STATUSES[frame["status"]], message=frame.get("description", "")),
    )
