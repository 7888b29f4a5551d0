"""Findings on time, memory and unsaved work. Pure functions of a rank's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from statistics import fmean, median

from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.detect import speed
from torchobs.detect.hangs import LEAST_S
from torchobs.diagnosis import health, text_format
from torchobs.diagnosis.health import INFO, WARNING, stated
from torchobs.diagnosis.rank_report import Fact, RankReport, Step, model_begins
from torchobs.diagnosis.status import reported
from torchobs.ranks import state

_FIRST = 3
"""First steps, which start workers and fill caches."""
_LEAST_EARLIER = 16
_LEAST_LOSS_S = 60.0
_PLACES = 3
_LEAKED = 3


def pace(report: RankReport) -> Iterator[Finding]:
    """Yield the findings on time and memory."""
    yield from _unsaved(report)
    yield from _not_saved(report)
    yield from _held_up(report)
    yield from _slowed(report)
    yield from _waited(report)
    yield from _grew(report)
    yield from _recompiled(report)
    yield from _changed(report)
    yield from _unseen(report)


def _unsaved(report: RankReport) -> Iterator[Finding]:
    """Yield how much unsaved work was lost with a rank that did not finish."""
    if report.up or report.reason == "finished" or not report.last_step or not report.end_known:
        return
    saved_s = report.value(catalog.CHECKPOINT_TIMESTAMP)
    ran_s = report.last_s - report.start_s
    if saved_s is None or saved_s < report.start_s:
        if report.partial:
            return  # the event may be among the missing ones
        if ran_s >= _LEAST_LOSS_S and report.rank == "0":
            text = f"No checkpoint was seen: all of its {text_format.duration(ran_s)} are lost, unless something unseen saved."
            yield stated(WARNING, "no_checkpoint", text)
        return
    later = sum(step.end_s > saved_s for step in report.steps)
    more = "" if later < len(report.steps) and not report.partial else " or more"
    # the clocks are read separately, and the last heartbeat may be older than a save right at the end
    age_s = report.last_s - saved_s
    when = f"{text_format.duration(age_s)} before the end" if age_s >= state.BEAT_S else "at the end"
    if not later and not more:
        yield stated(INFO, "checkpoint_age", f"The last checkpoint was complete {when}: no step must be done again.")
        return
    text = f"The last checkpoint was complete {when}"
    yield stated(INFO, "checkpoint_age", f"{text}: {text_format.plural(later, 'step')}{more} must be done again.")


def _not_saved(report: RankReport) -> Iterator[Finding]:
    """Yield that saves raised, with the last exception, whether there was room, and the last checkpoint that was saved."""
    told = report.events_named(catalog.EVENT_CHECKPOINT_FAILED)
    if not told:
        yield from health.failed_saves([reported(report)])
        return
    last = told[-1]
    why, free, needed = last.text("exception.type").removeprefix("builtins."), last.number("free"), last.number("needed")
    if free is not None and needed is not None and free < needed:
        why = f"{why}: {text_format.size(free)} were left on the file system, a checkpoint takes {text_format.size(needed)}"
    good = last.count("saved_step")
    last_good = f"The last one that was is of step {good:,}." if good else "None was before."
    yield from health.failed_saves([reported(report)], why, last_good)


def _held_up(report: RankReport) -> Iterator[Finding]:
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
    seconds, step = max(long, key=itemgetter(0))
    phase = max(catalog.PHASES, key=lambda name: step.phase_s.get(name, 0.0))
    more = f"; so did {text_format.plural(len(long) - 1, 'more step')}" if len(long) > 1 else ""
    span, normal = text_format.duration(seconds), text_format.duration(usual_s)
    text = f"Step {step.step:,} took {span}, where {normal} was usual, most of it in the phase"
    yield stated(INFO, "held_up", f"{text} {phase}{more}.")  # e.g. a stopped process, a file system, a debugger prompt


def _slowed(report: RankReport) -> Iterator[Finding]:
    """Yield that the last steps were slow, and in which phase."""
    latest = report.steps[model_begins(report.steps, len(report.steps)) :]
    timed = [step for step in latest if step.duration_s is not None][_FIRST:]
    begin = speed.slowed_from([step.duration_s or 0.0 for step in timed]) if report.newest_is_here else None
    if begin is None:
        return
    earlier, late = timed[:begin], timed[begin:]
    usual_s, now_s = (fmean(step.duration_s or 0.0 for step in steps) for steps in (earlier, late))
    phase, excess_s = _grown_phase(earlier, late)
    took = text_format.duration(sum(step.duration_s or 0.0 for step in late))
    now, usual = text_format.duration(now_s), text_format.duration(usual_s)
    text = f"Its last {len(late):,} steps ({took}) took {now} each, usual was {usual}"
    share = text_format.percent(min(1.0, excess_s / (now_s - usual_s)))
    yield stated(WARNING, "slowdown", f"{text}; {share} of the difference is {phase}.")


def _grown_phase(earlier: Sequence[Step], late: Sequence[Step]) -> tuple[str, float]:
    def typical(steps: Sequence[Step], phase: str) -> float:
        return fmean(step.phase_s.get(phase, 0.0) for step in steps)

    excess = {phase: typical(late, phase) - typical(earlier, phase) for phase in catalog.PHASES}
    phase = max(excess, key=lambda name: excess[name])
    return phase, excess[phase]


def _waited(report: RankReport) -> Iterator[Finding]:
    """Yield that training waited for data, with the workers' queue, or the one wait that was most of it."""
    for told in health.waiting([reported(report)]):
        waits = [(step.phase_s.get("data", 0.0), step.step) for step in report.steps]
        (longest_s, at), hint = max(waits, default=(0.0, 0)), ""
        if len(waits) > _LEAST_EARLIER and longest_s > sum(seconds for seconds, _ in waits) / 2:
            hint = f" Most of it was one wait of {text_format.duration(longest_s)}, in step {at:,}: something stalled there."
        elif report.value(catalog.DATA_BATCHES_READY) == 0:
            hint = " Its workers had no batch ready at the end: more workers, or less work for each."
        yield stated(told.severity, told.kind, told.long + hint)


def _grew(report: RankReport) -> Iterator[Finding]:
    for fact in report.events_named(catalog.EVENT_MEMORY_GROWTH)[-1:]:
        where = "Device" if fact.text("space") == "device" else "Host"
        grown, left = text_format.size(fact.number("per_step")), text_format.duration(fact.number("time_to_limit"))
        text = f"{where} memory grew by {grown} a step, and would have reached its limit in {left} when this was found."
        yield stated(WARNING, "memory_growth", text)
    for fact in report.events_named(catalog.EVENT_MEMORY_LEAK)[-1:]:
        yield stated(WARNING, "memory_leak", _leaked(fact))


def _leaked(fact: Fact) -> str:
    """Return what grew, by tensors, lines and types of objects."""
    where = "Device" if fact.text("space") == "device" else "Host"
    tables = {"lines": "made at ", "tensors": "tensors ", "objects": "objects "}
    rows = {name: fact.texts(name, _LEAKED, 200) for name in tables}
    told = [f"{word}{'; '.join(rows[name])}" for name, word in tables.items() if rows[name]]
    grown, steps = text_format.size(fact.number("grown")), text_format.plural(fact.count("steps"), "step")
    what = f"Living more than before: {', '.join(told)}." if told else "No object of Python's became more: look at native code."
    return f"{where} memory grew by {grown} while it was watched for {steps}. {what}"


def _recompiled(report: RankReport) -> Iterator[Finding]:
    storms = {fact.text("location"): fact for fact in report.events_named(catalog.EVENT_RECOMPILE_STORM)}
    again = Counter(fact.text("location") for fact in report.events_named(catalog.EVENT_RECOMPILE))
    for location, fact in list(storms.items())[-_PLACES:]:
        times = max(again[location], fact.count("recompiles"))  # reported at the fourth, then once a minute
        why = f"its guard on {fact.text('guard')} failed, {fact.text('expression')}"
        text = f"torch.compile compiled {location} again and again ({times:,} times): {why}."
        yield stated(WARNING, "recompile_storm", text)
    count = len(report.events_named(catalog.EVENT_COMPILE_FAILED))
    if count:
        last = report.events_named(catalog.EVENT_COMPILE_FAILED)[-1]
        text = f"torch.compile gave {last.text('location')} up ({last.text('reason')}): it ran uncompiled"
        yield stated(WARNING, "compile_failure", f"{text}{f', and {count - 1} more' if count > 1 else ''}.")
    yield from _broken(report)


def _broken(report: RankReport) -> Iterator[Finding]:
    """Yield graph breaks in compiled code, which is correct but slower than intended."""
    told = report.events_named(catalog.EVENT_GRAPH_BREAK)
    if told:
        places = [f"{fact.text('location')} ({fact.text('message')})" for fact in told[:_PLACES]]
        more = f", and {text_format.plural(len(told) - len(places), 'more place')}" if len(told) > len(places) else ""
        yield stated(INFO, "graph_breaks", f"torch.compile had to end a graph at {', '.join(places)}{more}.")


def _changed(report: RankReport) -> Iterator[Finding]:
    """Yield that baselines were begun anew: losses and step times before and after are not comparable.

    Whether the former parameters are trained on beside the new ones (a late actor) is not known when these begin.
    """
    changes = int(report.value(catalog.MODEL_CHANGES) or 0)
    if changes:
        last = report.events_named(catalog.EVENT_MODEL_CHANGE)[-1:]
        again = "" if changes == 1 else f", {changes:,} times"
        when = f"{', the last time' if again else ''} in step {last[0].step:,}" if last and last[0].step is not None else ""
        what = "the next model, fold or trial, or a part that begins late"
        text = f"It began to train parameters that it had not trained before{again}{when} ({what})"
        judged = "before and after it" if changes == 1 else "from one to the next"
        yield stated(INFO, "model_changes", f"{text}: losses and step times {judged} are judged apart.")


def _unseen(report: RankReport) -> Iterator[Finding]:
    """Yield gaps in the data: probes that are off, GPUs and workers that are gone, items that did not fit."""
    status = reported(report)
    yield from health.probes_off([status])
    if report.up or report.reason == "finished":  # else they are told as what led to the end
        yield from health.broken([status])
    dropped = {what: int(count) for what, count in report.by_attribute(catalog.FLIGHT_DROPPED).items() if count}
    if dropped:
        items = ", ".join(f"{count:,} {what}s" for what, count in dropped.items())
        yield stated(INFO, "dropped", f"Did not fit the file: {items}.")
