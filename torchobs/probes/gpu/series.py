"""Series of one GPU device."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.catalog import Metric
    from torchobs.flight.writer.series_table import Cell, Table
    from torchobs.probes.gpu.sensors import Reading

    Key = tuple[Metric, tuple[tuple[str, str], ...]]

_STATES = ("ok", "degraded", "failed")


class GpuSeries:
    """Writes readings to cells. Counters start at the first reading; a gauge without a reading is absent."""

    def __init__(self, table: Table, uuid: str) -> None:
        self.uuid = uuid
        self._table = table
        self._cells: dict[Key, Cell] = {}
        self._totals: dict[Key, float] = {}
        self._state = ""

    def show(self, readings: Iterable[Reading]) -> None:
        """Publish these readings; gauges without one become absent."""
        fresh = set()
        for metric, value, attributes in readings:
            key = (metric, attributes)
            fresh.add(key)
            cell = self._cell(metric, attributes)
            if cell is not None and metric.kind is Kind.COUNTER:
                self._count(cell, key, value)
            elif cell is not None:
                cell.set(float(value))
        for key in self._cells.keys() - fresh:
            if key[0].kind is not Kind.COUNTER:
                self._cells[key].set(nan)

    def add(self, metric: Metric, attributes: tuple[tuple[str, str], ...], amount: int) -> None:
        """Add to a counter; 0 creates it."""
        cell = self._cell(metric, attributes)
        if cell is not None:
            cell.add(amount)

    def state(self, state: str) -> bool:
        """Publish the device's state; return True if it has changed."""
        for name in _STATES:
            attributes = {"hw.id": self.uuid, "hw.type": "gpu", "hw.state": name}
            cell = self._table.cell(catalog.HW_STATUS, attributes)
            if cell is not None:
                cell.set(float(name == state))
        before, self._state = self._state, state
        return state != before

    def _cell(self, metric: Metric, attributes: tuple[tuple[str, str], ...]) -> Cell | None:
        key = (metric, attributes)
        if key not in self._cells:
            cell = self._table.cell(metric, {"hw.id": self.uuid, **dict(attributes)})
            if cell is None:
                return None
            self._cells[key] = cell
        return self._cells[key]

    def _count(self, cell: Cell, key: Key, total: float) -> None:
        """Add the growth since the last reading; a total that fell (driver reload) restarts the count."""
        grown = total - self._totals.get(key, total)
        self._totals[key] = total
        if grown > 0:
            cell.add(int(grown) if key[0].integer else grown)
