"""The OpenTelemetry API's MeterProvider and its instruments over a flight file.

The hot path is one look-up of the attributes as given, ``tuple(attributes.items())``: strings need nothing more. Other sets are
converted to the file's canonical form (sorted, with types: 1 differs from True and 1.0).

An attribute set without room in the file is counted in ``torchobs.flight.dropped``, and its measurements go to the series with
the attribute ``otel.metric.overflow``, as OpenTelemetry specifies, so that the instrument's total stays right.

A measurement is in the file when its call returns (if another thread writes: when that one has; off tmpfs: within 100 ms).
docs/opentelemetry.md has what differs from the SDK.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, cast

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, CallbackT, Meter, Observation, _Gauge

from torchobs import catalog
from torchobs.catalog import Kind, Metric
from torchobs.flight.layout import SLOT_SIZE
from torchobs.flight.series import Scope, Series, ValueType
from torchobs.flight.storage import Storage
from torchobs.flight.value_blocks import USER, Cell, NoSeriesRoomError, Table, ValueBlock
from torchobs.otel.attributes import clean_key, delegate_safely, flat, frozen, logger, warn_once
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from torchobs.flight.writer import FlightWriter

    Source: TypeAlias = Callable[[], FlightWriter | None]
    Attributes: TypeAlias = Mapping[str, Any] | None
    Change: TypeAlias = Callable[[Cell, float], None]
    Cells: TypeAlias = dict[Hashable, Cell]
    from opentelemetry.context import Context


OVERFLOW: Mapping[str, bool] = {"otel.metric.overflow": True}
_OVERFLOW_FORM = "overflow"
_SCALARS = frozenset({str, bool, int, float, type(None)})
_MAX_FORMS = 4096
"""Most attribute sets per instrument that are cached as given (at most 2 MiB)."""
_MAX_LATE = 1024
_NO_ROOM = Cell(
    ValueBlock(Storage(memoryview(bytearray(2 * SLOT_SIZE))), 0, 0),
    Series("no room", Kind.COUNTER, "", "", (), (), ValueType.EITHER, 0, 0),
)
"""Cell for an instrument without room even for its overflow series: its measurements are counted as dropped."""


class Destination:
    """Destination of measurements. Those of a series that another thread is creating are kept, so that no thread waits."""

    __slots__ = ("_late", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self._late: deque[tuple[MetricStream, Change, float, Attributes]] = deque()

    def keep(self, stream: MetricStream, change: Change, amount: float, attributes: Attributes) -> None:
        """Keep a measurement for :meth:`retry`, if a file is written; beyond 1,024 pending ones it is dropped and counted."""
        writer = self.source()
        if writer is not None and len(self._late) >= _MAX_LATE:
            writer.table.dropped += 1
        elif writer is not None:
            self._late.append((stream, change, amount, dict(attributes) if attributes else None))

    def retry(self) -> None:
        """Record the pending measurements, each at most once per call."""
        for _ in range(len(self._late)):
            try:
                stream, change, amount, attributes = self._late.popleft()
            except IndexError:
                return  # another thread is retrying
            stream.record(change, amount, attributes)


class MetricStream:
    """The series of one instrument."""

    __slots__ = ("_bound", "_destination", "_warned", "metric", "scope")

    def __init__(self, metric: Metric, scope: Scope, destination: Destination) -> None:
        self.metric, self.scope = metric, scope
        self._destination = destination
        self._warned: set[str] = set()
        self._bound: tuple[FlightWriter | None, Cells] = (None, {})

    @property
    def identity(self) -> tuple[str, str, str]:
        """Name, unit and description."""
        return self.metric.name, self.metric.unit, self.metric.brief

    @property
    def writer(self) -> FlightWriter | None:
        """The writer that the cached cells belong to."""
        return self._bound[0]

    def cell(self, attributes: Attributes) -> Cell | None:
        """Return the cell of that attribute set; ``None`` when no file is written, or another thread is creating the series."""
        writer, cells = self._bound
        if self._destination.source() is not writer:
            writer, cells = self._rebind()
        try:
            cell = cells.get(tuple(attributes.items()) if attributes else ())
        except (TypeError, AttributeError):  # an unhashable value; not a mapping
            cell = None
        return self._find(writer, cells, attributes) if cell is None else cell

    def record(self, change: Change, amount: float, attributes: Attributes) -> None:
        """Change the value of that attribute set and publish it: later if another thread is creating the series."""
        cell = self.cell(attributes)
        if cell is not None:
            change(cell, amount)
            cell.publish()
        else:
            self._destination.keep(self, change, amount, attributes)

    def warn_once(self, problem: str, *details: object) -> None:
        """Log a warning about misuse of this instrument, once per kind."""
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("torchobs: instrument %r: " + problem, self.metric.name, *details)  # our own texts

    def _rebind(self) -> tuple[FlightWriter | None, Cells]:
        """Switch to the present file. Writer and cells are replaced together, so that no thread mixes cells of two files."""
        bound: tuple[FlightWriter | None, Cells] = (self._destination.source(), {})
        self._bound = bound
        return bound

    def _find(self, writer: FlightWriter | None, cells: Cells, attributes: Attributes) -> Cell | None:
        if writer is None:
            return None
        form = _form(attributes) if attributes else ()
        cell = cells.get(form)
        if cell is None or form is None:
            cell = self._open(writer.table, cells, attributes)
            if cell is not None and form is not None and len(cells) < _MAX_FORMS:
                cells[form] = cell
        return cell

    def _open(self, table: Table, cells: Cells, attributes: Attributes) -> Cell | None:
        try:
            return table.open(self.metric, flat(attributes), USER, either=True, scope=self.scope)
        except NoSeriesRoomError:
            return self._overflow(table, cells)

    def _overflow(self, table: Table, cells: Cells) -> Cell | None:
        """Return the cell of the overflow series."""
        cell = cells.get(_OVERFLOW_FORM)
        if cell is not None:
            return cell
        self.warn_once("no room for more attribute sets in the flight file, further ones count as otel.metric.overflow")
        try:
            cell = table.open(self.metric, OVERFLOW, USER, either=True, scope=self.scope, spare=True)
        except NoSeriesRoomError:
            cell = _NO_ROOM
        if cell is not None:
            cells[_OVERFLOW_FORM] = cell
        return cell


def _form(attributes: object) -> Hashable | None:
    """Return attributes as given as a key, with their types unless all are strings, for ``1 == True == 1.0`` in Python."""
    if not isinstance(attributes, Mapping) or not set(map(type, attributes)) <= {str}:
        return None
    types = tuple(map(type, attributes.values()))
    if not _SCALARS.issuperset(types):
        return None
    items = tuple(attributes.items())
    return (items, types) if set(types) != {str} else items


_NUMBERS = (int, float)
_MAX = sys.float_info.max
DEFAULT_BOUNDS = (0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0, 10000.0)
"""Default bucket boundaries of a histogram (OpenTelemetry specification, explicit bucket histogram aggregation)."""


class SynchronousInstrument:
    """Base of the synchronous instruments: has their stream, and the application's own instrument once there is one."""

    kind: ClassVar[Kind]
    factory: ClassVar[str]
    """the method of a Meter that creates such an instrument"""
    method: ClassVar[str]
    """the instrument's method that takes a measurement"""
    least: ClassVar[float] = -_MAX

    def __init__(self, stream: MetricStream) -> None:
        self.stream = stream
        self._delegate: Any = None

    def delegate_to(self, meter: Meter) -> None:
        """Delegate to the same instrument of the application's own provider from now on."""
        self._delegate = getattr(meter, self.factory)(*self.stream.identity)

    def _measure(self, change: Change, amount: float, attributes: Attributes, context: Context | None) -> None:
        """Record an amount, or delegate it. One that is below ``least`` or not finite is ignored, or makes a gauge absent."""
        if self._delegate is not None:
            options = {} if context is None else {"context": context}  # SDKs before 1.28 do not have it
            getattr(self._delegate, self.method)(amount, attributes, **options)
            return
        if type(amount) not in _NUMBERS:
            amount = number(amount)
        if self.least <= amount <= _MAX:
            self.stream.record(change, amount, attributes)
        elif self.kind is Kind.GAUGE:
            self.stream.record(change, nan, attributes)
        else:
            self.stream.warn_once("an amount that is below %g or not finite (%r) is ignored", self.least, amount)


class FlightCounter(SynchronousInstrument, api.Counter):
    """A sum that never decreases."""

    kind, factory, method, least = Kind.COUNTER, "create_counter", "add", 0.0

    def add(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :class:`opentelemetry.metrics.Counter`. A negative or non-finite amount is ignored, with one warning."""
        self._measure(Cell.add, amount, attributes, context)


class FlightUpDownCounter(SynchronousInstrument, api.UpDownCounter):
    """A sum that may decrease."""

    kind, factory, method = Kind.UPDOWN, "create_up_down_counter", "add"

    def add(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :class:`opentelemetry.metrics.UpDownCounter`. A non-finite amount is ignored, with one warning."""
        self._measure(Cell.add, amount, attributes, context)


class FlightHistogram(SynchronousInstrument, api.Histogram):
    """A distribution over buckets."""

    kind, factory, method, least = Kind.HISTOGRAM, "create_histogram", "record", 0.0

    def record(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :class:`opentelemetry.metrics.Histogram`. A negative or non-finite amount is ignored, with one warning."""
        self._measure(Cell.observe, amount, attributes, context)

    def delegate_to(self, meter: Meter) -> None:
        """See :class:`SynchronousInstrument`; boundaries that are not the default ones are advised there, too."""
        bounds = self.stream.metric.bounds
        advised: dict[str, Any] = {} if bounds == DEFAULT_BOUNDS else {"explicit_bucket_boundaries_advisory": bounds}
        self._delegate = meter.create_histogram(*self.stream.identity, **advised)


class FlightGauge(SynchronousInstrument, _Gauge):
    """A present value."""

    kind, factory, method = Kind.GAUGE, "create_gauge", "set"

    def set(self, amount: float, attributes: Attributes = None, context: Context | None = None) -> None:
        """See :meth:`opentelemetry.metrics.Meter.create_gauge`. A non-finite amount makes the series absent."""
        self._measure(Cell.set, amount, attributes, context)


class AsynchronousInstrument:
    """Base of the observable instruments: has their callbacks, which run every ten seconds and at the end.

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
        values: dict[Cell, float] = {}
        errors = 0
        for callback in self.callbacks:
            breaker = CircuitBreaker("callback")
            call(breaker, self._read, callback, CallbackOptions(timeout_s * 1000), values)
            for failure in breaker.failures:
                errors += 1
                self.stream.warn_once("a callback failed with %s at %s", failure.exception, failure.location)
        self._show(values)
        return errors

    def delegate_to(self, meter: Meter) -> None:
        """Register the callbacks with the application's own provider."""
        name, unit, description = self.stream.identity
        getattr(meter, self.factory)(name, self.callbacks, unit, description)

    def _read(self, callback: CallbackT, options: CallbackOptions, values: dict[Cell, float]) -> None:
        for observation in _observations(callback, options):
            value = number(observation.value)
            if not isfinite(value) or (self.kind is Kind.COUNTER and value < 0):
                self.stream.warn_once("an observed value of %r is ignored", observation.value)
                continue
            cell = self.stream.cell(observation.attributes)
            if cell is not None:
                values[cell] = value if self.kind is Kind.GAUGE else values.get(cell, 0) + value

    def _show(self, values: dict[Cell, float]) -> None:
        if self.stream.writer is not self._writer:
            self._writer, self._shown, self._totals = self.stream.writer, set(), {}
        if self.kind is Kind.COUNTER:
            values = {cell: self._total(cell, value) for cell, value in values.items()}
        else:  # a gauge that a callback does not return becomes absent; a counter keeps its value
            values.update(dict.fromkeys(self._shown - values.keys(), nan))
        self._shown = {cell for cell, value in values.items() if isfinite(value)}
        for cell, value in values.items():
            cell.set(value)
            cell.publish()

    def _total(self, cell: Cell, value: float) -> float:
        base, last = self._totals.get(cell, (0, 0))
        if value < last:
            base += last
        self._totals[cell] = base, value
        return base + value


class FlightObservableCounter(AsynchronousInstrument, api.ObservableCounter):
    """A counter with its total read by callbacks."""

    kind, factory = Kind.COUNTER, "create_observable_counter"


class FlightObservableUpDownCounter(AsynchronousInstrument, api.ObservableUpDownCounter):
    """An up-down counter with its sum read by callbacks."""

    kind, factory = Kind.UPDOWN, "create_observable_up_down_counter"


class FlightObservableGauge(AsynchronousInstrument, api.ObservableGauge):
    """A gauge with its value read by callbacks."""

    kind, factory = Kind.GAUGE, "create_observable_gauge"


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


_NAME = re.compile(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}")
_UNIT = re.compile(r"[\x00-\x7F]{0,63}")
_CALLBACK_TIMEOUT_S = 10.0

Instrument = SynchronousInstrument | AsynchronousInstrument
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
        return self._create(FlightCounter, name, unit, description)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> api.UpDownCounter:
        return self._create(FlightUpDownCounter, name, unit, description)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> _Gauge:
        return self._create(FlightGauge, name, unit, description)

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
        return self._create(FlightHistogram, name, unit, description, bounds=_bounds(name, advisory))

    def create_observable_counter(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> api.ObservableCounter:
        return self._create(FlightObservableCounter, name, unit, description, callbacks=callbacks)

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> api.ObservableUpDownCounter:
        return self._create(FlightObservableUpDownCounter, name, unit, description, callbacks=callbacks)

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[CallbackT] | None = None, unit: str = "", description: str = ""
    ) -> api.ObservableGauge:
        return self._create(FlightObservableGauge, name, unit, description, callbacks=callbacks)

    def observables(self) -> list[AsynchronousInstrument]:
        """Return the observable instruments."""
        return [item for item in list(self._instruments.values()) if isinstance(item, AsynchronousInstrument)]

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
            delegated = getattr(self._delegate, cls.factory)(name, unit=unit or "", description=description or "", **more)
            return cast("InstrumentT", delegated)
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


def _observe(writer: FlightWriter, observables: Sequence[AsynchronousInstrument], timeout_s: float) -> None:
    cell = writer.table.cell(catalog.PROBE_ERRORS, {"probe": "callbacks"})  # exists at 0 before its first increment
    errors = sum(instrument.observe(timeout_s) for instrument in observables)
    if cell is not None and errors:
        cell.add(errors)
        cell.publish()


def _bounds(name: str, advisory: object) -> tuple[float, ...]:
    if advisory is None:
        return DEFAULT_BOUNDS
    bounds = tuple(map(number, advisory)) if isinstance(advisory, Sequence) else (nan,)
    if all(map(isfinite, bounds)) and all(low < high for low, high in pairwise(bounds)):
        return tuple(map(float, bounds))
    logger.warning("torchobs: instrument %r: boundaries must be finite numbers that increase; the default is used", name)
    return DEFAULT_BOUNDS
