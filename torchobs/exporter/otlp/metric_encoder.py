"""Metric data points and the requests that hold them, limited to a size that every receiver accepts.

Data points and their encoding are the SDK's. Neither supports the flag *no recorded value*, which ends a series: such points
are encoded separately, flagged, and appended to the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint as NumberMessage
from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from torchobs.catalog import Kind
from torchobs.exporter.otlp import attributes as otlp_attributes
from torchobs.exporter.otlp.request_size import MOST_BYTES
from torchobs.flight.reader.decode import Distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from torchobs.flight.format.series import Series
    from torchobs.flight.reader.decode import Value
    from torchobs.ranks.exemplars import Exemplar

MOST_POINTS = 5_000

_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_SUMS = frozenset({Kind.COUNTER, Kind.HISTOGRAM})
_POINT_BYTES, _ATTRIBUTE_BYTES, _EXEMPLAR_BYTES = 48, 8, 80
_INT64, _FIXED64 = 1 << 63, 1 << 64
_NONE: Mapping[int, Exemplar] = {}
_Key = tuple[str, Kind, str, str]
_Point = NumberDataPoint | HistogramDataPoint
_histogram: Callable[..., HistogramDataPoint] = HistogramDataPoint
"""Untyped: its annotations forbid ``None``, which the encoder accepts and leaves out"""


class PushedSeries:
    """One series and the value that was last sent."""

    __slots__ = ("_attributes", "_known", "_previous", "_since_ns", "_size", "is_open", "key", "scope", "series", "survives")

    def __init__(
        self, series: Series, scope: InstrumentationScope, attributes: Iterable[tuple[str, object]], *,
        survives: bool, known: bool,
    ) -> None:  # fmt: skip
        """``known``: an earlier exporter may have sent what the series counted so far."""
        self.series, self.scope, self.survives = series, scope, survives
        name = otlp_attributes.metric_name(series.name, series.unit, series.kind)
        self.key: _Key = (name, series.kind, series.unit, series.brief)
        self.is_open = False
        """whether the last point sent has a value, which receivers keep until a point ends the series"""
        self._attributes = otlp_attributes.cleaned(attributes)
        texts = sum(len(name) + len(str(value)) + _ATTRIBUTE_BYTES for name, value in self._attributes.items())
        self._size = _POINT_BYTES + texts + 16 * len(series.bounds)
        self._previous: Value | None = None
        self._since_ns = 0
        self._known = known

    def add_to(
        self, requests: Requests, value: Value, start_ns: int, at_ns: int, exemplars: Mapping[int, Exemplar] = _NONE
    ) -> None:
        """Add the point of a value counted since ``start_ns``; ``exemplars``: by bucket."""
        if isinstance(value, Distribution) is not (self.series.kind is Kind.HISTOGRAM):
            return
        # a histogram that has observed negative values has a sum that is not monotonic, and OTLP forbids it then
        has_sum = not (isinstance(value, Distribution) and value.least is not None and value.least < 0)
        if not requests.delta or self.series.kind not in _SUMS:
            self.is_open = True
            self._add(requests, value, start_ns, at_ns, exemplars, has_sum=has_sum)
            return
        previous, known = self._previous, self._known
        since_ns = min(self._since_ns or start_ns, at_ns)  # a wall clock set back must not give a start after the end
        self._previous, self._since_ns, self._known = value, at_ns, False
        grown = None if known else _grown(value, previous)
        if grown is not None:
            self._add(requests, grown, since_ns, at_ns, exemplars, has_sum=has_sum)

    def end(self, requests: Requests, at_ns: int) -> None:
        """Add the point that ends the series (*no recorded value*)."""
        self.is_open = False
        if self.series.kind is Kind.HISTOGRAM:  # Prometheus ends only the buckets that the point has
            counts = (0,) * (len(self.series.bounds) + 1)
            ended: _Point = _histogram(self._attributes, 0, at_ns, 0, 0.0, counts, self.series.bounds, None, None)
        else:
            ended = NumberDataPoint(self._attributes, 0, at_ns, 0)
        requests.add(self, ended, self._size, ends=True)

    def _add(
        self, requests: Requests, value: Value, start_ns: int, at_ns: int, exemplars: Mapping[int, Exemplar], *, has_sum: bool
    ) -> None:
        if not isinstance(value, Distribution):
            number = value if abs(value) < _INT64 else float(value)  # beyond the range of OTLP's integers
            requests.add(self, NumberDataPoint(self._attributes, start_ns, at_ns, number), self._size)
            return
        count, recent = sum(value.counts), _exemplars(value, exemplars, start_ns)
        if count >= _FIXED64:
            return  # only a forged file has such a count
        total = value.sum if has_sum else None
        given = (start_ns, at_ns, count, total, value.counts, self.series.bounds, value.least, value.greatest, recent)
        point = _histogram(self._attributes, *given)
        requests.add(self, point, self._size + _EXEMPLAR_BYTES * len(recent))


def _exemplars(value: Distribution, exemplars: Mapping[int, Exemplar], since_ns: int) -> list[SdkExemplar]:
    """Return the exemplars of the buckets that have grown since ``since_ns``."""
    return [
        SdkExemplar({"step": one.step}, one.value, one.at_ns, int(one.span_id, 16), int(one.trace_id, 16))
        for index, one in exemplars.items()
        if value.counts[index] and one.at_ns >= since_ns
    ]


def _grown(value: Value, previous: Value | None) -> Value | None:
    """Return the increase of a value; ``None`` if there is none and the value was sent before."""
    if isinstance(value, Distribution):
        before = previous if isinstance(previous, Distribution) else None
        return value if before is None else _grown_distribution(value, before)
    grown = value - previous if isinstance(previous, (int, float)) else value
    return grown if grown or previous is None else None


def _grown_distribution(value: Distribution, before: Distribution) -> Distribution | None:
    if value.counts == before.counts:
        return None
    counts = tuple(now - then for now, then in zip(value.counts, before.counts, strict=True))
    # only totals are known: the interval's minimum (maximum) is known only if it is a new one of the whole run
    least = value.least if before.least is None or (value.least is not None and value.least < before.least) else None
    most = value.greatest
    greatest = most if before.greatest is None or (most is not None and most > before.greatest) else None
    return Distribution(counts, value.sum - before.sum, least, greatest)


_Scopes = dict["InstrumentationScope", dict[_Key, list[_Point]]]
_Collected = dict[Resource, _Scopes]


class Requests:
    """Builds the requests of one push. ``done``: (serialised request, its number of points)."""

    def __init__(self, *, delta: bool) -> None:
        self.delta = delta
        self.done: list[tuple[bytes, int]] = []
        self._resource = Resource({})
        self._scopes: dict[bool, _Scopes] = {}
        """of the current resource, because hashing a resource for every point takes too long"""
        self._collected: tuple[_Collected, _Collected] = {}, {}
        """points with values, and points that end a series"""
        self._points = self._bytes = 0

    def begin(self, resource: Resource) -> None:
        """Assign the following points to this resource."""
        self._resource, self._scopes = resource, {}

    def finish(self) -> list[tuple[bytes, int]]:
        """Return the requests. Call it once."""
        self._cut()
        return self.done

    def add(self, stream: PushedSeries, point: _Point, size: int, *, ends: bool = False) -> None:
        """Add a point of about ``size`` bytes, as estimated, to its metric; ``ends``: it ends the series."""
        if self._points >= MOST_POINTS or (self._points and self._bytes + size > MOST_BYTES):
            self._cut()
        self._points += 1
        self._bytes += size
        scopes = self._scopes.get(ends)
        if scopes is None:  # two sources may have one resource: a rank whose label changed
            scopes = self._scopes[ends] = self._collected[ends].setdefault(self._resource, {})
        scopes.setdefault(stream.scope, {}).setdefault(stream.key, []).append(point)

    def _cut(self) -> None:
        if self._points:
            request, ended = (encode_metrics(self._as_data(points)) for points in self._collected)
            for point in _points_of(ended):
                point.flags = _NO_VALUE
                if isinstance(point, NumberMessage):
                    point.ClearField("as_int")
            request.MergeFrom(ended)
            self.done.append((request.SerializeToString(), self._points))
        self._collected, self._scopes, self._points, self._bytes = ({}, {}), {}, 0, 0

    def _as_data(self, collected: _Collected) -> MetricsData:
        return MetricsData(
            [
                ResourceMetrics(resource, [self._of_scope(scope, metrics) for scope, metrics in scopes.items()], "")
                for resource, scopes in collected.items()
            ]
        )

    def _of_scope(self, scope: InstrumentationScope, metrics: dict[_Key, list[_Point]]) -> ScopeMetrics:
        parts = metrics.items()
        encoded = [Metric(name, brief, unit, self._of_kind(kind, points)) for (name, kind, unit, brief), points in parts]
        return ScopeMetrics(scope, encoded, scope.schema_url or "")

    def _of_kind(self, kind: Kind, points: list[Any]) -> Gauge | Histogram | Sum:
        temporality = AggregationTemporality.DELTA if self.delta and kind in _SUMS else AggregationTemporality.CUMULATIVE
        if kind is Kind.GAUGE:
            return Gauge(points)
        return Histogram(points, temporality) if kind is Kind.HISTOGRAM else Sum(points, temporality, kind is Kind.COUNTER)


def _points_of(request: ExportMetricsServiceRequest) -> Iterator[Any]:
    for of_resource in request.resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                yield from getattr(metric, metric.WhichOneof("data")).data_points
