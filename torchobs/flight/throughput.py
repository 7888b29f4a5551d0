"""Throughput of a rank: a pure function of its latest step records, used by every view.

Rates are per second of wall time, as ``rate()`` over the counters gives them: pauses between steps count. The window is the
last 256 records (one per step, and one more for values that a device delivers late) of the last minute, but at least eight
steps: stable where steps are fast, and not an hour old where they are slow.
"""

from __future__ import annotations

from math import isfinite
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import PHASES
from torchobs.detect.speed import Spent
from torchobs.flight.forward import NO_SHARE, ForwardShare
from torchobs.flight.layout import PHASE_NAMES
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDS = 256
"""Number of records to read; more do not change the result."""
WINDOW_S = 60.0
LEAST_STEPS = 8


class Throughput(NamedTuple):
    """Throughput over the latest steps. Times in seconds."""

    steps: int
    """number of steps in the window"""
    step_s: float
    """median, so that steps beside a checkpoint do not matter"""
    mean_s: float
    """mean, the estimate for the next steps, without evaluations and checkpoints"""
    phases_s: tuple[float, ...]
    """mean per step in each of ``catalog.PHASES``"""
    window_s: float
    """from the end of the first step to the end of the last"""
    per_s: float | None
    """steps per second of wall time, evaluations and checkpoints included; None: one step only"""
    tokens_per_s: float | None
    samples_per_s: float | None
    """None if they are neither given to torchobs.log() nor inferred"""

    @property
    def shares(self) -> tuple[float, ...]:
        """Each phase's share of the step; they add up to 1."""
        whole = sum(self.phases_s)
        return tuple(part / whole if whole > 0 else 0.0 for part in self.phases_s)

    @property
    def spent(self) -> Spent:
        """The input for comparing ranks."""
        return Spent(self.steps, self.phases_s)


def pace(records: Sequence[StepRecord], share: ForwardShare = NO_SHARE) -> Throughput | None:
    """Return the throughput over the newest of ``records``; ``None`` if these have no timed step.

    ``share``: that of the forward pass as the file has it.
    """
    recent = records[-RECORDS:]
    steps = _latest([record for record in recent if _is_timed(record)])
    if not steps:
        return None
    columns = dict(zip(PHASE_NAMES, zip(*[record.phase_s for record in steps], strict=True), strict=True))
    divided = zip(*[share.divide(record.phase_s, record.gap_s) for record in steps], strict=True)
    columns |= dict(zip(("forward", "other", "between"), divided, strict=True))
    durations, first_ns = [record.duration_s for record in steps], steps[0].end_ns
    elapsed_s = (steps[-1].end_ns - first_ns) / 1e9
    timed = elapsed_s if elapsed_s > 0 else None
    # the first step's samples were processed before the window
    later = [record for record in recent if record.end_ns > first_ns]
    return Throughput(
        steps=len(steps),
        step_s=median(durations),
        mean_s=fmean(durations),
        phases_s=tuple(fmean(columns[phase]) for phase in PHASES),
        window_s=max(elapsed_s, 0.0),
        per_s=(len(steps) - 1) / timed if timed else None,
        tokens_per_s=_per_s(sum([record.tokens for record in later]), timed),
        samples_per_s=_per_s(sum([record.samples for record in later]), timed),
    )


def usual_step_s(records: Sequence[StepRecord]) -> float | None:
    """Return the median duration of the newest of ``records`` in seconds; ``None`` if these have no timed step."""
    durations = [record.duration_s for record in records[-RECORDS:] if _is_timed(record)]
    return median(durations) if durations else None


def time_left_s(throughput: Throughput | None, done: int, total: float, aside_s: float) -> float | None:
    """Estimate the seconds left until ``total`` steps; the ``done`` ones took ``aside_s`` of evaluation and checkpoints.

    These are assumed to recur as often as before, for the latest steps may contain none. ``None`` without a throughput, or
    without a total that is still ahead.
    """
    if throughput is None or throughput.per_s is None or not 0 < done < total:
        return None
    left_s = (total - done) * (throughput.mean_s + aside_s / done)
    return left_s if isfinite(left_s) else None


def speed(throughput: Throughput | None) -> dict[str, float | None] | None:
    """Return the rates for JSON; ``None`` without a throughput."""
    if throughput is None or throughput.per_s is None:
        return None
    return {
        "steps_per_s": throughput.per_s,
        "tokens_per_s": throughput.tokens_per_s,
        "samples_per_s": throughput.samples_per_s,
        "steps": throughput.steps,
        "window_s": throughput.window_s,
    }


def _latest(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    begin = next((index for index, record in enumerate(steps) if steps[-1].end_ns - record.end_ns <= WINDOW_S * 1e9), 0)
    return steps[min(begin, max(0, len(steps) - LEAST_STEPS)) :]


def _is_timed(record: StepRecord) -> bool:
    return record.kind == RecordKind.STEP and not record.flags & StepFlag.UNTIMED


def _per_s(amount: int, elapsed_s: float | None) -> float | None:
    return amount / elapsed_s if amount and elapsed_s else None
