"""The observable instruments of the OpenTelemetry API: their callbacks run every ten seconds and at the end.

An observed counter must not decrease, in a file or in Prometheus. When the total that a callback returns decreases (its
source was reset), the series continues with its last value plus the new total. The SDK exports the lower total, which
Prometheus treats as a reset, with the same result.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from math import isfinite, nan
from typing import TYPE_CHECKING, ClassVar

from opentelemetry.metrics import CallbackOptions, ObservableCounter, ObservableGauge, ObservableUpDownCounter

from torchobs.catalog import Kind
from torchobs.otel.instruments import number
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from opentelemetry.metrics import CallbackT, Meter, Observation

    from torchobs.flight.writer.series_table import Cell
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.otel.metric_stream import MetricStream


class AsynchronousInstrument:
    """What the observable instruments have in common: they read their callbacks into their series."""

    kind: ClassVar[Kind]
    factory: ClassVar[str]
    """the method of a Meter that creates such an instrument"""

    def __init__(self, stream: MetricStream, callbacks: Sequence[CallbackT] | None) -> None:
        self.stream = stream
        self.callbacks = list(callbacks or ())
        self._writer: FlightWriter | None = None
        self._shown: set[Cell] = set()
        self._totals: dict[Cell, tuple[float, float]] = {}

    def observe(self, timeout_s: float) -> int:
        """Call the callbacks and set the series to their results; return how many raised, losing the rest of their values."""
        found: dict[Cell, float] = {}
        errors = 0
        for callback in self.callbacks:
            breaker = CircuitBreaker("callback")
            call(breaker, self._read, callback, CallbackOptions(timeout_s * 1000), found)
            for trip in breaker.trips:
                errors += 1
                self.stream.warn_once("a callback failed with %s at %s", trip.exception, trip.location)
        self._show(found)
        return errors

    def delegate_to(self, meter: Meter) -> None:
        """Register the callbacks with the application's own provider."""
        name, unit, description = self.stream.identity
        getattr(meter, self.factory)(name, self.callbacks, unit, description)

    def _read(self, callback: CallbackT, options: CallbackOptions, found: dict[Cell, float]) -> None:
        for observation in _observations(callback, options):
            value = number(observation.value)
            if not isfinite(value) or (self.kind is Kind.COUNTER and value < 0):
                self.stream.warn_once("an observed value of %r is ignored", observation.value)
                continue
            cell = self.stream.cell(observation.attributes)
            if cell is not None:
                found[cell] = value if self.kind is Kind.GAUGE else found.get(cell, 0) + value

    def _show(self, found: dict[Cell, float]) -> None:
        if self.stream.writer is not self._writer:
            self._writer, self._shown, self._totals = self.stream.writer, set(), {}
        if self.kind is Kind.COUNTER:
            found = {cell: self._total(cell, value) for cell, value in found.items()}
        else:  # a gauge that a callback no longer returns becomes absent; a counter keeps its value
            found.update(dict.fromkeys(self._shown - found.keys(), nan))
        self._shown = {cell for cell, value in found.items() if isfinite(value)}
        for cell, value in found.items():
            cell.set(value)
            cell.publish()

    def _total(self, cell: Cell, value: float) -> float:
        base, last = self._totals.get(cell, (0, 0))
        if value < last:
            base += last
        self._totals[cell] = base, value
        return base + value


def _observations(callback: CallbackT, options: CallbackOptions) -> Iterable[Observation]:
    if not isinstance(callback, Generator):
        return callback(options)
    try:
        if inspect.getgeneratorstate(callback) == inspect.GEN_CREATED:
            next(callback)
        return callback.send(options)
    except StopIteration:
        return ()


class FlightObservableCounter(AsynchronousInstrument, ObservableCounter):
    """A counter with its total read by callbacks."""

    kind, factory = Kind.COUNTER, "create_observable_counter"


class FlightObservableUpDownCounter(AsynchronousInstrument, ObservableUpDownCounter):
    """An up-down counter with its sum read by callbacks."""

    kind, factory = Kind.UPDOWN, "create_observable_up_down_counter"


class FlightObservableGauge(AsynchronousInstrument, ObservableGauge):
    """A gauge with its value read by callbacks."""

    kind, factory = Kind.GAUGE, "create_observable_gauge"
