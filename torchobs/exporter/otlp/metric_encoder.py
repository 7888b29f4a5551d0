"""Points, and the requests that they make: at most so many and so large that any receiver takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    DataPointFlags,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Exemplar as Message

from torchobs.catalog import Kind
from torchobs.exporter.otlp import attributes as otlp_attributes
from torchobs.flight.reader.decode import Distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    from torchobs.flight.format.series import Scope, Series
    from torchobs.flight.reader.decode import Value
    from torchobs.ranks.exemplars import Exemplar

MOST_POINTS = 5_000
MOST_BYTES = 2 * 1024**2
"""Of one request: gRPC receivers take 4 MiB unless told otherwise, and this is counted a little short."""

_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
_SUMS = frozenset({Kind.COUNTER, Kind.HISTOGRAM})
_POINT_BYTES, _EXEMPLAR_BYTES = 48, 80
_NONE: Mapping[int, Exemplar] = {}
_DATA = {Kind.COUNTER: "sum", Kind.UPDOWN: "sum", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
_Key = tuple[str, Kind, str, str]


class PushedSeries:
    """One series and what was sent of it."""

    __slots__ = ("_known", "_previous", "_since_ns", "_size", "_template", "key", "series", "shown", "survives")

    def __init__(self, series: Series, attributes: Iterable[tuple[str, object]], *, survives: bool, known: bool) -> None:
        """``known``: an exporter before this one may have sent what it counted so far."""
        self.series, self.survives = series, survives
        self.key: _Key = (series.name, series.kind, series.unit, series.brief)
        self.shown = False
        """whether the last point that was sent has a value, which stands until another says that it has ended"""
        # as bytes: a message that is kept costs half a KiB of its own arena, and each stream would keep five
        self._template = _template(series, attributes)
        self._size = len(self._template) + _POINT_BYTES + 8 * len(series.bounds)
        self._previous: Value | None = None
        self._since_ns = 0
        self._known = known

    def add_to(
        self, requests: Requests, value: Value, start_ns: int, at_ns: int, shown: Mapping[int, Exemplar] = _NONE
    ) -> None:
        """Add the point of a value that began to count at ``start_ns``; ``shown``: exemplars by bucket."""
        if isinstance(value, Distribution) is not (self.series.kind is Kind.HISTOGRAM):
            return
        if requests.delta and self.series.kind in _SUMS:
            self._add_delta(requests, value, start_ns, at_ns, shown)
            return
        start_ns = 0 if self.series.kind is Kind.GAUGE else start_ns
        self._add(requests, start_ns, at_ns, _filled(value, signed=_is_signed(value)) | _exemplars(value, shown, start_ns))
        self.shown = True

    def end(self, requests: Requests, at_ns: int) -> None:
        """Add the point that says that there is no value any more."""
        self.shown = False
        filled: dict[str, Any] = {"flags": _NO_VALUE}
        if self.series.kind is Kind.HISTOGRAM:  # Prometheus ends the series that the point has, bucket by bucket
            filled |= {"bucket_counts": [0] * (len(self.series.bounds) + 1), "sum": 0.0}
        self._add(requests, 0, at_ns, filled)

    def _add_delta(self, requests: Requests, value: Value, start_ns: int, at_ns: int, shown: Mapping[int, Exemplar]) -> None:
        previous, known = self._previous, self._known
        since_ns = min(self._since_ns or start_ns, at_ns)  # set back, the wall clock must not make all that follows of tomorrow
        self._previous, self._since_ns, self._known = value, at_ns, False
        grown = None if known else _grown(value, previous)
        if grown is not None:
            self._add(requests, since_ns, at_ns, _filled(grown, signed=_is_signed(value)) | _exemplars(grown, shown, since_ns))

    def _add(self, requests: Requests, start_ns: int, at_ns: int, filled: Mapping[str, Any]) -> None:
        points = requests.points_of(self, self._size + _EXEMPLAR_BYTES * len(filled.get("exemplars", ())))
        point = points.add(start_time_unix_nano=start_ns, time_unix_nano=at_ns, **filled)
        point.MergeFromString(self._template)


def _template(series: Series, attributes: Iterable[tuple[str, object]]) -> bytes:
    """Return what all points of a series have in common."""
    pairs = otlp_attributes.key_values(attributes)
    if series.kind is Kind.HISTOGRAM:
        return bytes(HistogramDataPoint(attributes=pairs, explicit_bounds=series.bounds).SerializeToString())
    return bytes(NumberDataPoint(attributes=pairs).SerializeToString())


def _is_signed(value: Value) -> bool:
    """Return True if a histogram has observed negative values: then its sum is no counter, and OTLP wants none."""
    return isinstance(value, Distribution) and value.least is not None and value.least < 0


def _filled(value: Value, *, signed: bool) -> dict[str, Any]:
    if not isinstance(value, Distribution):
        return {"as_int" if isinstance(value, int) else "as_double": value}
    filled: dict[str, Any] = {"count": sum(value.counts), "bucket_counts": value.counts}
    given = {"sum": None if signed else value.sum, "min": value.least, "max": value.greatest}
    return filled | {name: number for name, number in given.items() if number is not None}


def _exemplars(value: Value, shown: Mapping[int, Exemplar], since_ns: int) -> dict[str, Any]:
    """Return those of the buckets that have grown since."""
    if not shown or not isinstance(value, Distribution):
        return {}
    newer = (one for index, one in shown.items() if value.counts[index] and one.at_ns >= since_ns)
    return {"exemplars": [_exemplar(one) for one in newer]}


def _exemplar(one: Exemplar) -> Message:
    return Message(
        filtered_attributes=otlp_attributes.key_values([("step", one.step)]),
        time_unix_nano=one.at_ns,
        as_double=one.value,
        trace_id=bytes.fromhex(one.trace_id),
        span_id=bytes.fromhex(one.span_id),
    )


def _grown(value: Value, previous: Value | None) -> Value | None:
    """Return by how much a value has grown; ``None`` if it has not, and was sent before."""
    if isinstance(value, Distribution):
        before = previous if isinstance(previous, Distribution) else None
        return value if before is None else _grown_distribution(value, before)
    grown = value - previous if isinstance(previous, (int, float)) else value
    return grown if grown or previous is None else None


def _grown_distribution(value: Distribution, before: Distribution) -> Distribution | None:
    if value.counts == before.counts:
        return None
    counts = tuple(now - then for now, then in zip(value.counts, before.counts, strict=True))
    # a new record of all time was set in between; otherwise the least of the interval is not known
    least = value.least if before.least is None or (value.least is not None and value.least < before.least) else None
    most = value.greatest
    greatest = most if before.greatest is None or (most is not None and most > before.greatest) else None
    return Distribution(counts, value.sum - before.sum, least, greatest)


class Requests:
    """Requests in the making, for one push. ``done`` are (serialised request, its points)."""

    def __init__(self, *, delta: bool) -> None:
        self.delta = delta
        self.done: list[tuple[bytes, int]] = []
        self._resource: Resource | None = None
        self._request, self._points, self._bytes = ExportMetricsServiceRequest(), 0, 0
        self._of: ResourceMetrics | None = None
        self._scopes: dict[Scope | None, ScopeMetrics] = {}
        self._metrics: dict[tuple[Scope | None, _Key], Metric] = {}

    def begin(self, resource: Resource) -> None:
        """Let the following points be of this resource."""
        if resource is not self._resource:
            self._resource, self._of = resource, None
            self._scopes, self._metrics = {}, {}

    def finish(self) -> list[tuple[bytes, int]]:
        """Return the requests. Of use once."""
        self._cut()
        return self.done

    def points_of(self, stream: PushedSeries, size: int) -> Any:
        """Return the points of that stream's metric, for one of so many bytes to be added."""
        if self._points >= MOST_POINTS or (self._points and self._bytes + size > MOST_BYTES):
            self._cut()
        self._points += 1
        self._bytes += size
        key = stream.series.scope, stream.key
        metric = self._metrics.get(key)
        if metric is None:
            metric = self._metrics[key] = self._new_metric(stream)
        return getattr(metric, _DATA[stream.series.kind]).data_points

    def _new_metric(self, stream: PushedSeries) -> Metric:
        name, kind, unit, brief = stream.key
        self._bytes += len(name) + len(unit) + len(brief) + 16
        metric: Metric = self._scope(stream.series.scope).metrics.add(name=name, unit=unit, description=brief)
        temporality = _DELTA if self.delta and kind in _SUMS else _CUMULATIVE
        if kind is Kind.HISTOGRAM:
            metric.histogram.aggregation_temporality = temporality
        elif kind is not Kind.GAUGE:
            metric.sum.aggregation_temporality = temporality
            metric.sum.is_monotonic = kind is Kind.COUNTER
        return metric

    def _scope(self, scope: Scope | None) -> ScopeMetrics:
        found = self._scopes.get(scope)
        if found is None:
            if self._of is None:
                self._of = self._request.resource_metrics.add(resource=self._resource)
                self._bytes += self._of.ByteSize()
            found = self._scopes[scope] = self._of.scope_metrics.add()
            if scope is None:
                found.scope.CopyFrom(
                    otlp_attributes.scope(otlp_attributes.SCOPE, otlp_attributes.version_of(self._of.resource))
                )
            else:
                found.scope.CopyFrom(otlp_attributes.scope(scope.name, scope.version, scope.attributes))
                found.schema_url = scope.schema_url
        return found

    def _cut(self) -> None:
        if self._points:
            self.done.append((self._request.SerializeToString(), self._points))
        self._request, self._points, self._bytes = ExportMetricsServiceRequest(), 0, 0
        self._of, self._scopes, self._metrics = None, {}, {}
