"""Metrics as OTLP's data points: OpenTelemetry's names and instrument kinds, one resource per incarnation.

Points carry ``job_name``, ``run_id`` and ``rank``, as the series of the metrics page do. When a stream has no value any more (a
gauge that is not finite, the state of a rank that has ended, a rank whose grace period is over), one point with the flag
*no recorded value* is sent, at which Prometheus ends the series.

**Delta temporality.** A point counts the increase since the last one. An exporter cannot know what an earlier exporter has
sent. For a rank older than itself it therefore counts from its first look on, as the Collector's cumulativetodelta processor
does; likewise for a rank that returns, or whose label changes, because its earlier counts were sent.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from typing import TYPE_CHECKING

from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags, HistogramDataPoint, NumberDataPoint
from opentelemetry.proto.metrics.v1.metrics_pb2 import Exemplar as ExemplarMessage
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from torchobs._version import __version__
from torchobs.catalog import BY_NAME, UNNAMED, Kind, cumulative, prometheus_name
from torchobs.exporter import exporter_metrics
from torchobs.exporter.otlp import messages
from torchobs.exporter.otlp.messages import Item, MetricKey
from torchobs.exporter.prometheus.name_registry import COMMON_METRICS, EXPORTER_S
from torchobs.flight.format.series import Scope, Series, ValueType
from torchobs.flight.reader.decode import Distribution
from torchobs.flight.reader.reader import MAX_FILES
from torchobs.ranks import exemplars, labels
from torchobs.ranks.exemplars import NONE
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torchobs.exporter.exporter_metrics import HostFacts, Sample, ScrapeInput
    from torchobs.exporter.otlp.messages import Place
    from torchobs.flight.reader.decode import Value
    from torchobs.ranks.exemplars import Exemplar, Shown
    from torchobs.ranks.snapshot import Rank

OLDER_NS = 10_000_000_000
"""A rank this much older than the exporter was served by an earlier exporter; a node's first rank starts its own exporter."""

_BEFORE_NS = 1_000_000
"""Time between a stream's last value and its end: Prometheus' timestamps are in milliseconds."""
_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_INT64, _FIXED64 = 1 << 63, 1 << 64

_log = logging.getLogger(__name__)

Key = tuple[str, str]
"""A rank's incarnation and label: when a second process claims the same rank, the labels of both change."""


def key_of(rank: Rank) -> Key:
    """Return the key of a rank's streams."""
    return rank.incarnation, rank.rank


class _Stream:
    """One series and the value that was last sent."""

    __slots__ = ("_attributes", "_is_older", "_place", "_previous", "_since_ns", "is_open", "metric", "series", "survives")

    def __init__(
        self, series: Series, place: Place, attributes: Iterable[tuple[str, object]], *, delta: bool, is_older: bool
    ) -> None:
        """``is_older``: an earlier exporter may have sent what the series counted so far."""
        self.series, self._place, self._is_older = series, place, is_older
        is_unnamed = prometheus_name(series.name, series.unit, series.kind) == UNNAMED  # which Prometheus would refuse
        name, has_delta = UNNAMED if is_unnamed else series.name, delta and cumulative(series.kind)
        self.metric = MetricKey(name, series.kind, series.unit, series.brief, has_delta)
        described = BY_NAME.get(series.name) if series.scope is None else None
        self.survives = cumulative(series.kind) or (described is not None and described.survives)
        self.is_open = False
        """whether the last point sent has a value, which receivers keep until a point ends the series"""
        self._attributes = messages.pairs(attributes)
        self._previous: Value | None = None
        self._since_ns = 0

    def point(self, value: Value, start_ns: int, at_ns: int, recent: Mapping[int, Exemplar]) -> Iterator[Item]:
        """Yield the point of a value counted since ``start_ns``, if there is one; ``recent``: exemplars by bucket."""
        if isinstance(value, Distribution) is not (self.series.kind is Kind.HISTOGRAM):
            return
        # a histogram that has observed negative values has a sum that is not monotonic, and OTLP forbids it then
        has_sum = isinstance(value, Distribution) and not (value.least is not None and value.least < 0)
        if self.metric.delta:
            previous, is_older = self._previous, self._is_older
            start_ns = min(self._since_ns or start_ns, at_ns)  # a wall clock set back must not give a start after the end
            self._previous, self._since_ns, self._is_older = value, at_ns, False
            grown = None if is_older else _grown(value, previous)
            if grown is None:
                return
            value = grown
        else:
            self.is_open = True
        yield Item(self._place, self._message(value, start_ns, at_ns, recent, has_sum=has_sum), self.metric)

    def end(self, at_ns: int) -> Item:
        """Return the point that ends the series (*no recorded value*)."""
        self.is_open = False
        if self.series.kind is Kind.HISTOGRAM:  # Prometheus ends only the buckets and the sum that the point has
            nothing = Distribution((0,) * (len(self.series.bounds) + 1), 0.0, None, None)
            point = self._message(nothing, 0, at_ns, {}, has_sum=True)
        else:
            point = NumberDataPoint(attributes=self._attributes, time_unix_nano=at_ns)
        point.flags = _NO_VALUE
        return Item(self._place, point, self.metric)

    def _message(
        self, value: Value, start_ns: int, at_ns: int, recent: Mapping[int, Exemplar], *, has_sum: bool
    ) -> HistogramDataPoint | NumberDataPoint:
        if not isinstance(value, Distribution):
            number = NumberDataPoint(attributes=self._attributes, time_unix_nano=at_ns)
            if self.series.kind is not Kind.GAUGE:
                number.start_time_unix_nano = start_ns
            if isinstance(value, int) and abs(value) < _INT64:
                number.as_int = value
            else:
                number.as_double = value
            return number
        return HistogramDataPoint(
            attributes=self._attributes,
            start_time_unix_nano=start_ns,
            time_unix_nano=at_ns,
            count=min(sum(value.counts), _FIXED64 - 1),  # only a forged file has more
            sum=value.sum if has_sum else None,
            bucket_counts=value.counts,
            explicit_bounds=self.series.bounds,
            min=value.least,
            max=value.greatest,
            exemplars=[
                ExemplarMessage(
                    filtered_attributes=messages.pairs([("step", exemplar.step)]),
                    time_unix_nano=exemplar.at_ns,
                    as_double=exemplar.value,
                    span_id=bytes.fromhex(exemplar.span_id),
                    trace_id=bytes.fromhex(exemplar.trace_id),
                )
                for index, exemplar in recent.items()
                if value.counts[index] and exemplar.at_ns >= start_ns  # its bucket has grown since
            ],
        )


def _grown(value: Value, previous: Value | None) -> Value | None:
    """Return the increase of a value; ``None`` if there is none and the value was sent before."""
    if previous is None:
        return value
    if isinstance(value, Distribution) and isinstance(previous, Distribution):
        if value.counts == previous.counts:
            return None
        counts = tuple(now - then for now, then in zip(value.counts, previous.counts, strict=True))
        # only totals are counted: of the interval, the least (greatest) is clear only if it is a new one of the whole run
        least = value.least if value.least != previous.least else None
        greatest = value.greatest if value.greatest != previous.greatest else None
        return Distribution(counts, value.sum - previous.sum, least, greatest)
    if isinstance(value, Distribution) or isinstance(previous, Distribution):
        return value
    return value - previous or None


class _Source:
    """The streams of one resource: a rank's incarnation, the host, or the exporter itself."""

    def __init__(
        self, own_place: Place, identity: Mapping[str, str], born_ns: int, limit: int, *, is_older: bool, delta: bool
    ) -> None:
        """``is_older``: it counted before this exporter started, and an earlier one may have sent that."""
        self._own_place, self._identity, self._born_ns, self._limit = own_place, identity, born_ns, limit
        self._is_older, self._delta = is_older, delta
        self._streams: dict[Series, _Stream | None] = {}
        self._sampled: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._places: dict[Scope | None, Place] = {None: own_place}
        self._taken: set[tuple[Scope | None, str, str]] = set()
        self._up = False

    def collect(
        self, points: Iterable[tuple[Series, Value]], samples: Iterable[Sample], at_ns: int, *,
        recent: Shown = NONE, up: bool = True,
    ) -> Iterator[Item]:  # fmt: skip
        """Yield the points of all series that have a value, and end the streams of those that have none any more.

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
            if stream is None or stream in valued:
                continue
            if up or stream.survives:
                valued.add(stream)
                yield from stream.point(value, self._born_ns, at_ns, exemplars.of(series, recent))
            elif has_just_ended:
                yield from stream.point(value, self._born_ns, at_ns - _BEFORE_NS, {})
        yield from self.end(at_ns, valued)
        self._is_older = False

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
        """Return a new stream; ``None`` beyond the limit, for a forged series, and for one that repeats another's name."""
        if len(self._taken) >= self._limit or _is_forged(series):
            return None
        is_sample = series.block < 0  # its attributes are labels already
        labelled = dict(series.attributes) if is_sample else messages.accepted_names(series.attributes)
        attributes = {**labelled, **self._identity}
        key = series.scope, series.name, repr(attributes)
        if key in self._taken:
            return None
        self._taken.add(key)
        scope = series.scope
        if scope is not None and scope not in self._places:
            self._places[scope] = messages.place_of(self._own_place.resource, *scope[:3], dict(scope.attributes))
        return _Stream(series, self._places[scope], attributes.items(), delta=self._delta, is_older=self._is_older)


def _is_forged(series: Series) -> bool:
    """Return whether a file has a metric of the exporter's own, or an application's metric has a name of ours."""
    described = BY_NAME.get(series.name)
    if described is None or series.block < 0:
        return False
    if described in COMMON_METRICS:  # OpenTelemetry's names, which an application may use as well
        return series.scope is None
    return described in EXPORTER_S or series.scope is not None


def _is_quiet(series: Series, value: Value) -> bool:
    """Return whether a series says nothing yet (:class:`~torchobs.catalog.Metric`)."""
    described = BY_NAME.get(series.name) if series.scope is None else None
    return described is not None and described.quiet is not None and value == described.quiet


class Metrics:
    """The data points of all ranks, of the machine, and of the exporter itself."""

    def __init__(self, *, delta: bool, series_limit: int, born_ns: int) -> None:
        """``born_ns``: start of the exporter, Unix ns."""
        self._delta, self._limit, self._born_ns = delta, series_limit, born_ns
        self._sources: dict[Key, _Source] = {}
        self._collected: dict[str, None] = {}
        """incarnations with metrics collected so far, least recently collected first"""
        more: dict[str, str | int] = {"service.version": __version__, "process.pid": os.getpid()}
        self._exporter = self._source(_place("torchobs-exporter", str(uuid.uuid4()), more), {}, born_ns, is_older=False)
        self._host: _Source | None = None

    def unknown(self, ranks: Iterable[Rank]) -> list[Rank]:
        """Return the ranks that have not been collected yet."""
        return [rank for rank in ranks if key_of(rank) not in self._sources]

    def gone(self, ranks: Iterable[Rank]) -> list[Key]:
        """Return the keys that were collected before and are not among ``ranks``."""
        return [*self._sources.keys() - {key_of(rank) for rank in ranks}]

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
            place = _place("torchobs-host", socket.gethostname(), {"os.type": "linux"})
            self._host = self._source(place, {}, host.booted_ns or self._born_ns, is_older=True)  # it counts since boot
        return self._host.collect((), host.said, at_ns)

    def _of_rank(self, rank: Rank, at_ns: int) -> Iterator[Item]:
        source = self._sources.get(key_of(rank))
        if source is None:
            header = rank.view.header
            identity = dict(zip(labels.IDENTITY, (rank.job_name, rank.run_id, rank.rank), strict=True))
            is_older = rank.incarnation in self._collected or header.wall_ns < self._born_ns - OLDER_NS
            place = messages.own_place(messages.resource_of(header), header.resource.get("torchobs_version"))
            source = self._sources[key_of(rank)] = self._source(place, identity, header.wall_ns, is_older=is_older)
        self._remember(rank.incarnation)
        samples = exporter_metrics.of_rank(rank)
        return source.collect(rank.view.points, samples, at_ns, recent=rank.exemplars, up=rank.up)

    def _source(self, place: Place, identity: Mapping[str, str], born_ns: int, *, is_older: bool) -> _Source:
        return _Source(place, identity, born_ns, self._limit, is_older=is_older, delta=self._delta)

    def _remember(self, incarnation: str) -> None:
        """Note that a rank was collected: it may return, or change its label, after its source was deleted."""
        self._collected.pop(incarnation, None)
        self._collected[incarnation] = None
        if len(self._collected) > MAX_FILES:
            del self._collected[next(iter(self._collected))]


def _place(service: str, instance: str, more: Mapping[str, str | int]) -> Place:
    """Return the place of what the exporter measures itself."""
    attributes = {
        "service.name": service,
        "service.instance.id": instance,
        "host.name": socket.gethostname(),
        "telemetry.sdk.name": messages.SCOPE,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
        **more,
    }
    return messages.own_place(Resource(attributes=messages.pairs(attributes.items())))
