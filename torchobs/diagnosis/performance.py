"""Findings on time, memory and unsaved work. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from statistics import fmean, median

from torchobs import catalog
from torchobs.catalog.findings import Finding, finding
from torchobs.detect import speed
from torchobs.detect.hangs import LEAST_S
from torchobs.diagnosis import health
from torchobs.ranks import state
from torchobs.ranks.rank_view import RankView, Step, model_begins

_FIRST = 3
"""First steps, which start workers and fill caches."""
_LEAST_EARLIER = 16


def pace(report: RankView) -> Iterator[Finding]:
    """Yield the findings on time and memory."""
    yield from _unsaved(report)
    yield from health.failed_saves([report])
    yield from _held_up(report)
    yield from _slowed(report)
    yield from _waited(report)
    yield from health.between([report])
    yield from health.probes_off([report])
    if report.up or report.reason == "finished":  # else they are reported as what led to the end
        yield from health.broken([report])
    dropped = {what: int(count) for what, count in report.by_attribute(catalog.FLIGHT_DROPPED).items() if count}
    if dropped:
        yield finding("dropped", items=[f"{count:,} {what}s" for what, count in dropped.items()])


def _unsaved(report: RankView) -> Iterator[Finding]:
    """Yield how much unsaved work was lost with a rank that did not finish."""
    saved_s = report.value(catalog.CHECKPOINT_TIMESTAMP)
    if report.up or report.reason == "finished" or not report.last_step or not report.end_known:
        return
    if saved_s is None or saved_s < report.start_s:
        return  # something unseen may have saved
    lost = sum(step.end_s > saved_s for step in report.steps)
    # the clocks are read separately, and the last heartbeat may be older than a save right at the end
    age_s = report.last_s - saved_s
    more = lost >= len(report.steps) or report.partial
    if more and not lost:
        return
    yield finding("checkpoint_age", age=age_s if age_s >= state.BEAT_S else None, lost=lost or None, more=more)


def _held_up(report: RankView) -> Iterator[Finding]:
    """Yield steps as long as a stall (see ``stall``) after which training continued."""
    # without evaluation, checkpoints and compilation
    took = [
        (sum(step.phase_s.get(name, 0.0) for name in catalog.PHASES), step)
        for step in report.steps[model_begins(report.steps, len(report.steps)) :][_FIRST:]
    ]
    if len(took) < _LEAST_EARLIER:
        return
    usual_s = median([seconds for seconds, _ in took])
    long = [(seconds, step) for seconds, step in took if seconds >= max(LEAST_S, state.HANG_FACTOR * usual_s)]
    if not long:
        return
    seconds, step = max(long, key=itemgetter(0))  # e.g. a stopped process, a file system, a debugger prompt
    phase = max(catalog.PHASES, key=lambda name: step.phase_s.get(name, 0.0))
    yield finding("held_up", step=step.step, took=seconds, usual=usual_s, phase=phase, more=len(long) - 1 or None)


def _slowed(report: RankView) -> Iterator[Finding]:
    """Yield that the last steps were slow, and in which phase."""
    latest = report.steps[model_begins(report.steps, len(report.steps)) :]
    timed = [step for step in latest if step.duration_s is not None][_FIRST:]
    begin = speed.slowed_from([_took_s(step) for step in timed]) if report.newest_is_here else None
    if begin is None:
        return
    earlier, late = timed[:begin], timed[begin:]
    usual_s, now_s = (fmean(map(_took_s, steps)) for steps in (earlier, late))
    phase, excess_s = _grown_phase(earlier, late)
    took, share = sum(map(_took_s, late)), min(1.0, excess_s / (now_s - usual_s))
    one = len(late) == 1
    yield finding("slowdown", steps=len(late), one=one, took=took, now=now_s, usual=usual_s, share=share, phase=phase)


def _took_s(step: Step) -> float:
    """Return how long a step took, with what was compiled in it: who recompiles in every step is slow."""
    return (step.duration_s or 0.0) + step.phase_s.get("compile", 0.0)


def _grown_phase(earlier: Sequence[Step], late: Sequence[Step]) -> tuple[str, float]:
    def typical(steps: Sequence[Step], phase: str) -> float:
        return fmean(step.phase_s.get(phase, 0.0) for step in steps)

    excess = {phase: typical(late, phase) - typical(earlier, phase) for phase in (*catalog.PHASES, "compile")}
    phase = max(excess, key=lambda name: excess[name])
    return phase, excess[phase]


def _waited(report: RankView) -> Iterator[Finding]:
    """Yield that training waited for data, with the workers' queue, or the one wait that was most of it."""
    for waiting in health.waiting([report]):
        waits = [(step.phase_s.get("data", 0.0), step.step) for step in report.steps]
        longest_s, at = max(waits, default=(0.0, 0))
        if len(waits) > _LEAST_EARLIER and longest_s > sum(seconds for seconds, _ in waits) / 2:
            yield waiting._replace(step=at, values={**waiting.values, "wait": longest_s})
        else:
            no_batch = report.value(catalog.DATA_BATCHES_READY) == 0
            yield waiting._replace(values={**waiting.values, "no_batch": no_batch})
