"""Findings on time, memory and unsaved work. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.catalog.findings import Finding, finding
from torchobs.detect import speed
from torchobs.detect.growth import NEAR_S
from torchobs.detect.hangs import LEAST_S
from torchobs.diagnosis.endings import failed_saves, is_ended_by_a_save, last_words
from torchobs.diagnosis.from_events import from_events
from torchobs.flight.layout import PHASE_NAMES
from torchobs.ranks import state
from torchobs.ranks.events import WORKER_DIED
from torchobs.ranks.rank_view import RankView, Step, model_begins

_FIRST = 3
"""First steps, which start workers and fill caches."""
_LEAST_EARLIER = 16
_LEAST_PHASE_S = LEAST_S / len(catalog.PHASES)
"""The longest phase of a step as long as a stall lasts at least so long."""
_COMPILE = PHASE_NAMES.index("compile")


def pace(report: RankView) -> Iterator[Finding]:
    """Yield the findings on time and memory."""
    yield from _unsaved(report)
    yield from _failed_saves(report)
    yield from _held_up(report)
    yield from _slowed(report)
    yield from _waited(report)
    yield from _growing(report)
    yield from between(report)
    if report.probes_off:
        yield finding("probes_off", probes=", ".join(sorted(report.probes_off)))
    yield from _broken(report)
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
    long_phases = map(_LEAST_PHASE_S.__le__, chain.from_iterable(step.phases for step in report.steps))
    if _span_s(report) < LEAST_S or not any(long_phases):
        return  # a thousand ranks a second
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


def _span_s(report: RankView) -> float:
    """Return the time that the steps at hand cover; without the first, which is no measure."""
    return report.steps[-1].end_s - report.steps[0].end_s if report.steps else 0.0


def _slowed(report: RankView) -> Iterator[Finding]:
    """Yield that the last steps were slow, and in which phase."""
    if _span_s(report) < speed.LATELY_S + speed.EARLIER_S:
        return
    latest = report.steps[model_begins(report.steps, len(report.steps)) :]
    timed = [step for step in latest if step.duration_s is not None][_FIRST:]
    begin = speed.slowed_from([_took_s(step) for step in timed]) if report.newest_is_here else None
    if begin is None:
        return
    earlier, late = timed[:begin], timed[begin:]
    usual_s, now_s = (fmean(map(_took_s, steps)) for steps in (earlier, late))
    phase, excess_s = _grown_phase(*([step.divided_s(report.share) for step in steps] for steps in (earlier, late)))
    took, share = sum(map(_took_s, late)), min(1.0, excess_s / (now_s - usual_s))
    values = {"now": now_s, "usual": usual_s, "share": share, "phase": phase}
    yield finding("slowdown", steps=len(late), one=len(late) == 1, took=took, **dict[str, Any](values))


def _took_s(step: Step) -> float:
    """Return how long a step took, compilation included: a training that recompiles in every step is slow."""
    compiled_s = step.phases[_COMPILE]
    return (step.duration_s or 0.0) + (compiled_s if isfinite(compiled_s) else 0.0)


def _grown_phase(earlier: Sequence[Mapping[str, float]], late: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    def typical(steps: Sequence[Mapping[str, float]], phase: str) -> float:
        return fmean(step.get(phase, 0.0) for step in steps)

    excess = {phase: typical(late, phase) - typical(earlier, phase) for phase in (*catalog.PHASES, "compile")}
    phase = max(excess, key=lambda name: excess[name])
    return phase, excess[phase]


def _waited(report: RankView) -> Iterator[Finding]:
    """Yield that training waits for data, or did; with the single wait that was most of it, else whether a batch is ready."""
    share = report.waiting
    if share is None:
        return
    values: dict[str, Any] = {"up": report.up, "share": share or None}
    waits = [(step.phase_s.get("data", 0.0), step.step) for step in report.steps]
    longest_s, at = max(waits, default=(0.0, 0))
    if len(waits) > _LEAST_EARLIER and longest_s > sum(seconds for seconds, _ in waits) / 2:
        yield finding("data", step=at, wait=longest_s, **values)
    else:
        yield finding("data", no_batch=report.value(catalog.DATA_BATCHES_READY) == 0, **values)


def between(report: RankView) -> Iterator[Finding]:
    """Yield the line on which the time between the phases of a step goes, if that is much."""
    function, location = report.events.between
    if report.between and function:
        yield finding("between", share=report.between, function=function, location=location)


def _failed_saves(report: RankView) -> Iterator[Finding]:
    """Yield that checkpoints could not be saved; a warning if one was since. A script that catches the exception goes on."""
    saves = failed_saves(report)
    if saves and not is_ended_by_a_save(report):
        is_over = report.value(catalog.CHECKPOINT_FAILURE_STREAK) == 0
        yield finding("checkpoint_failed_once" if is_over else "checkpoint_failed", **saves)


def _growing(report: RankView) -> Iterator[Finding]:
    """Yield that memory is soon full; of a rank that was killed, that it was ever growing."""
    event = from_events(report.events).get("memory_growth")
    if not report.up and report.reason != "finished":
        if event is not None:
            yield event._replace(values={**event.values, "ended": True, "time_to_limit": None})
        return
    for space in catalog.SPACE.values:
        left_s = report.value(catalog.MEMORY_TIME_TO_LIMIT, space)
        if left_s is not None and left_s <= NEAR_S:
            grown = event.values.get("per_step") if event is not None and event.values.get("space") == space else None
            memory, left, over = space.capitalize(), left_s if report.up else None, None if report.up else left_s
            yield finding("memory_growth", memory=memory, left=left, time_to_limit=over, per_step=grown, ended=not report.up)


def _broken(report: RankView) -> Iterator[Finding]:
    """Yield that GPUs have failed, and that workers of data loaders have died; info once the script has gone on for long."""
    status = report.values(catalog.HW_STATUS).items() if report.up else ()
    if gpus := sorted({gpu for (gpu, _, state), is_so in status if state == "failed" and is_so}):
        yield finding("gpu_failed", gpus=len(gpus), names=gpus)
    died = report.count(catalog.DATA_WORKERS_DIED)
    if died and "worker_died" not in last_words(report):
        lately = bool(report.lately.get(WORKER_DIED)) and report.state != "finished"
        severity = Severity.WARNING if lately else Severity.INFO
        yield finding("workers_died", severity=severity, workers=died, earlier=not lately and report.up)
