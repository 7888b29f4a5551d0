"""Gauges for the named values of ``torchobs.log``, for the planned number of steps and the steps before this run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.value_blocks import CORE, NoSeriesRoomError

if TYPE_CHECKING:
    from torchobs.catalog import Metric
    from torchobs.flight.value_blocks import Cell, Table

MOST_NAMES = 64
EVERY_S = 1.0
"""Initial time between two points of a curve. Points share the event ring with the first cause of a failure, so the time
doubles after every ``POINTS`` points: a scalar that every step logs has 370 points a day."""
POINTS = 32
_Key = tuple["Metric", tuple[tuple[str, str], ...]]


class Scalars:
    """Writes values at once; one without a series yet is written in the sampler's next round."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._names: set[str] = set()
        self._unset: dict[_Key, float] = {}
        self._logged: dict[str, tuple[int, float]] = {}
        self._written: dict[str, tuple[int, float]] = {}
        """Number of points of each curve so far, and when the next one is due"""
        self.resumed_from: float | None = None
        """Steps made before this process, if they are known"""
        self.flops: float | None = None
        """Floating-point operations of a training step, if the script logs them"""

    def has_room(self, name: str) -> bool:
        """Return whether there is room for a series of that name; else count it as dropped."""
        if name not in self._names and len(self._names) >= MOST_NAMES:
            self._table.dropped += 1
            return False
        self._names.add(name)
        return True

    def set(self, name: str, step: int, value: float) -> None:
        """Set a value logged after that step, for a name that :meth:`has_room`. In any thread."""
        self._logged[name] = step, value
        self._set((catalog.SCALAR_VALUE, (("name", name),)), value)

    def points(self, now_s: float, *, last: bool = False) -> dict[str, list[Any]] | None:
        """Return the points of curves that are due (``catalog.EVENT_SCALARS``), all pending ones at the ``last`` call.

        In the sampler thread.
        """
        points: list[tuple[str, int, float]] = []
        for name in list(self._logged):
            number, due_s = self._written.get(name, (0, now_s))
            if now_s >= due_s or last:
                points.append((name, *self._logged.pop(name)))
                self._written[name] = number + 1, now_s + EVERY_S * 2 ** min(number // POINTS, 20)
        if not points:
            return None
        return {key: list(column) for key, column in zip(("names", "steps", "values"), zip(*points, strict=True), strict=True)}

    def set_total_steps(self, value: float) -> None:
        """Set how many steps this process will take."""
        self._set((catalog.STEPS_PLANNED, ()), value)

    def set_resumed_from(self, value: float) -> None:
        """Set how many steps were done before this process."""
        self.resumed_from = value
        self._set((catalog.STEPS_RESUMED_FROM, ()), value)

    def infer_resumed_from(self, value: float) -> None:
        """Set how many steps were done before this process, unless that is known."""
        if self.resumed_from is None:
            self.set_resumed_from(max(0.0, value))

    def set_left(self) -> None:
        """Write values that had no series when they were logged. In the sampler thread."""
        for key in list(self._unset):
            cell = self._cell(key)
            if cell is not None and (value := self._unset.pop(key, None)) is not None:
                cell.set(value)

    def _set(self, key: _Key, value: float) -> None:
        self._unset[key] = value
        cell = self._cell(key)
        if cell is not None:
            self._unset.pop(key, None)
            cell.set(value)

    def _cell(self, key: _Key) -> Cell | None:
        metric, attributes = key
        try:
            return self._table.open(metric, dict(attributes), CORE)
        except NoSeriesRoomError:
            self._unset.pop(key, None)
            return None
