"""How fast a rank has been lately: a pure function of its latest step records."""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import PHASES
from torchobs.flight.record import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.flight.record import StepRecord


class Pace(NamedTuple):
    """Of the latest steps. Times in seconds."""

    steps: int
    """that it is the pace of"""
    step_s: float
    """median, so that a checkpoint's neighbour does not count"""
    phases_s: tuple[float, ...]
    """mean per step in each of ``catalog.PHASES``"""
    per_s: float | None
    """steps per second of the clock, evaluations and checkpoints between them included; None: one step only"""
    tokens_per_s: float | None
    samples_per_s: float | None
    """None where torchobs.log() was given none"""

    @property
    def shares(self) -> tuple[float, ...]:
        """Each phase's share of the step; they add up to 1."""
        whole = sum(self.phases_s)
        return tuple(part / whole if whole > 0 else 0.0 for part in self.phases_s)


def pace(records: Sequence[StepRecord]) -> Pace | None:
    """Return the pace in a row of records; ``None`` if there is no timed step among them."""
    steps = [record for record in records if _is_timed(record)]
    if not steps:
        return None
    phases = [sum(record.phase_s[index] for record in steps) / len(steps) for index in range(len(PHASES))]
    elapsed_s = (steps[-1].end_ns - steps[0].end_ns) / 1e9
    timed = elapsed_s if len(steps) > 1 and elapsed_s > 0 else None
    # what the first step brought was done before the time that is looked at
    later = [record for record in records if record.end_ns > steps[0].end_ns]
    return Pace(
        steps=len(steps),
        step_s=median(record.duration_s for record in steps),
        phases_s=tuple(phases),
        per_s=(len(steps) - 1) / timed if timed else None,
        tokens_per_s=_per_s(sum(record.tokens for record in later), timed),
        samples_per_s=_per_s(sum(record.samples for record in later), timed),
    )


def _is_timed(record: StepRecord) -> bool:
    # not finite, or negative, is forged
    plausible = record.duration_s >= 0 and isfinite(record.duration_s + sum(record.phase_s))
    return record.kind == Kind.STEP and not record.flags & Flag.UNTIMED and plausible


def _per_s(amount: int, elapsed_s: float | None) -> float | None:
    return amount / elapsed_s if amount and elapsed_s else None
