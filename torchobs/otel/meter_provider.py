"""The OpenTelemetry API's MeterProvider over a flight file: a user's instruments are as crash-safe as our own metrics."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry.metrics import Meter, MeterProvider, NoOpMeter

from torchobs import catalog
from torchobs.flight.format.series import Scope
from torchobs.otel.attributes import clean_key, frozen
from torchobs.otel.log_once import delegate_safely, warn_once
from torchobs.otel.meter import FlightMeter
from torchobs.otel.metric_stream import Destination

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.util.types import Attributes

    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.otel.async_instruments import AsynchronousInstrument
    from torchobs.otel.metric_stream import Source

_CALLBACK_TIMEOUT_S = 10.0


class FlightMeterProvider(MeterProvider):
    """Creates meters for the file that ``source()`` returns; while it is ``None`` their instruments do nothing.

    ``source`` is called at every measurement, so that instruments survive any number of sessions. In a forked child it must
    return ``None`` or the child's own writer.
    """

    def __init__(self, source: Source) -> None:
        self._destination = Destination(source)
        self._by_scope: dict[Scope, FlightMeter] = {}
        self._delegate: MeterProvider | None = None
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
            return NoOpMeter("")
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

    def delegate_to(self, provider: MeterProvider) -> None:
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


def _observe(writer: FlightWriter, observables: Sequence[AsynchronousInstrument], timeout_s: float) -> None:
    cell = writer.table.cell(catalog.PROBE_ERRORS, {"probe": "callbacks"})  # exists at 0 before its first increment
    errors = sum(instrument.observe(timeout_s) for instrument in observables)
    if cell is not None and errors:
        cell.add(errors)
        cell.publish()
