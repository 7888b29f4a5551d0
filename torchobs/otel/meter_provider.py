"""The OpenTelemetry API's MeterProvider over a flight file: a user's instruments are as crash-safe as our own metrics.

Where the SDK would raise in the training loop (invalid name, bucket boundaries that do not increase), this logs a warning and
returns an instrument that does nothing, or uses the default boundaries.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, TypeVar, cast

from opentelemetry import metrics as api
from opentelemetry.metrics import Meter, _Gauge

from torchobs import catalog
from torchobs.flight.format.series import Scope
from torchobs.otel import instruments
from torchobs.otel.attributes import clean_key, frozen
from torchobs.otel.log_once import delegate_safely, logger, warn_once
from torchobs.otel.metric_stream import Destination, MetricStream

if TYPE_CHECKING:
    from opentelemetry.util.types import Attributes

    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.otel.metric_stream import Source

_NAME = re.compile(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}")
_UNIT = re.compile(r"[\x00-\x7F]{0,63}")
_CALLBACK_TIMEOUT_S = 10.0

Instrument = instruments.SynchronousInstrument[Any] | instruments.AsynchronousInstrument
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

    def create_counter(self, name: str, unit: str = "", description: str = "") -> api.Counter:
        return self._create(instruments.FlightCounter, name, unit, description)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> api.UpDownCounter:
        return self._create(instruments.FlightUpDownCounter, name, unit, description)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> _Gauge:
        return self._create(instruments.FlightGauge, name, unit, description)

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> api.Histogram:
        advisory = explicit_bucket_boundaries_advisory
        if self._delegate is not None:
            advised = {} if advisory is None else {"explicit_bucket_boundaries_advisory": advisory}
            return self._delegate.create_histogram(name, unit or "", description or "", **advised)
        return self._create(instruments.FlightHistogram, name, unit, description, bounds=_bounds(name, advisory))

    def create_observable_counter(
        self, name: str, callbacks: Sequence[api.CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> api.ObservableCounter:
        return self._create(instruments.FlightObservableCounter, name, unit, description, callbacks=callbacks)

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[api.CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> api.ObservableUpDownCounter:
        return self._create(instruments.FlightObservableUpDownCounter, name, unit, description, callbacks=callbacks)

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[api.CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> api.ObservableGauge:
        return self._create(instruments.FlightObservableGauge, name, unit, description, callbacks=callbacks)

    def observables(self) -> list[instruments.AsynchronousInstrument]:
        """Return the observable instruments."""
        return [item for item in list(self._instruments.values()) if isinstance(item, instruments.AsynchronousInstrument)]

    def delegate_to(self, provider: api.MeterProvider) -> None:
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
            return cast("InstrumentT", getattr(api.NoOpMeter(""), cls.factory)(name))
        metric = catalog.Metric(name.lower(), cls.kind, unit or "", description or "", bounds=bounds)
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


class FlightMeterProvider(api.MeterProvider):
    """Creates meters for the file that ``source()`` returns; while it is ``None`` their instruments do nothing.

    ``source`` is called at every measurement, so that instruments survive any number of sessions. In a forked child it must
    return ``None`` or the child's own writer.
    """

    def __init__(self, source: Source) -> None:
        self._destination = Destination(source)
        self._by_scope: dict[Scope, FlightMeter] = {}
        self._delegate: api.MeterProvider | None = None
        self._round: threading.Thread | None = None

    def write_to(self, source: Source) -> None:
        """Set the function that returns the writer."""
        self._destination.source = source

    def get_meter(
        self, name: str, version: str | None = None, schema_url: str | None = None, attributes: Attributes = None
    ) -> Meter:
        """Return the meter of that instrumentation scope; without a name a no-op meter, with a warning."""
        if self._delegate is not None:
            return self._delegate.get_meter(name, version, schema_url)
        if not name:
            warn_once("a meter needs a name; the instruments of one without record nothing")
            return api.NoOpMeter("")
        scope = Scope(clean_key(name), clean_key(version or ""), clean_key(schema_url or ""), frozen(attributes))
        return self._by_scope.setdefault(scope, FlightMeter(scope, self._destination))

    def observe(self, timeout_s: float = 0.0) -> bool:
        """Call the callbacks of all observable instruments in a separate thread and wait for it at most ``timeout_s``.

        They are user code: a callback that hangs must not stop the caller's heartbeat. Only one round runs at a time.
        Returns True if it has finished.
        """
        self._destination.retry()
        running = self._round
        if running is None or not running.is_alive():
            running = self._begin_round(timeout_s or _CALLBACK_TIMEOUT_S)
            if running is None:
                return True
        running.join(timeout_s)
        return not running.is_alive()

    def delegate_to(self, provider: api.MeterProvider) -> None:
        """Delegate every instrument created here to the provider that the application has set."""
        self._delegate = provider
        for meter in list(self._by_scope.values()):
            delegate_safely(meter.delegate_to, provider)

    def _begin_round(self, timeout_s: float) -> threading.Thread | None:
        writer = self._destination.source()
        observables = [instrument for meter in list(self._by_scope.values()) for instrument in meter.observables()]
        if writer is None or self._delegate is not None or not observables:
            return None
        self._round = threading.Thread(
            target=_observe, args=(writer, observables, timeout_s), name="torchobs-callbacks", daemon=True
        )
        self._round.start()
        return self._round


def _observe(writer: FlightWriter, observables: Sequence[instruments.AsynchronousInstrument], timeout_s: float) -> None:
    cell = writer.table.cell(catalog.PROBE_ERRORS, {"probe": "callbacks"})  # exists at 0 before its first increment
    errors = sum(instrument.observe(timeout_s) for instrument in observables)
    if cell is not None and errors:
        cell.add(errors)
        cell.publish()


def _bounds(name: str, advisory: object) -> tuple[float, ...]:
    if advisory is None:
        return instruments.DEFAULT_BOUNDS
    bounds = tuple(map(instruments.number, advisory)) if isinstance(advisory, Sequence) else (nan,)
    if all(map(isfinite, bounds)) and all(low < high for low, high in pairwise(bounds)):
        return tuple(map(float, bounds))
    logger.warning("torchobs: instrument %r: boundaries must be finite numbers that increase; the default is used", name)
    return instruments.DEFAULT_BOUNDS
