"""Health of a run in a sentence or two, and the findings behind it. Pure: status in, text out.

The live page, ``torchobs top``, ``torchobs inspect`` and the summary of ``torchobs run`` all use these texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import PHASES, Severity
from torchobs.catalog.findings import (
    AT_WORK,
    BADGES,
    ENDED,
    INTERRUPTED,
    NO_STEP,
    NO_STEPS,
    ORIGIN,
    PAST,
    Finding,
    finding,
    sentence,
)
from torchobs.detect.disagreement import differing, drifted, same_batches, same_losses
from torchobs.detect.growth import NEAR_S
from torchobs.detect.hangs import PATIENT_PHASES
from torchobs.detect.learning import is_stuck
from torchobs.detect.speed import LEAST_EXCESS_S, LEAST_STEPS, SLOW
from torchobs.diagnosis import hangs
from torchobs.diagnosis.from_events import GATED, SPOILED, UNTIL_A_STEP, from_events, remembered
from torchobs.diagnosis.numerics import LEAST_NOTABLE, onset, zero_learning_rate
from torchobs.ranks import labels
from torchobs.ranks.events import WORKER_DIED
from torchobs.ranks.rank_view import RankView, RunView
from torchobs.support import text

ERROR, WARNING, INFO = "error", "warning", "info"
LEVELS = {INFO: Severity.INFO, WARNING: Severity.WARNING, ERROR: Severity.ERROR}
_MOST_NAMED = 4
_NOW_S = 1.5
"""Page and terminal are updated every second"""
_NOW = frozenset({"memory_growth", "amp_scale_collapsed"})
"""Kinds of events that a metric of now decides about"""


class Health(NamedTuple):
    """Text and severity of a run's health."""

    level: Severity
    text: str
    gist: str
    """the same without figures that change all the time, for screen readers to announce"""
    badge: str = BADGES[Severity.INFO]
    headline: str = ""
    """the first sentence"""
    findings: tuple[Finding, ...] = ()
    """the worst first; the headline is the first of them if it is worth a look"""


@remembered
def health(run: RunView) -> Health:
    """Return the health of a run. It is all well only if all of its ranks train, or have finished."""
    head = headline(run)
    found = sorted(_findings(run.ranks, run.expected), key=lambda one: -LEVELS[one.severity].value)
    level = max((LEVELS[one.severity] for one in (head, *found)), key=lambda level: level.value)
    badge = str(head.values["badge"]) if level is Severity.INFO else BADGES[level]
    long, gist = (" ".join([first, *(one.short for one in found)]) for first in (head.long, head.short))
    return Health(level, long, gist, badge, head.long, ((head,) if head.severity != INFO else ()) + tuple(found))


def headline(run: RunView) -> Finding:
    """Return the run's progress, that it makes none, or how it ended: ranks, step, loss, speed."""
    loss = next((rank.loss for rank in run.ranks if rank.loss is not None), None)
    alive = [rank for rank in run.ranks if rank.up and rank.state != "unresponsive"]
    if not any(rank.up for rank in run.ranks):
        return _over(run, loss)
    still, activity = standing_still(run), _activity(run, alive)
    values: dict[str, Any] = {"activity": AT_WORK[activity], "hanging": activity == "hanging"}
    if values["hanging"]:
        values["quiet"] = max(rank.progress_age_s or 0.0 for rank in alive)
    elif still:
        longest = max((rank.standstill for rank in still if rank.standstill), key=lambda found: found.seconds)
        values |= {"quiet": longest.seconds, "usual": longest.usual_step, "habitual": longest.habitual}
        values["activity"] = sentence(NO_STEP, {"who": None if len(still) == len(alive) else _named(still)})
    speeds = [rank.speed.per_s for rank in alive if rank.speed and rank.speed.per_s]
    return finding(
        "progress",
        severity=Severity.WARNING if "usual" in values and not values["habitual"] else Severity.INFO,
        badge=BADGES[Severity.INFO] if activity == "training" and not still else NO_STEPS,
        alive=len(alive),
        expected=run.expected,
        world=run.world_size if run.world_size > run.expected else None,
        step=run.steps,
        loss=loss,
        speed=text.rate(min(speeds), "steps") if speeds and run.steps and not still else None,
        **values,
    )


def _over(run: RunView, loss: float | None) -> Finding:
    """Return how a run without a living rank ended."""
    finished, interrupted = all(rank.state == "finished" for rank in run.ranks), _request(run.ranks) == "interrupted"
    exact = any(rank.done == run.steps and not rank.unwritten for rank in run.ranks)
    return finding(
        "over",
        activity=AT_WORK["finished"] if finished else INTERRUPTED if interrupted else AT_WORK["ended"],
        badge=BADGES[Severity.INFO] if finished else ENDED,
        ran=max(rank.ran_s for rank in run.ranks) if interrupted and not finished else None,
        ranks=len(run.ranks),
        steps=run.steps,
        unwritten=run.steps and not exact,
        unknown=not run.steps and not exact,
        loss=loss,
    )


def _request(ranks: Iterable[RankView]) -> str:
    """Return by which request the whole run ended: ``interrupted`` by a person, ``terminated``; empty if it did otherwise."""
    reasons = {"up" if rank.up else rank.reason for rank in ranks} - {"finished"}
    return min(reasons) if reasons and reasons <= {"interrupted", "terminated"} else ""


def standing_still(run: RunView) -> list[RankView]:
    """Return the ranks that stand still; none of a replica group in which one does what the others may wait for."""
    teams = labels.teams(run.ranks)
    patient = [team for team in teams if not any(rank.up and rank.phase in PATIENT_PHASES for rank in team)]
    return [rank for team in patient for rank in team if rank.standstill]


def last_step(status: RankView) -> str:
    """Return when a rank's last step ended, or the rank."""
    if not status.up:
        return f"ended {text.span(status.beat_age_s)} ago"
    if status.progress_age_s is None:
        return text.NONE
    if not status.done:
        return f"none for {text.span(status.progress_age_s)}"
    return "now" if status.progress_age_s < _NOW_S else f"{text.span(status.progress_age_s)} ago"


def _activity(run: RunView, alive: Sequence[RankView]) -> str:
    if not any(rank.recorded for rank in alive):
        return "unrecorded" if alive else "unresponsive"
    if all(rank.state == "hung" for rank in alive):
        return "hanging"
    still = [rank for rank in alive if rank.standstill]
    waited_for = [rank for rank in alive if rank.phase in PATIENT_PHASES] if still else []
    phase, _ = Counter(rank.phase for rank in waited_for or alive).most_common(1)[0]
    return phase if phase in AT_WORK else "training" if run.steps else "starting"


def _findings(ranks: Sequence[RankView], expected: int) -> Iterator[Finding]:
    yield from _deaths(ranks)
    yield from _silences(ranks)
    off = [rank for rank in ranks if rank.up and not rank.recorded]
    if off:
        yield finding("unrecorded", **_who(off))
    yield from beside_each_other(ranks, expected)
    yield from _anomalies(ranks)
    yield from _past(ranks)
    yield from _skips(ranks)
    yield from [zero_learning_rate(rank.zero_rate) for rank in ranks if rank.zero_rate is not None][:1]
    yield from _of_events(ranks)
    yield from failed_saves(ranks)
    yield from _growing(ranks)
    yield from broken(ranks)
    yield from waiting(ranks)
    yield from between(ranks)
    yield from probes_off(ranks)


def beside_each_other(ranks: Sequence[RankView], expected: int) -> Iterator[Finding]:
    """Yield what ranks show that are compared with each other, and how many are missing of so many on this machine."""
    for team in labels.teams(ranks):
        yield from _disagreeing(team)
        yield from _weights_apart(team)
        yield from _batches_alike(team)
    if len(ranks) < expected:
        yield finding("ranks_missing", missing=expected - len(ranks), here=len(ranks), expected=expected)
    yield from _slowest(ranks)


def _who(ranks: Sequence[RankView]) -> dict[str, Any]:
    """Return the subject of a sentence about those ranks."""
    return {"who": text.capital(_named(ranks)), "count": len(ranks)}


def _named(ranks: Sequence[RankView]) -> str:
    return text.ranks([rank.rank for rank in ranks], _MOST_NAMED)


def _where(affected: Sequence[RankView], ranks: Sequence[RankView]) -> str:
    return "" if len(affected) == (sum(rank.up for rank in ranks) or len(ranks)) else _named(affected)


def _deaths(ranks: Sequence[RankView]) -> Iterator[Finding]:
    alike: dict[tuple[str, str], list[RankView]] = {}
    request = _request(ranks)
    for rank in ranks if request != "interrupted" else ():
        if rank.state in {"lost", "failed"}:
            alike.setdefault((rank.reason, rank.exception), []).append(rank)
    for (reason, exception), dead in alike.items():
        severity = Severity.WARNING if request else Severity.ERROR
        yield finding(reason or "lost", severity=severity, exception=exception, **_who(dead))


def _silences(ranks: Sequence[RankView]) -> Iterator[Finding]:
    hung = [rank for rank in ranks if rank.state == "hung"]
    if hung:
        yield finding("hung", **_who(hung))
        yield from waited_for(ranks)
    silent = [rank for rank in ranks if rank.state == "unresponsive"]
    if silent:
        yield finding("unresponsive", **_who(silent))


def waited_for(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the ranks that the others of a hung replica group wait for, and who called another collective than the others."""
    for team in labels.teams(ranks):
        if found := hangs.blamed(team):
            yield finding("waited_for", waiting=hangs.sentences(team, found))
        yield from hangs.mismatches(team)


def _disagreeing(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the ranks with another gradient, though DistributedDataParallel makes it the same on all."""
    norms = {rank.rank: rank.alike_norms for rank in ranks}
    odd = differing(norms) if all(norms.values()) else ()
    if odd:
        step = max(set.intersection(*(set(own) for own in norms.values())))
        values = [f"{name}: {text.number(norms[name][step])}" for name in odd]
        usual = next((own[step] for name, own in norms.items() if name not in odd), None)
        named = f"rank {text.joined(values, 2 * _MOST_NAMED)}"
        yield finding("ranks_disagree", step=step, odd=text.ranks(odd, _MOST_NAMED), norms=named, usual=usual)


def _weights_apart(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the ranks with other weights, though DistributedDataParallel trains one model."""
    found = drifted({rank.rank: rank.weights for rank in ranks})
    if found is not None:
        since, alike, odd = found
        named, everything = text.ranks(odd, 2 * _MOST_NAMED), len(odd) == len(ranks)
        yield finding("weights_differ", step=since, odd=named, all=everything, alike=alike or None)


def _batches_alike(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that all ranks are given the same data."""
    since = same_batches({rank.rank: rank.batches for rank in ranks})
    if since is not None and same_losses(rank.losses for rank in ranks):
        yield finding("same_batches", step=since)


def _anomalies(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield anomalies of now, where their values come from; and a loss that was not finite at the end of a run."""
    sick = [rank for rank in ranks if rank.up and rank.anomalies]
    for kind in catalog.ANOMALY_KINDS:
        affected = [rank for rank in sick if kind in rank.anomalies]
        if affected:
            by_event = (from_events(rank.events).get(kind) for rank in affected)
            anomaly = next(filter(None, by_event), finding(kind))
            since = min(filter(None, (_not_finite_since(rank, kind) for rank in affected)), default=None)
            more = {"since": since, "severity": catalog.ANOMALY_SEVERITY[kind], "where": _where(affected, ranks)}
            values = {**anomaly.values, **more}
            yield anomaly._replace(values=values)
    lost = [rank for rank in ranks if rank.loss is not None and not isfinite(rank.loss)]
    ended = not any(rank.up for rank in ranks)
    if lost and ended:
        yield finding("nonfinite_loss", where=_where(lost, ranks))
    odd = [rank for rank in ranks if {"nonfinite_loss", "nonfinite_gradient"} & {*rank.anomalies}] or (lost if ended else [])
    spoiled = [rank for rank in ranks if SPOILED in from_events(rank.events)]
    origins = [from_events(rank.events)[ORIGIN] for rank in odd if ORIGIN in from_events(rank.events)]
    yield from origins[:1]
    if spoiled and not any("nonfinite_loss" in rank.anomalies or rank in lost for rank in ranks):
        rest = from_events(spoiled[0].events)[SPOILED]
        yield rest._replace(values={**rest.values, "where": _where(spoiled, ranks)})


def _not_finite_since(rank: RankView, kind: str) -> int | None:
    """Return the step since which the loss or norm is not finite; ``None`` if that is older than the steps at hand.

    Its events do not tell: only the first of many in a row have one each.
    """
    if not kind.startswith("nonfinite_"):
        return None
    values = [step.loss if kind == "nonfinite_loss" else step.grad_norm for step in rank.steps]
    first = onset(values)
    if first is None or (rank.steps[first].step > 1 and all(value is None for value in values[:first])):
        return None
    return rank.steps[first].step


def _past(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield past anomalies; one from which the training has not recovered for certain is a warning, if it is a recent one."""
    if not any(any(rank.counted.values()) for rank in ranks):
        return
    ended = not any(rank.up for rank in ranks)
    active = {kind for rank in ranks if rank.up for kind in rank.anomalies}
    counts = {kind: max((rank.counted.get(kind, 0) for rank in ranks), default=0) for kind in PAST}
    if any(rank.value(catalog.AMP_STEPS_SKIPPED) for rank in ranks):
        del counts["nonfinite_gradient"]  # part of normal loss scaling
    counts = {kind: number for kind, number in counts.items() if number and kind not in active}
    unsettled = {kind for rank in ranks for kind, number in rank.counted.items() if number and kind not in rank.past}
    recent = {kind: number for kind, number in counts.items() if kind in unsettled}
    past = {kind: number for kind, number in counts.items() if kind not in unsettled}
    if recent:
        lately = {kind: max((rank.lately.get(kind, 0) for rank in ranks), default=0) for kind in recent}
        notable = any(number >= LEAST_NOTABLE.get(kind, 1) for kind, number in (recent if ended else lately).items())
        word = "There have been" if ended else "Lately:" if notable else "Earlier:"
        severity = Severity.WARNING if notable else Severity.INFO
        yield finding("past_anomalies", severity=severity, word=word, what=_counted(recent))
    if past:
        healthy = min(rank.past[kind] for rank in ranks for kind in past if kind in rank.past)
        yield finding("past_anomalies", word="Past:", what=_counted(past), calm=healthy)


def _counted(numbers: Mapping[str, int]) -> str:
    return text.joined([f"{number:,} {PAST[kind][number > 1]}" for kind, number in numbers.items()])


def _skips(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that a loss scaler skips every step; also of an ended run, whose last steps changed nothing."""
    stuck = [rank for rank in ranks if is_stuck(rank.count(catalog.AMP_SKIP_STREAK), rank.scale)]
    if not stuck:
        return
    collapsed = [rank.scale for rank in stuck if rank.scale is not None and rank.scale < 1]
    if collapsed:
        yield finding("amp_scale_collapsed", scale=min(collapsed))
    else:
        streak, up = max(rank.count(catalog.AMP_SKIP_STREAK) for rank in stuck), any(rank.up for rank in stuck)
        yield finding("amp_skips", where=_where(stuck, ranks), streak=streak, up=up)


def _of_events(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield what events make, each kind once, also of an ended run; and stuck layers whose event is lost."""
    stepped = any(rank.done for rank in ranks)
    found: dict[str, Finding] = {}
    for rank in ranks:
        for kind, one in from_events(rank.events).items():
            if kind in GATED or kind in _NOW or (kind == UNTIL_A_STEP and stepped):
                continue
            if one.severity != INFO:
                found.setdefault(kind, one)
    yield from found.values()
    layers = max((rank.count(catalog.GRAD_UNMOVED_LAYERS) for rank in ranks), default=0)
    if layers and not any(kind.startswith("unmoved_layers") for kind in found):
        yield finding("unmoved_layers", unmoved=layers)


def failed_saves(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that checkpoints could not be saved, an error if none was since; a script that catches the exception goes on."""
    saves = {rank.rank: rank.count(catalog.CHECKPOINTS, "failed") for rank in ranks}
    failed = max(ranks, key=lambda rank: saves[rank.rank], default=None)
    if failed is None or not saves[failed.rank]:
        return
    raised = from_events(failed.events).get("save_raised")
    values = dict[str, Any](raised.values if raised else {})
    free, needed = values.get("free"), values.get("needed")
    full = isinstance(free, (int, float)) and isinstance(needed, (int, float)) and free < needed
    room = {"free": free, "needed": needed} if full else dict[str, Any]()
    last = [rank.value(catalog.CHECKPOINT_FAILURE_STREAK) for rank in ranks if saves[rank.rank]]
    kind = "checkpoint_failed" if any(last) or None in last else "checkpoint_failed_once"
    saved_step = values.get("saved_step") or None
    yield finding(kind, saves=saves[failed.rank], why=values.get("exception.type"), saved_step=saved_step, **room)


def _growing(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that memory is soon full."""
    for space in catalog.SPACE.values:
        full_in_s = {rank.rank: rank.value(catalog.MEMORY_TIME_TO_LIMIT, space) for rank in ranks if rank.up}
        near = {name: left_s for name, left_s in full_in_s.items() if left_s is not None and left_s <= NEAR_S}
        if near:
            growing = [rank for rank in ranks if rank.rank in near]
            where, left_s = _where(growing, ranks), min(near.values())
            yield finding("memory_growth", memory=space.capitalize(), where=where, left=left_s)


def broken(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that GPUs have failed, and that workers of data loaders have died, even if the script goes on with new ones.

    Once it has gone on for some time, or has finished, that is information.
    """
    status = [pair for rank in ranks if rank.up for pair in rank.of(catalog.HW_STATUS).items()]
    if gpus := sorted({gpu for (gpu, _, state), is_so in status if state == "failed" and is_so}):
        yield finding("gpu_failed", gpus=len(gpus), names=gpus)
    died = [rank for rank in ranks if rank.count(catalog.DATA_WORKERS_DIED)]
    if died:
        lately = any(rank.lately.get(WORKER_DIED) for rank in died) and any(rank.state != "finished" for rank in ranks)
        yield finding(
            "workers_died",
            severity=Severity.WARNING if lately else Severity.INFO,
            workers=sum(rank.count(catalog.DATA_WORKERS_DIED) for rank in died),
            where=_where(died, ranks),
            earlier=not lately and any(rank.up for rank in ranks),
        )


def waiting(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that training waits for data, or did until its end."""
    there = [rank for rank in ranks if rank.up] or ranks
    starved = [rank for rank in there if rank.waiting is not None]
    if starved:
        share = max(rank.waiting or 0.0 for rank in starved)
        yield finding("data", up=starved[0].up, where=_where(starved, there), share=share or None)


def _slowest(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the rank that the others wait for."""
    there = [rank for rank in ranks if rank.up] or ranks
    slow = [(rank, rank.slowness) for rank in there if rank.slowness and rank.slowness.is_slow]
    if slow:
        rank, found = max(slow, key=lambda pair: pair[1].factor)
        times = {"factor": round(found.factor, 1), "own": found.own_s, "others_s": found.others_s}
        yield finding("slowest_rank", rank=rank.rank, up=rank.up, phase=PHASES[found.phase], **dict[str, Any](times))
    else:
        yield from chain.from_iterable(map(_apart, labels.teams(there)))


def _apart(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that ranks wait for each other, where steps take as long on each but their phases do not.

    Which one is slow is not certain then: what one spends in forward, another may wait for in backward, or the reverse.
    """
    paces = {rank.rank: rank.pace for rank in ranks if rank.pace and rank.pace.steps >= LEAST_STEPS}
    if len(paces) < max(2, len(ranks)):
        return
    spread = [max(column) - min(column) for column in zip(*(pace.phases_s for pace in paces.values()), strict=True)]
    phase = max(range(len(spread)), key=spread.__getitem__)
    more, less = (choose(paces, key=lambda name: paces[name].phases_s[phase]) for choose in (max, min))
    long, short = paces[more], paces[less]
    whole_s = sum(long.phases_s)
    if spread[phase] < max((SLOW - 1) * whole_s, LEAST_EXCESS_S) or abs(whole_s - sum(short.phases_s)) > spread[phase] / 2:
        return
    elsewhere = max(range(len(spread)), key=lambda index: short.phases_s[index] - long.phases_s[index])
    up = any(rank.up for rank in ranks)
    values = {"up": up, "phase": PHASES[phase], "own": long.phases_s[phase], "elsewhere": PHASES[elsewhere]}
    yield finding("ranks_wait", rank=more, other=less, others_s=short.phases_s[elsewhere], **dict[str, Any](values))


def between(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield where the time between the phases of a step goes, of the rank with the most of it."""
    known = [rank for rank in ranks if rank.between and rank.events.between[0]]
    if known:
        rank = max(known, key=lambda one: one.between or 0.0)
        function, location = rank.events.between
        yield finding("between", where=_where([rank], ranks), share=rank.between, function=function, location=location)


def probes_off(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the probes that failed and are off."""
    off = sorted({probe for rank in ranks for probe in rank.probes_off})
    if off:
        yield finding("probes_off", probes=", ".join(off))
