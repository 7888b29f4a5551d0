"""Memory against the step count: a floor of what is in use, its trend, and when the limit would be reached.

A look from another thread falls anywhere in a step, where activations come and go; the least of ten looks is near what
stays. That is the series whose trend is judged (``detect.growth``).
"""

from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.detect.growth import Growth, MemoryHistory, MemoryPoint, soonest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.probes.core.context import ProbeContext

ALARM_S = 86_400.0
"""An event tells of a limit that would be reached within a day."""


class Floor:
    """The least that was in use since the last point, and the points."""

    def __init__(self) -> None:
        self._history = MemoryHistory()
        self._least = inf

    def see(self, used: float) -> None:
        """Take in a look."""
        self._least = min(self._least, used)

    def begin(self) -> None:
        """Another model is trained from here on."""
        self._history.begin()

    def point(self, step: int, seconds: float) -> tuple[Growth | None, Growth | None]:
        """Make a point of the looks since the last one; return the trends of the whole run and of the last minutes."""
        if self._least < inf:
            self._history.add(MemoryPoint(step, seconds, self._least))
        self._least = inf
        return self._history.growths()


class Judged(NamedTuple):
    """What grows by how much, the trends that run against a limit, and the bytes left to it."""

    growth: Growth | None
    trends: tuple[Growth | None, ...]
    left: float | None

    def time_to_limit_s(self) -> float | None:
        """Return when the limit would be reached by the faster of them."""
        return None if self.left is None else soonest(self.trends, self.left)


class GrowthGauges:
    """``growth_per_step`` and ``time_to_limit`` of one space, and the event when the latter is near."""

    def __init__(self, context: ProbeContext, space: str) -> None:
        self._context, self._attributes = context, {"space": space}
        self._alarmed = False

    def show(self, judged: Sequence[Judged]) -> None:
        """Show the fastest growth, and the limit that would be reached first: of one device, or of several."""
        per_step = max((one.growth.per_step for one in judged if one.growth is not None), default=None)
        if per_step is None:
            return
        seconds = min((found for one in judged if (found := one.time_to_limit_s()) is not None), default=None)
        for metric, value in ((catalog.MEMORY_GROWTH_PER_STEP, per_step), (catalog.MEMORY_TIME_TO_LIMIT, seconds)):
            cell = self._context.writer.table.cell(metric, self._attributes)
            if cell is not None:
                cell.set(nan if value is None else value)  # NaN: absent
        near = seconds is not None and seconds <= ALARM_S
        if near and not self._alarmed:
            attributes = {**self._attributes, "per_step": per_step, "time_to_limit": seconds}
            self._context.writer.event(catalog.EVENT_MEMORY_GROWTH.name, attributes, self._context.recorder.step)
            if self._context.warn_limited is not None:
                what = f"{self._attributes['space']} memory grows by {per_step / 2**20:.3g} MiB a step"
                self._context.warn_limited("memory growth", f"{what}, and would reach its limit in {seconds:.0f} s", own=True)
        self._alarmed = near
