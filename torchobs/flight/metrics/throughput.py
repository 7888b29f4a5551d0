"""How fast a rank is: a pure function of its latest step records, the same for whoever shows it.

Speeds are those of the clock, as ``rate()`` over the counters has them: what lies between two steps counts. They are over the
last 256 records (a step is one, and one more for what a device delivers of it afterwards), of which those of the last minute
count, but at least eight steps: steady where steps are fast, and not of an hour ago where they are slow.
"""

from __future__ import annotations

from math import isfinite
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import PHASES
from torchobs.detect.stragglers import Spent
from torchobs.flight.format.step_record import RecordKind, StepFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.flight.format.step_record import StepRecord

RECORDS = 256
"""As many as have to be read; more change nothing."""
WINDOW_S = 60.0
LEAST_STEPS = 8
_TENTH = 0.1


class Throughput(NamedTuple):
    """Of the latest steps. Times in seconds."""

    steps: int
    """that it is the pace of"""
    step_s: float
    """median, so that a checkpoint's neighbour does not count"""
    mean_s: float
    """mean: what the next ones will take, evaluations and checkpoints apart"""
    phases_s: tuple[float, ...]
    """mean per step in each of ``catalog.PHASES``"""
    aside_s: float
    """mean per step of evaluation, checkpoints and compilation beside it"""
    window_s: float
    """from the end of the first of the steps to the end of the last"""
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

    @property
    def spent(self) -> Spent:
        """What a rank is compared with its peers by."""
        return Spent(self.steps, self.phases_s, self.aside_s)


def pace(records: Sequence[StepRecord]) -> Throughput | None:
    """Return the pace at the end of a row of records; ``None`` if there is no timed step among the last of them."""
    recent = records[-RECORDS:]
    steps = _latest([record for record in recent if _is_timed(record)])
    if not steps:
        return None
    phases = [fmean(record.phase_s[index] for record in steps) for index in range(len(PHASES))]
    elapsed_s = (steps[-1].end_ns - steps[0].end_ns) / 1e9
    timed = elapsed_s if elapsed_s > 0 else None
    # what the first step brought was done before the time that is looked at
    later = [record for record in recent if record.end_ns > steps[0].end_ns]
    return Throughput(
        steps=len(steps),
        step_s=median(record.duration_s for record in steps),
        mean_s=fmean(record.duration_s for record in steps),
        phases_s=tuple(phases),
        aside_s=fmean(sum(record.phase_s[len(PHASES) :]) for record in steps),
        window_s=max(elapsed_s, 0.0),
        per_s=(len(steps) - 1) / timed if timed else None,
        tokens_per_s=_per_s(sum(record.tokens for record in later), timed),
        samples_per_s=_per_s(sum(record.samples for record in later), timed),
    )


def time_left_s(found: Throughput | None, done: int, total: float, aside_s: float) -> float | None:
    """Return the seconds that are left of ``total`` steps, ``done`` of which took ``aside_s`` of evaluation and checkpoints.

    Those go on as often as before: the pace of the steps between two evaluations knows nothing of the next one. ``None`` where
    there is no pace, or no end in sight: no total, or one that has been passed.
    """
    if found is None or found.per_s is None or not 0 < done < total:
        return None
    left_s = (total - done) * (found.mean_s + aside_s / done)
    return left_s if isfinite(left_s) else None


def speed(found: Throughput | None) -> dict[str, float | None] | None:
    """Return what programs are told of it; ``None`` if there is none."""
    if found is None or found.per_s is None:
        return None
    return {
        "steps_per_s": found.per_s,
        "tokens_per_s": found.tokens_per_s,
        "samples_per_s": found.samples_per_s,
        "steps": found.steps,
        "window_s": found.window_s,
    }


def in_figures(per_s: float) -> str:
    """Return how many there are in a second, in three digits at least: ``0.0214``, ``1.90``, ``45,300``."""
    if not isfinite(per_s) or 0 < abs(per_s) < _TENTH:
        return f"{per_s:.3g}"
    return f"{per_s:,.{max(0, 3 - len(str(int(abs(per_s)))))}f}"


def _latest(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    begin = next((index for index, one in enumerate(steps) if steps[-1].end_ns - one.end_ns <= WINDOW_S * 1e9), 0)
    return steps[min(begin, max(0, len(steps) - LEAST_STEPS)) :]


def _is_timed(record: StepRecord) -> bool:
    # not finite, or negative, is forged
    plausible = record.duration_s >= 0 and isfinite(record.duration_s + sum(record.phase_s))
    return record.kind == RecordKind.STEP and not record.flags & StepFlag.UNTIMED and plausible


def _per_s(amount: int, elapsed_s: float | None) -> float | None:
    return amount / elapsed_s if amount and elapsed_s else None
