"""The OpenTelemetry API's Meter over a flight file.

Where the SDK would raise in the training loop (invalid name, bucket boundaries that do not increase), this logs a warning and
returns an instrument that does nothing, or uses the default boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from opentelemetry.metrics import Meter, NoOpMeter

from torchobs.catalog import Kind, Metric
from torchobs.otel.async_instruments import FlightObservableCounter, FlightObservableGauge, FlightObservableUpDownCounter
from torchobs.otel.instruments import (
    DEFAULT_BOUNDS,
    FlightCounter,
    FlightGauge,
    FlightHistogram,
    FlightUpDownCounter,
    number,
)
from torchobs.otel.log_once import delegate_safely, logger
from torchobs.otel.metric_stream import MetricStream

if TYPE_CHECKING:
    from opentelemetry.metrics import (
        CallbackT,
        Counter,
        Histogram,
        MeterProvider,
        ObservableCounter,
        ObservableGauge,
        ObservableUpDownCounter,
        UpDownCounter,
        _Gauge,
    )

    from torchobs.flight.format.series import Scope
    from torchobs.otel.async_instruments import Observer
    from torchobs.otel.metric_stream import Destination

_NAME = re.compile(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}")
_UNIT = re.compile(r"[\x00-\x7F]{0,63}")


class _Instrument(Protocol):
    stream: MetricStream

    def delegate_to(self, meter: Meter) -> None:
        """Delegate to the same instrument of another meter."""


InstrumentT = TypeVar("InstrumentT", bound=_Instrument)


class FlightMeter(Meter):
    """Creates instruments, identified by name (case ignored), kind, unit and description, as in the SDK.

    If only the name is the same, a separate stream is created with a warning: Prometheus can show only one of the two.
    """

    def __init__(self, scope: Scope, destination: Destination) -> None:
        super().__init__(scope.name, scope.version or None, scope.schema_url or None)
        self._scope, self._destination = scope, destination
        self._instruments: dict[tuple[type, str, str, str], _Instrument] = {}
        self._first: dict[str, _Instrument] = {}
        self._delegate: Meter | None = None

    @property
    def _other(self) -> Meter:
        """The meter for instruments not created here: the application's own, else one with no-op instruments."""
        return self._delegate or NoOpMeter("")

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """See :class:`opentelemetry.metrics.Meter`."""
        stream = self._stream(Kind.COUNTER, name, unit, description)
        if stream is None:
            return self._other.create_counter(name, unit or "", description or "")
        return self._keep(FlightCounter(stream))

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> UpDownCounter:
        """See :class:`opentelemetry.metrics.Meter`."""
        stream = self._stream(Kind.UPDOWN, name, unit, description)
        if stream is None:
            return self._other.create_up_down_counter(name, unit or "", description or "")
        return self._keep(FlightUpDownCounter(stream))

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> _Gauge:
        """See :class:`opentelemetry.metrics.Meter`."""
        stream = self._stream(Kind.GAUGE, name, unit, description)
        if stream is None:
            return self._other.create_gauge(name, unit or "", description or "")
        return self._keep(FlightGauge(stream))

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> Histogram:
        """See :class:`opentelemetry.metrics.Meter`."""
        advisory = explicit_bucket_boundaries_advisory
        stream = self._stream(Kind.HISTOGRAM, name, unit, description, advisory)
        if stream is None:
            advised = {} if advisory is None else {"explicit_bucket_boundaries_advisory": advisory}
            return self._other.create_histogram(name, unit or "", description or "", **advised)
        kept = self._keep(FlightHistogram(stream))
        if kept.stream.metric.bounds != stream.metric.bounds:
            kept.stream.warn_once("other boundaries are advised now, the first ones are used")
        return kept

    def create_observable_counter(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> ObservableCounter:
        """See :class:`opentelemetry.metrics.Meter`."""
        stream = self._stream(Kind.COUNTER, name, unit, description)
        if stream is None:
            return self._other.create_observable_counter(name, callbacks, unit or "", description or "")
        return self._keep(FlightObservableCounter(stream, callbacks))

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> ObservableUpDownCounter:
        """See :class:`opentelemetry.metrics.Meter`."""
        stream = self._stream(Kind.UPDOWN, name, unit, description)
        if stream is None:
            return self._other.create_observable_up_down_counter(name, callbacks, unit or "", description or "")
        return self._keep(FlightObservableUpDownCounter(stream, callbacks))

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> ObservableGauge:
        """See :class:`opentelemetry.metrics.Meter`."""
        stream = self._stream(Kind.GAUGE, name, unit, description)
        if stream is None:
            return self._other.create_observable_gauge(name, callbacks, unit or "", description or "")
        return self._keep(FlightObservableGauge(stream, callbacks))

    def observers(self) -> list[Observer]:
        """Return the observers of the observable instruments."""
        return [observer for item in list(self._instruments.values()) if (observer := getattr(item, "observer", None))]

    def delegate_to(self, provider: MeterProvider) -> None:
        """Delegate to the same meter of the application's own provider."""
        delegate = provider.get_meter(self._scope.name, self._scope.version or None, self._scope.schema_url or None)
        self._delegate = delegate
        for instrument in list(self._instruments.values()):
            delegate_safely(instrument.delegate_to, delegate)

    def _stream(
        self, kind: Kind, name: str, unit: str, description: str, advisory: Sequence[float] | None = None
    ) -> MetricStream | None:
        """Return a stream for that instrument; ``None`` where another meter has to create it."""
        if self._delegate is not None:
            return None
        if not _NAME.fullmatch(name) or not _UNIT.fullmatch(unit or ""):
            logger.warning("torchobs: no valid name and unit of an instrument: %.300r, %.100r; it records nothing", name, unit)
            return None
        bounds = _bounds(name, advisory) if kind is Kind.HISTOGRAM else ()
        metric = Metric(name.lower(), kind, unit or "", description or "", bounds=bounds)
        return MetricStream(metric, self._scope, self._destination)

    def _keep(self, instrument: InstrumentT) -> InstrumentT:
        """Return the instrument of that identity that was created first; without a lock, as ``dict.setdefault`` is atomic."""
        name, *_ = identity = instrument.stream.identity
        kept = self._instruments.setdefault((type(instrument), *identity), instrument)
        first = self._first.setdefault(name, kept)
        if first is not kept:
            first.stream.warn_once("there is another one of this name with another kind, unit or description")
        return cast("InstrumentT", kept)


def _bounds(name: str, advisory: object) -> tuple[float, ...]:
    if advisory is None:
        return DEFAULT_BOUNDS
    bounds = tuple(map(number, advisory)) if isinstance(advisory, Sequence) else (nan,)
    if all(map(isfinite, bounds)) and all(low < high for low, high in pairwise(bounds)):
        return tuple(map(float, bounds))
    logger.warning("torchobs: instrument %r: boundaries must be finite numbers that increase; the default is used", name)
    return DEFAULT_BOUNDS
