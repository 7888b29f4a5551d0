"""What a training script gives to ``torchobs.log`` by name, and how long it says the run is: a gauge each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.writer.series_table import CORE, NoSeriesRoomError

if TYPE_CHECKING:
    from torchobs.catalog import Metric
    from torchobs.flight.writer.series_table import Cell, Table

MOST_NAMES = 64
_Key = tuple["Metric", tuple[tuple[str, str], ...]]


class Scalars:
    """Each is in the file at once; where its series cannot be made just then, with the sampler's next round."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._names: set[str] = set()
        self._left: dict[_Key, float] = {}

    def has_room(self, name: str) -> bool:
        """Return True if there is a series for it; count what has none."""
        if name not in self._names and len(self._names) >= MOST_NAMES:
            self._table.dropped += 1
            return False
        self._names.add(name)
        return True

    def set(self, name: str, value: float) -> None:
        """Show a number that :meth:`has_room`. In any thread."""
        self._set((catalog.SCALAR_VALUE, (("name", name),)), value)

    def set_total_steps(self, value: float) -> None:
        """Show how many steps this process will take."""
        self._set((catalog.STEPS_PLANNED, ()), value)

    def set_left(self) -> None:
        """Show what could not be shown when it was given. In the sampler thread."""
        for key in list(self._left):
            cell = self._cell(key)
            if cell is not None and (value := self._left.pop(key, None)) is not None:
                cell.set(value)

    def _set(self, key: _Key, value: float) -> None:
        self._left[key] = value
        cell = self._cell(key)
        if cell is not None:
            self._left.pop(key, None)
            cell.set(value)

    def _cell(self, key: _Key) -> Cell | None:
        metric, attributes = key
        try:
            return self._table.open(metric, dict(attributes), CORE)
        except NoSeriesRoomError:
            self._left.pop(key, None)
            return None
