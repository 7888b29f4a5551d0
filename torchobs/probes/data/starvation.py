"""Whether training waits for its data, from what the fold knows of the phases. A part of the probe of data."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.starvation import Starvation, Waited
from torchobs.flight.metrics.totals import Word

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext

_PHASES = slice(Word.PHASE_TIME, Word.PHASE_TIME + len(catalog.PHASES))
_DATA = Word.PHASE_TIME + catalog.PHASES.index("data")


class Starving:
    """For the sampler thread."""

    def __init__(self, context: ProbeContext, clock: Callable[[], float] = monotonic) -> None:
        self._context, self._clock, self._judge = context, clock, Starvation()
        self._cell = context.writer.table.cell(catalog.DATA_STARVED, {})
        if self._cell is not None:
            self._cell.set(0.0)

    def sample(self) -> None:
        """Look at the counters; show and tell what they say."""
        totals, before = self._context.writer.table.core.totals, self._judge.starved
        seen = Waited(self._clock(), totals.ints[Word.STEPS], totals.floats[_DATA], sum(totals.floats[_PHASES]))
        if not self._judge.judge(seen):
            return
        if self._cell is not None:
            self._cell.set(float(self._judge.starved))
        if self._judge.starved and not before:
            self._context.writer.event(
                catalog.EVENT_STARVED.name, {"share": round(self._judge.share, 3)}, self._context.recorder.step
            )
