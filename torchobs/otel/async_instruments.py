"""The observable instruments of the OpenTelemetry API: their callbacks run every ten seconds and at the end.

An observed counter must not decrease, in a file or in Prometheus. When the total that a callback returns decreases (its
source was reset), the series continues with its last value plus the new total. The SDK exports the lower total, which
Prometheus treats as a reset, with the same result.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from math import isfinite, nan
from typing import TYPE_CHECKING

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


class Observer:
    """Reads the callbacks of one observable instrument into its series."""

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

    def _read(self, callback: CallbackT, options: CallbackOptions, found: dict[Cell, float]) -> None:
        kind = self.stream.metric.kind
        for observation in _observations(callback, options):
            value = number(observation.value)
            if not isfinite(value) or (kind is Kind.COUNTER and value < 0):
                self.stream.warn_once("an observed value of %r is ignored", observation.value)
                continue
            cell = self.stream.cell(observation.attributes)
            if cell is not None:
                found[cell] = value if kind is Kind.GAUGE else found.get(cell, 0) + value

    def _show(self, found: dict[Cell, float]) -> None:
        if self.stream.writer is not self._writer:
            self._writer, self._shown, self._totals = self.stream.writer, set(), {}
        if self.stream.metric.kind is Kind.COUNTER:
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


class FlightObservableCounter(ObservableCounter):
    """A counter with its total read by callbacks."""

    def __init__(self, stream: MetricStream, callbacks: Sequence[CallbackT] | None) -> None:
        self.stream = stream
        self.observer = Observer(stream, callbacks)

    def delegate_to(self, meter: Meter) -> None:
        """Register the callbacks with the application's own provider."""
        meter.create_observable_counter(*_described(self.observer))


class FlightObservableUpDownCounter(ObservableUpDownCounter):
    """An up-down counter with its sum read by callbacks."""

    def __init__(self, stream: MetricStream, callbacks: Sequence[CallbackT] | None) -> None:
        self.stream = stream
        self.observer = Observer(stream, callbacks)

    def delegate_to(self, meter: Meter) -> None:
        """Register the callbacks with the application's own provider."""
        meter.create_observable_up_down_counter(*_described(self.observer))


class FlightObservableGauge(ObservableGauge):
    """A gauge with its value read by callbacks."""

    def __init__(self, stream: MetricStream, callbacks: Sequence[CallbackT] | None) -> None:
        self.stream = stream
        self.observer = Observer(stream, callbacks)

    def delegate_to(self, meter: Meter) -> None:
        """Register the callbacks with the application's own provider."""
        meter.create_observable_gauge(*_described(self.observer))


def _described(observer: Observer) -> tuple[str, list[CallbackT], str, str]:
    name, unit, description = observer.stream.identity
    return name, observer.callbacks, unit, description
