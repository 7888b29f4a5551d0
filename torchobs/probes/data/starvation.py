"""Report training that waits for its data, from the fold's phase times. A part of ``fetches.DataProbe``."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.starvation import DataCounters, Starvation
from torchobs.flight.metrics.totals import Word

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext

_PHASES = slice(Word.PHASE_TIME, Word.PHASE_TIME + len(catalog.PHASES))
_DATA = Word.PHASE_TIME + catalog.PHASES.index("data")


class StarvationWatch:
    """Updates the gauge and writes the event, in the sampler thread."""

    def __init__(self, context: ProbeContext, clock: Callable[[], float] = monotonic) -> None:
        self._context, self._clock, self._judge = context, clock, Starvation()
        self._cell = context.writer.table.cell(catalog.DATA_STARVED, {})
        if self._cell is not None:
            self._cell.set(0.0)

    def sample(self) -> None:
        """Judge the counters; record a changed verdict."""
        totals, before = self._context.writer.table.core.totals, self._judge.starved
        seen = DataCounters(self._clock(), totals.ints[Word.STEPS], totals.floats[_DATA], sum(totals.floats[_PHASES]))
        if not self._judge.judge(seen):
            return
        if self._cell is not None:
            self._cell.set(float(self._judge.starved))
        if self._judge.starved and not before:
            self._context.writer.event(
                catalog.EVENT_STARVED.name, {"share": round(self._judge.share, 3)}, self._context.recorder.step
            )
