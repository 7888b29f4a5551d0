"""Memory growth per step, and the time until the limit, by the trend of memory that stays (:mod:`torchobs.detect.growth`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog.findings import finding
from torchobs.detect.growth import NEAR_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.detect.growth import Growth
    from torchobs.probes.context import ProbeContext

    Verdict = tuple[Growth | None, float | None]
    """A space's growth, and the seconds until its limit by the fastest of its trends"""


@dataclass(slots=True)
class Suspicion:
    """Whether the host's memory leaks: set by the memory probe, read by the leak probe, both in the sampler thread."""

    host: bool = False
    is_steep: bool = False
    """Whether it grows so fast that graphs of forward passes without a backward may be kept: to be proven"""


class GrowthGauges:
    """``growth_per_step`` and ``time_to_limit`` of one space, and the event when the limit is near."""

    def __init__(self, context: ProbeContext, space: str) -> None:
        self._context, self._attributes = context, {"space": space}
        self._reported = False

    def show(self, verdicts: Sequence[Verdict]) -> bool:
        """Publish the fastest growth and the earliest limit of these spaces (several devices, for example).

        Return whether a limit that is near has just been reported.
        """
        per_step = max((growth.per_step for growth, _ in verdicts if growth is not None), default=None)
        if per_step is None:
            return False
        seconds = min((left_s for _, left_s in verdicts if left_s is not None), default=None)
        for metric, value in ((catalog.MEMORY_GROWTH_PER_STEP, per_step), (catalog.MEMORY_TIME_TO_LIMIT, seconds)):
            self._context.set_gauge(metric, nan if value is None else value, self._attributes)
        near = seconds is not None and seconds <= NEAR_S
        fresh, self._reported = near and not self._reported, near
        if fresh:
            attributes = {**self._attributes, "per_step": per_step, "time_to_limit": seconds}
            self._context.event(catalog.EVENT_MEMORY_GROWTH, attributes)
            grown = finding("memory_growth", memory=self._attributes["space"].capitalize(), per_step=per_step, left=seconds)
            self._context.warn_limited("memory growth", grown.short, rank_only=True)
        return fresh
