"""The instruments of the OpenTelemetry API over a flight file.

A measurement is in the file when its call returns (if another thread writes: when that one has; off tmpfs: within 100 ms).
The rules are the SDK's, with one exception: a gauge set to NaN or infinity becomes absent, where the SDK keeps the last finite
value.

When the application sets its own provider, every instrument created before delegates to the same instrument of that provider,
as the API's own proxies do.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Generator, Iterable, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from opentelemetry.metrics import (
    CallbackOptions,
    CallbackT,
    Counter,
    Histogram,
    Meter,
    ObservableCounter,
    ObservableGauge,
    ObservableUpDownCounter,
    Observation,
    UpDownCounter,
    _Gauge,
)

from torchobs.catalog import Kind
from torchobs.flight.writer.series_table import Cell
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import Attributes

    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.otel.metric_stream import MetricStream

DelegateT = TypeVar("DelegateT")
_NUMBERS = (int, float)
_MAX = sys.float_info.max
DEFAULT_BOUNDS = (0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0, 10000.0)
"""Default bucket boundaries of a histogram (OpenTelemetry specification, explicit bucket histogram aggregation)."""


class SynchronousInstrument(Generic[DelegateT]):
    """What the synchronous instruments have in common: their stream, and the application's own instrument once there is one."""

    kind: ClassVar[Kind]
    factory: ClassVar[str]
    """the method of a Meter that creates such an instrument"""

    def __init__(self, stream: MetricStream) -> None:
        self.stream = stream
        self._delegate: DelegateT | None = None

    def delegate_to(self, meter: Meter) -> None:
        """Delegate to the same instrument of the application's own provider from now on."""
        self._delegate = getattr(meter, self.factory)(*self.stream.identity)


class FlightCounter(SynchronousInstrument[Counter], Counter):
    """A sum that never decreases."""

    kind, factory = Kind.COUNTER, "create_counter"

    def add(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :class:`opentelemetry.metrics.Counter`. A negative or non-finite amount is ignored, with one warning."""
        if self._delegate is not None:
            self._delegate.add(amount, attributes, **_given(context))
            return
        if type(amount) not in _NUMBERS:
            amount = number(amount)
        if not 0 <= amount <= _MAX:
            self.stream.warn_once("an amount that is negative or not finite (%r) is ignored", amount)
            return
        cell = self.stream.cell(attributes)
        if cell is None:
            self.stream.record(Cell.add, amount, attributes)
            return
        cell.add(amount)
        cell.publish()


class FlightUpDownCounter(SynchronousInstrument[UpDownCounter], UpDownCounter):
    """A sum that may decrease."""

    kind, factory = Kind.UPDOWN, "create_up_down_counter"

    def add(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :class:`opentelemetry.metrics.UpDownCounter`. A non-finite amount is ignored, with one warning."""
        if self._delegate is not None:
            self._delegate.add(amount, attributes, **_given(context))
            return
        if type(amount) not in _NUMBERS:
            amount = number(amount)
        if not -_MAX <= amount <= _MAX:
            self.stream.warn_once("an amount that is not finite (%r) is ignored", amount)
            return
        self.stream.record(Cell.add, amount, attributes)


class FlightHistogram(SynchronousInstrument[Histogram], Histogram):
    """A distribution over buckets."""

    kind, factory = Kind.HISTOGRAM, "create_histogram"

    def record(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :class:`opentelemetry.metrics.Histogram`. A negative or non-finite amount is ignored, with one warning."""
        if self._delegate is not None:
            self._delegate.record(amount, attributes, **_given(context))
            return
        if type(amount) not in _NUMBERS:
            amount = number(amount)
        if not 0 <= amount <= _MAX:
            self.stream.warn_once("an amount that is negative or not finite (%r) is ignored", amount)
            return
        self.stream.record(Cell.observe, amount, attributes)

    def delegate_to(self, meter: Meter) -> None:
        """See :class:`SynchronousInstrument`; boundaries that are not the default ones are advised there, too."""
        bounds = self.stream.metric.bounds
        advised: dict[str, Any] = {} if bounds == DEFAULT_BOUNDS else {"explicit_bucket_boundaries_advisory": bounds}
        self._delegate = meter.create_histogram(*self.stream.identity, **advised)


class FlightGauge(SynchronousInstrument[_Gauge], _Gauge):
    """A present value."""

    kind, factory = Kind.GAUGE, "create_gauge"

    def set(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :meth:`opentelemetry.metrics.Meter.create_gauge`. A non-finite amount makes the series absent."""
        if self._delegate is not None:
            self._delegate.set(amount, attributes, **_given(context))
            return
        if type(amount) not in _NUMBERS:
            amount = number(amount)
        self.stream.record(Cell.set, amount if -_MAX <= amount <= _MAX else nan, attributes)


class AsynchronousInstrument:
    """What the observable instruments have in common: callbacks, which run every ten seconds and at the end.

    An observed counter must not decrease, in a file or in Prometheus. When the total that a callback returns decreases (its
    source was reset), the series continues with its last value plus the new total. The SDK exports the lower total, which
    Prometheus treats as a reset, with the same result.
    """

    kind: ClassVar[Kind]
    factory: ClassVar[str]

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
            for failure in breaker.failures:
                errors += 1
                self.stream.warn_once("a callback failed with %s at %s", failure.exception, failure.location)
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


class FlightObservableCounter(AsynchronousInstrument, ObservableCounter):
    """A counter with its total read by callbacks."""

    kind, factory = Kind.COUNTER, "create_observable_counter"


class FlightObservableUpDownCounter(AsynchronousInstrument, ObservableUpDownCounter):
    """An up-down counter with its sum read by callbacks."""

    kind, factory = Kind.UPDOWN, "create_observable_up_down_counter"


class FlightObservableGauge(AsynchronousInstrument, ObservableGauge):
    """A gauge with its value read by callbacks."""

    kind, factory = Kind.GAUGE, "create_observable_gauge"


def _given(context: Context | None) -> dict[str, Context]:
    """Return ``context`` as keyword argument, if given: SDKs before 1.28 do not have it."""
    return {} if context is None else {"context": context}


def number(value: object) -> float:
    """Convert a number of NumPy, torch or the standard library to ``int`` or ``float``; NaN for anything else."""
    converted = call(CircuitBreaker("amount"), _convert, value)
    return nan if converted is None else converted


def _convert(value: object) -> float:
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises unless it is an integer, handled below
    except TypeError:
        return float(value)  # type: ignore[arg-type]  # raises unless it is a number


def _observations(callback: CallbackT, options: CallbackOptions) -> Iterable[Observation]:
    if not isinstance(callback, Generator):
        return callback(options)
    try:
        if inspect.getgeneratorstate(callback) == inspect.GEN_CREATED:
            next(callback)
        return callback.send(options)
    except StopIteration:
        return ()
