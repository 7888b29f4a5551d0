"""The OpenTelemetry API's Meter over a flight file.

Where the SDK would raise in the training loop (invalid name, bucket boundaries that do not increase), this logs a warning and
returns an instrument that does nothing, or uses the default boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, TypeVar, cast

from opentelemetry.metrics import Meter, NoOpMeter

from torchobs.catalog import Metric
from torchobs.otel.async_instruments import (
    AsynchronousInstrument,
    FlightObservableCounter,
    FlightObservableGauge,
    FlightObservableUpDownCounter,
)
from torchobs.otel.instruments import (
    DEFAULT_BOUNDS,
    FlightCounter,
    FlightGauge,
    FlightHistogram,
    FlightUpDownCounter,
    SynchronousInstrument,
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
    from torchobs.otel.metric_stream import Destination

_NAME = re.compile(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}")
_UNIT = re.compile(r"[\x00-\x7F]{0,63}")


Instrument = SynchronousInstrument[Any] | AsynchronousInstrument
InstrumentT = TypeVar("InstrumentT", bound=Instrument)


class FlightMeter(Meter):
    """Creates instruments, identified by name (case ignored), kind, unit and description, as in the SDK.

    If only the name is the same, a separate stream is created with a warning: Prometheus can show only one of the two.
    """

    def __init__(self, scope: Scope, destination: Destination) -> None:
        super().__init__(scope.name, scope.version or None, scope.schema_url or None)
        self._scope, self._destination = scope, destination
        self._instruments: dict[tuple[type, str, str, str], Instrument] = {}
        self._first: dict[str, Instrument] = {}
        self._delegate: Meter | None = None

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """See :class:`opentelemetry.metrics.Meter`."""
        return self._create(FlightCounter, name, unit, description)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> UpDownCounter:
        """See :class:`opentelemetry.metrics.Meter`."""
        return self._create(FlightUpDownCounter, name, unit, description)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> _Gauge:
        """See :class:`opentelemetry.metrics.Meter`."""
        return self._create(FlightGauge, name, unit, description)

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
        if self._delegate is not None:
            advised = {} if advisory is None else {"explicit_bucket_boundaries_advisory": advisory}
            return self._delegate.create_histogram(name, unit or "", description or "", **advised)
        return self._create(FlightHistogram, name, unit, description, bounds=_bounds(name, advisory))

    def create_observable_counter(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> ObservableCounter:
        """See :class:`opentelemetry.metrics.Meter`."""
        return self._create(FlightObservableCounter, name, unit, description, callbacks=callbacks)

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> ObservableUpDownCounter:
        """See :class:`opentelemetry.metrics.Meter`."""
        return self._create(FlightObservableUpDownCounter, name, unit, description, callbacks=callbacks)

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> ObservableGauge:
        """See :class:`opentelemetry.metrics.Meter`."""
        return self._create(FlightObservableGauge, name, unit, description, callbacks=callbacks)

    def observables(self) -> list[AsynchronousInstrument]:
        """Return the observable instruments."""
        return [item for item in list(self._instruments.values()) if isinstance(item, AsynchronousInstrument)]

    def delegate_to(self, provider: MeterProvider) -> None:
        """Delegate to the same meter of the application's own provider."""
        delegate = provider.get_meter(self._scope.name, self._scope.version or None, self._scope.schema_url or None)
        self._delegate = delegate
        for instrument in list(self._instruments.values()):
            delegate_safely(instrument.delegate_to, delegate)

    def _create(
        self, cls: type[InstrumentT], name: str, unit: str, description: str, bounds: tuple[float, ...] = (), **more: Any
    ) -> InstrumentT:
        """Return the instrument of that identity; from the application's own meter if there is one, as the API's type then."""
        if self._delegate is not None:
            own = getattr(self._delegate, cls.factory)(name, unit=unit or "", description=description or "", **more)
            return cast("InstrumentT", own)
        if not _NAME.fullmatch(name) or not _UNIT.fullmatch(unit or ""):
            logger.warning("torchobs: no valid name and unit of an instrument: %.300r, %.100r; it records nothing", name, unit)
            return cast("InstrumentT", getattr(NoOpMeter(""), cls.factory)(name))
        metric = Metric(name.lower(), cls.kind, unit or "", description or "", bounds=bounds)
        return self._keep(cls(MetricStream(metric, self._scope, self._destination), **more))

    def _keep(self, instrument: InstrumentT) -> InstrumentT:
        """Return the instrument of that identity that was created first; without a lock, as ``dict.setdefault`` is atomic."""
        name, *_ = identity = instrument.stream.identity
        kept = self._instruments.setdefault((type(instrument), *identity), instrument)
        first = self._first.setdefault(name, kept)
        if first is not kept:
            first.stream.warn_once("there is another one of this name with another kind, unit or description")
        if kept.stream.metric.bounds != instrument.stream.metric.bounds:
            kept.stream.warn_once("other boundaries are advised now, the first ones are used")
        return cast("InstrumentT", kept)


def _bounds(name: str, advisory: object) -> tuple[float, ...]:
    if advisory is None:
        return DEFAULT_BOUNDS
    bounds = tuple(map(number, advisory)) if isinstance(advisory, Sequence) else (nan,)
    if all(map(isfinite, bounds)) and all(low < high for low, high in pairwise(bounds)):
        return tuple(map(float, bounds))
    logger.warning("torchobs: instrument %r: boundaries must be finite numbers that increase; the default is used", name)
    return DEFAULT_BOUNDS
