"""Measure the time before the first step: imports, model construction, checkpoint restore; the cost of every restart.

From the process's start, or from ``init()`` in an interactive interpreter, which may have been idle for hours.
"""

from __future__ import annotations

import sys
from time import monotonic_ns
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.metrics.goodput import credited
from torchobs.flight.metrics.totals import Word
from torchobs.identity import process
from torchobs.probes.core.boundaries import EVAL, TRAIN

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

_ROUNDS = 10


class Startup:
    """Updates the gauge once a second, and once exactly when the first step has ended. A part of ``PhaseProbe``."""

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._rounds = context, 0
        self._cell = context.writer.table.cell(catalog.GOODPUT_TIME, {"state": catalog.STARTUP})
        header = context.writer.header
        interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        self._begun_s = (header.wall_ns if interactive else min(process.this_process().start_ns, header.wall_ns)) / 1e9
        self._shown_s = 0.0
        self._done = context.recorder.step > 0

    def sample(self, *, last: bool = False) -> None:
        """Update the time. ``last``: the rank ends, with or without a step."""
        if self._done:
            return
        self._rounds += 1
        totals = self._context.writer.table.core.totals
        # goodput counts from the first step on
        known_s = sum(totals.floats[Word.GOODPUT : Word.GOODPUT + len(catalog.GOODPUT_STATES)])
        if totals.ints[Word.STEPS]:
            self._show(totals.floats[Word.LAST_STEP_TIMESTAMP] - (known_s - sum(credited(totals))) - self._begun_s)
            self._done = True
        elif last or (not self._rounds % _ROUNDS and not self._steps_begun()):
            header = self._context.writer.header
            self._show((header.wall_ns - header.monotonic_ns + monotonic_ns()) / 1e9 - known_s - self._begun_s)

    def _steps_begun(self) -> bool:
        return self._context.recorder.has_begun(besides={EVAL, TRAIN})

    def _show(self, seconds: float) -> None:
        if self._cell is not None and seconds > self._shown_s:
            self._shown_s = seconds
            self._cell.set(seconds)
