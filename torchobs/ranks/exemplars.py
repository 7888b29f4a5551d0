"""Exemplars of histograms: for each bucket the newest step that has a span.

Only steps with a span in the rank's event ring qualify, for a link must lead to a span that the tracing backend receives: about
one step in ten seconds, and some slow and anomalous ones, which are the interesting ones. The trace is the step's own, in which
those of the other ranks are, too. Like its bucket, an exemplar stays after the ring has been overwritten.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.flight.format import event_ring
from torchobs.flight.format.event_ring import fields_of
from torchobs.flight.format.layout import Header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.flight.format.series import Series

_HISTOGRAMS = {"duration_s": catalog.STEP_DURATION, "grad_norm": catalog.GRAD_NORM_DISTRIBUTION}
"""Histogram by the span attribute that holds the step's observation."""
_BY_NAME = {metric.name: metric for metric in _HISTOGRAMS.values()}
_MARKS = (f'"{catalog.SPAN_STEP.name}"'.encode(), b'"late"')
_SAMPLED = 1
_RECENT = 128
"""Most step spans kept for a late value (``runtime.step_spans`` keeps as many)."""


class Exemplar(NamedTuple):
    """One step's observation. ``at_ns``: the step's end, Unix ns."""

    trace_id: str
    span_id: str
    step: int
    value: float
    at_ns: int

    @property
    def labels(self) -> Mapping[str, str]:
        """The exemplar's labels in OpenMetrics."""
        return {"trace_id": self.trace_id, "span_id": self.span_id, "step": str(self.step)}


class _Observation(NamedTuple):
    """A step's observation in a histogram. ``at_ns``: the step's end, Unix ns."""

    metric: catalog.Metric
    step: int
    value: float
    at_ns: int


Shown = dict[str, dict[int, Exemplar]]
"""Exemplars by metric name and bucket index. Replaced instead of modified, so that renderers can cache by identity."""
NONE: Shown = {}


class Exemplars:
    """Collects the exemplars of one rank. ``shown`` is valid at any time."""

    def __init__(self, header: Header) -> None:
        self.shown = NONE
        self._ids = event_ring.SpanIds(header)
        self._ends: OrderedDict[int, int] = OrderedDict()

    def add(self, payloads: Sequence[bytes]) -> None:
        """Process new frames of the ring, oldest first."""
        fresh = [fields_of(payload) for payload in payloads if any(mark in payload for mark in _MARKS)]
        found = [one for fields in fresh if fields is not None for one in self._observations(fields)]
        if found:
            shown = {name: dict(buckets) for name, buckets in self.shown.items()}
            for one in reversed(found):  # newest first: only a few of a whole ring are needed
                self._put(shown.setdefault(one.metric.name, {}), one)
            self.shown = shown

    def _observations(self, fields: Mapping[str, Any]) -> list[_Observation]:
        """Return the histogram observations in a frame."""
        kind = fields.get("k")
        values = self._step(fields) if kind == "span" else fields if kind == "late" else {}
        step = values.get("step")
        if step is None or step not in self._ends:
            return []
        amounts = ((metric, values.get(key)) for key, metric in _HISTOGRAMS.items())
        numbers = ((metric, value) for metric, value in amounts if isinstance(value, (int, float)) and isfinite(value))
        return [_Observation(metric, step, float(value), self._ends[step]) for metric, value in numbers]

    def _step(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the attributes of a step's span, and record its end; none for another span, or one that is not sampled."""
        values: Mapping[str, Any] = fields.get("attrs") or {}
        step = values.get("step")
        is_sampled = bool(fields.get("flags", 0) & _SAMPLED)
        if step is None or not is_sampled or (fields.get("trace_id"), fields.get("span_id")) != self._ids.step(step):
            return {}
        self._ends[step] = fields["t1"]
        if len(self._ends) > _RECENT:
            self._ends.popitem(last=False)
        return values

    def _put(self, buckets: dict[int, Exemplar], seen: _Observation) -> None:
        index = bisect_left(seen.metric.bounds, seen.value)
        if index in buckets and buckets[index].at_ns >= seen.at_ns:
            return  # Prometheus also rejects one older than the last
        buckets[index] = Exemplar(*self._ids.step(seen.step), seen.step, seen.value, seen.at_ns)


def of(series: Series, shown: Shown) -> Mapping[int, Exemplar]:
    """Return a histogram's exemplars by bucket, if it is the fold's own with the known bounds."""
    metric = _BY_NAME.get(series.name)
    ours = metric is not None and series.block == 0 and series.scope is None and series.bounds == metric.bounds
    return shown.get(series.name, {}) if ours else {}
