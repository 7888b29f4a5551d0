"""Metric stream of an instrument: maps attribute sets to cells of the flight file being written.

The hot path is one look-up of the attributes as given, ``tuple(attributes.items())``: strings need nothing more. Other sets are
converted to the file's canonical form (sorted, with types: 1 differs from True and 1.0).

An attribute set without room in the file is counted in ``torchobs.flight.dropped``, and its measurements go to the series with
the attribute ``otel.metric.overflow``, as OpenTelemetry specifies, so that the instrument's total stays right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torchobs.catalog import Kind, Metric
from torchobs.flight.format.layout import SLOT_SIZE
from torchobs.flight.format.series import Scope, Series, ValueType
from torchobs.flight.writer.series_table import USER, Cell, NoSeriesRoomError, Table
from torchobs.flight.writer.storage import Storage
from torchobs.flight.writer.value_block import ValueBlock
from torchobs.otel.attributes import flat
from torchobs.otel.log_once import logger

if TYPE_CHECKING:
    from torchobs.flight.writer.writer import FlightWriter

    Source: TypeAlias = Callable[[], FlightWriter | None]
    Attributes: TypeAlias = Mapping[str, Any] | None
    Change: TypeAlias = Callable[[Cell, float], None]
    Cells: TypeAlias = dict[Hashable, Cell]

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
            found = cells.get(tuple(attributes.items()) if attributes else ())
        except (TypeError, AttributeError):  # an unhashable value; not a mapping
            found = None
        return self._find(writer, cells, attributes) if found is None else found

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
        found = cells.get(form)
        if found is None or form is None:
            found = self._open(writer.table, cells, attributes)
            if found is not None and form is not None and len(cells) < _MAX_FORMS:
                cells[form] = found
        return found

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
