"""Gauges over time since the start, for the report: memory, loss scale, gradient norms and outputs by layer.

The step ring holds the last steps only, and the series have no past. Here are at most 128 rows; when they are full every second
one goes and the interval doubles, so that a run of any length is covered evenly, in 27 KiB.
"""

from __future__ import annotations

import time
from math import isnan
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.format.documents import encode_history

if TYPE_CHECKING:
    from torchobs.flight.writer.series_table import Cell
    from torchobs.probes.core.context import ProbeContext

FIRST_INTERVAL_S = 0.5
MOST_ROWS = 128
MOST_CURVES = 48
METRICS = (
    catalog.MEMORY_HOST_RSS, catalog.MEMORY_HOST_CHILDREN_RSS, catalog.CGROUP_MEMORY_WORKING_SET,
    catalog.MEMORY_DEVICE_ALLOCATED, catalog.MEMORY_DEVICE_RESERVED, catalog.AMP_SCALE, catalog.GRAD_LAYER_NORM,
)  # fmt: skip
MOST_ACTIVATIONS = 24
"""More curves of layers' outputs, at level extreme"""


class GaugeHistory:
    """Records the gauges. In the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._series = 0
        self._names: list[str] = []
        self._activations = 0
        """How many of them are of layers' outputs"""
        self._cells: list[Cell] = []
        self._rows: list[tuple[float, int, tuple[float, ...]]] = []
        self._interval_s, self._due_s = FIRST_INTERVAL_S, 0.0
        self._room = context.writer.history.room

    def sample(self) -> None:
        """Add a row if one is due."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self._interval_s
            self.record()

    def record(self) -> None:
        """Add a row, and write all of them."""
        writer = self._context.writer
        if len(writer.table) != self._series:
            self._series = len(writer.table)
            self._find_cells()
        values = tuple(cell.read() for cell in self._cells)
        if all(map(isnan, values)):
            return
        self._rows.append((writer.elapsed_ns() / 1e9, self._context.recorder.step, values))
        payload = encode_history(self._names, self._rows)
        while len(self._rows) >= MOST_ROWS or (len(payload) > self._room and len(self._rows) > 1):
            # the newest stays
            self._rows = self._rows[len(self._rows) % 2 ^ 1 :: 2]
            self._interval_s *= 2
            payload = encode_history(self._names, self._rows)
        writer.history.replace(payload)

    def _find_cells(self) -> None:
        for metric in METRICS:
            for attribute, cell in self._context.writer.table.cells_of(metric).items():
                name = f"{metric.name}{{{attribute[:120]}}}" if attribute else metric.name
                if name not in self._names and len(self._names) - self._activations < MOST_CURVES:
                    self._names.append(name)
                    self._cells.append(cell)
        metric = catalog.ACTIVATION_LAYER_STD
        for layer, cell in self._context.writer.table.cells_of(metric).items():
            name = f"{metric.name}{{{layer[:120]}}}"
            if name not in self._names and self._activations < MOST_ACTIVATIONS:
                self._names.append(name)
                self._cells.append(cell)
                self._activations += 1
