"""OTLP metric streams of one resource: OpenTelemetry's names and instrument kinds, one resource per incarnation.

Points carry ``job_name``, ``run_id`` and ``rank``, as the series of the metrics page do. When a stream has no value any more (a
gauge that is not finite, the state of a rank that has ended, a rank whose grace period is over), one point with the flag
*no recorded value* is sent, at which Prometheus ends the series.

**Delta temporality.** A point counts the increase since the last one. An exporter cannot know what an earlier exporter has
sent. For a rank older than itself it therefore counts from its first look on, as the Collector's cumulativetodelta processor
does; likewise for a rank that returns, or whose label changes, because its earlier counts were sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.catalog import BY_NAME, cumulative
from torchobs.exporter.otlp import attributes as otlp_attributes
from torchobs.exporter.otlp.metric_encoder import PushedSeries
from torchobs.exporter.prometheus.name_registry import COMMON_METRICS, EXPORTER_S
from torchobs.flight.format.series import Scope, Series, ValueType
from torchobs.ranks import exemplars
from torchobs.ranks.exemplars import NONE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from torchobs.exporter.exporter_metrics import Sample
    from torchobs.exporter.otlp.metric_encoder import Requests
    from torchobs.flight.reader.decode import Value
    from torchobs.ranks.exemplars import Shown

_BEFORE_NS = 1_000_000
"""Time between a stream's last value and its end: Prometheus' timestamps are in milliseconds."""


class Source:
    """The metric streams of one resource: a rank's incarnation, the host, or the exporter itself."""

    def __init__(self, resource: Resource, identity: Mapping[str, str], born_ns: int, limit: int, *, known: bool) -> None:
        """``known``: it counted before this exporter started, and an earlier one may have sent that."""
        self._resource, self._identity, self._born_ns, self._limit = resource, identity, born_ns, limit
        self._known = known
        self._streams: dict[int, PushedSeries | None] = {}
        self._own_series: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._by_series: dict[Series, PushedSeries] = {}
        self._kept: list[Series] = []
        self._scopes: dict[Scope | None, InstrumentationScope] = {}
        self._taken: set[tuple[Scope | None, str, str]] = set()
        self._up = False
        self.opened = 0

    def reopened(self, opened: int) -> None:
        """Drop cached lookups by series: reopening the file creates new objects for the same series."""
        if opened != self.opened:
            self.opened = opened
            self._streams.clear()
            self._kept.clear()

    def add_to(
        self, requests: Requests, points: Iterable[tuple[Series, Value]], samples: Iterable[Sample], at_ns: int, *,
        recent: Shown = NONE, up: bool = True,
    ) -> None:  # fmt: skip
        """Add the points of all series that have a value, and end the streams of those that have none any more.

        ``recent``: the rank's exemplars.

        A gauge of a rank that has just ended gets both points: its last value, which may not have been sent yet, and its end.
        """
        requests.begin(self._resource)
        at_ns = max(at_ns, self._born_ns)  # the wall clock may have been set back
        seen: set[PushedSeries] = set()
        has_just_ended, self._up = self._up and not up, up
        for series, value in (*points, *self._as_series(samples)):
            if id(series) not in self._streams and _is_quiet(series, value):
                continue  # what it counts first is exact all the same: a point says since when it counts
            stream = self._stream(series)
            if stream is None or stream in seen:
                continue
            if up or stream.survives:
                seen.add(stream)
                stream.add_to(requests, value, self._born_ns, at_ns, exemplars.of(series, recent))
            elif has_just_ended:
                stream.add_to(requests, value, self._born_ns, at_ns - _BEFORE_NS)
        self.end(requests, at_ns, seen)
        self._known = False

    def end(self, requests: Requests, at_ns: int, seen: Collection[PushedSeries] = ()) -> None:
        """End all streams except ``seen``."""
        requests.begin(self._resource)
        for stream in self._by_series.values():
            if stream.is_open and stream not in seen:
                stream.end(requests, at_ns)

    def _as_series(self, samples: Iterable[Sample]) -> Iterator[tuple[Series, Value]]:
        for metric, attributes, value in samples:
            key = metric.name, tuple(sorted(attributes.items()))
            series = self._own_series.get(key)
            if series is None:
                series = Series(metric.name, metric.kind, metric.unit, metric.brief, key[1], (), ValueType.FLOAT, -1, -1)
                self._own_series[key] = series
            yield series, int(value) if metric.integer else value

    def _stream(self, series: Series) -> PushedSeries | None:
        if id(series) not in self._streams:
            self._kept.append(series)  # keeps it alive, so that no other object gets its id
            self._streams[id(series)] = self._open(series)
        return self._streams[id(series)]

    def _open(self, series: Series) -> PushedSeries | None:
        stream = self._by_series.get(series)
        if stream is None and len(self._taken) < self._limit and not _is_forged(series):
            is_exporter_s = series.block < 0  # its attributes are labels already
            given = dict(series.attributes) if is_exporter_s else otlp_attributes.named(series.attributes)
            own = {**given, **self._identity}
            key = series.scope, series.name, repr(own)
            if key not in self._taken:
                self._taken.add(key)
                scope, survives = self._scope(series.scope), _survives(series)
                stream = PushedSeries(series, scope, own.items(), survives=survives, known=self._known)
                self._by_series[series] = stream
        return stream

    def _scope(self, given: Scope | None) -> InstrumentationScope:
        if given not in self._scopes:
            self._scopes[given] = otlp_attributes.own_scope(self._resource) if given is None else otlp_attributes.scope(*given)
        return self._scopes[given]


def _is_forged(series: Series) -> bool:
    """Return True if a file has a metric of the exporter's own, or an application's metric has a name of ours."""
    known = BY_NAME.get(series.name)
    if known is None or series.block < 0:
        return False
    if known in COMMON_METRICS:  # OpenTelemetry's names, which an application may use as well
        return series.scope is None
    return known in EXPORTER_S or series.scope is not None


def _is_quiet(series: Series, value: Value) -> bool:
    """Return True if a series says nothing yet (:class:`~torchobs.catalog.Metric`)."""
    known = BY_NAME.get(series.name) if series.scope is None else None
    return known is not None and known.quiet is not None and value == known.quiet


def _survives(series: Series) -> bool:
    known = BY_NAME.get(series.name) if series.scope is None else None
    return cumulative(series.kind) or (known is not None and known.survives)
