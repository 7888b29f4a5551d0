"""Memory growth per step, and the time until the limit, by the trend of what stays (:mod:`torchobs.detect.growth`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.catalog.findings import finding
from torchobs.detect.growth import NEAR_S, Growth, soonest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.probes.context import ProbeContext


@dataclass(slots=True)
class Suspicion:
    """Whether the host's memory leaks: set by the memory probe, read by the leak probe, both in the sampler thread."""

    host: bool = False


class GrowthVerdict(NamedTuple):
    """Growth, the trends compared with the limit, and the bytes left to it."""

    growth: Growth | None
    trends: tuple[Growth | None, ...]
    left: float | None

    def time_to_limit_s(self) -> float | None:
        """Return the seconds until the fastest trend reaches the limit."""
        return None if self.left is None else soonest(self.trends, self.left)


class GrowthGauges:
    """``growth_per_step`` and ``time_to_limit`` of one space, and the event when the limit is near."""

    def __init__(self, context: ProbeContext, space: str) -> None:
        self._context, self._attributes = context, {"space": space}
        self._reported = False

    def show(self, verdicts: Sequence[GrowthVerdict]) -> bool:
        """Publish the fastest growth and the earliest limit of these spaces (several devices, for example).

        Return True if a limit that is near has just been reported.
        """
        per_step = max((one.growth.per_step for one in verdicts if one.growth is not None), default=None)
        if per_step is None:
            return False
        seconds = min((found for one in verdicts if (found := one.time_to_limit_s()) is not None), default=None)
        for metric, value in ((catalog.MEMORY_GROWTH_PER_STEP, per_step), (catalog.MEMORY_TIME_TO_LIMIT, seconds)):
            self._context.set_gauge(metric, nan if value is None else value, self._attributes)
        near = seconds is not None and seconds <= NEAR_S
        fresh, self._reported = near and not self._reported, near
        if fresh:
            attributes = {**self._attributes, "per_step": per_step, "time_to_limit": seconds}
            self._context.event(catalog.EVENT_MEMORY_GROWTH, attributes)
            grown = finding("memory_growth", memory=self._attributes["space"].capitalize(), per_step=per_step, left=seconds)
            self._context.warn_limited("memory growth", grown.short, own=True)
        return fresh
