"""The findings on each rank of a run, and the run's health in a sentence or two. Pure.

The live page, ``torchobs top``, ``torchobs inspect``, the report and the summary of ``torchobs run`` all use these texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchobs.catalog import Severity
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
from torchobs.detect.hangs import LEAST_S, PATIENT_PHASES
from torchobs.diagnosis.comparison import beside_each_other
from torchobs.diagnosis.endings import culprits, ending
from torchobs.diagnosis.from_events import remembered, source
from torchobs.diagnosis.numerics import numerics
from torchobs.diagnosis.performance import pace
from torchobs.ranks import labels
from torchobs.ranks.rank_view import RankView, RunView
from torchobs.support import text

ERROR, WARNING, INFO = "error", "warning", "info"
LEVELS = {INFO: Severity.INFO, WARNING: Severity.WARNING, ERROR: Severity.ERROR}
_RULES = (ending, numerics, pace)
_MOST_NAMED = 4
_NOW_S = 1.5
"""Page and terminal are updated every second"""
_LEFT_OUT = frozenset({"stalled", "left_loop", "lock_held", "thread_exception"})
"""Left out of the sentence: it begins with a standstill, and errors before an end are in the report"""
_ALWAYS_NAMED = frozenset({"between", "checkpoint_failed_once", "workers_died"})
"""In the sentence though their severity is info"""
_OF_THE_LIVING = frozenset({"data", "slowdown"})
"""Left out for ranks that have ended while others go on"""
_AWAITED = frozenset({"waited_for", "collectives_differ"})
"""Named while ranks live; who failed first is not, for the end of a killed rank shows a little later"""


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
def diagnose(rank: RankView) -> list[Finding]:
    """Return the findings on a rank: how it ended, then the others, the worst first."""
    first, *rest = (item._replace(rank=rank.rank) for rule in _RULES for item in rule(rank))
    return [first, *sorted(rest, key=lambda item: -LEVELS[item.severity].value)]


@remembered
def health(run: RunView) -> Health:
    """Return the health of a run: all is well only if each rank trains or has finished."""
    head = headline(run)
    items = sorted(_named_findings(run), key=lambda item: -LEVELS[item.severity].value)
    level = max((LEVELS[item.severity] for item in (head, *items)), key=lambda level: level.value)
    badge = str(head.values["badge"]) if level is Severity.INFO else BADGES[level]
    long, gist = (" ".join([first, *(item.short for item in items)]) for first in (head.long, head.short))
    return Health(level, long, gist, badge, head.long, ((head,) if head.severity != INFO else ()) + tuple(items))


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
        longest = max((rank.standstill for rank in still if rank.standstill), key=lambda standstill: standstill.seconds)
        values |= {"quiet": longest.seconds, "usual": longest.usual_step, "habitual": longest.habitual}
        everywhere = all(rank in still or (rank.progress_age_s or 0.0) >= LEAST_S for rank in alive)
        values["activity"] = sentence(NO_STEP, {"who": None if everywhere else _named(still)})
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
    exact = any(rank.done == run.steps and not rank.unwritten and rank.newest_is_here for rank in run.ranks)
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
    """Return the request that ended the whole run: ``interrupted`` by a person, ``terminated``; empty if it ended otherwise."""
    reasons = {"up" if rank.up else rank.reason for rank in ranks} - {"finished"}
    return min(reasons) if reasons and reasons <= {"interrupted", "terminated"} else ""


def standing_still(run: RunView) -> list[RankView]:
    """Return the ranks that stand still; none of a replica group with a rank that evaluates, saves or compiles."""
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


def _named_findings(run: RunView) -> Iterator[Finding]:
    """Yield the findings for the sentence: one for each kind, and anomalies that are over as numbers."""
    ranks, over, request = run.ranks, list[Finding](), _request(run.ranks)
    ends: dict[object, list[tuple[RankView, Finding]]] = {}
    alike: dict[str, list[tuple[RankView, Finding]]] = {}
    any_up = any(rank.up for rank in ranks)
    for rank in ranks:
        first, *rest = diagnose(rank)
        if (end := _end(rank, first, request)) is not None:
            ends.setdefault((end.kind, end.values.get("exception")), []).append((rank, end))
        for item in rest:
            if item.values.get("now") is False:
                over.append(item)
            elif _is_named(item) and (rank.up or not any_up or item.kind not in _OF_THE_LIVING):
                kind = ORIGIN if item.kind.startswith(ORIGIN) else item.kind.removesuffix("_before")
                alike.setdefault(kind, []).append((rank, item))
    yield from (item for item in culprits(ranks) if item.kind in _AWAITED or not (any_up or item.kind == "only_failed"))
    yield from (_together(pairs, ranks) for pairs in ends.values())
    yield from beside_each_other(ranks, run.expected)
    yield from (_together(pairs, ranks) for pairs in alike.values())
    yield from _past(over, is_ended=not any_up)


def _is_named(item: Finding) -> bool:
    return item.kind not in _LEFT_OUT and (item.severity != INFO or item.kind in _ALWAYS_NAMED)


def _end(rank: RankView, end: Finding, request: str) -> Finding | None:
    """Return how a rank ended, or that it hangs, with the severity for the run; ``None`` if all is well."""
    if rank.state not in {"lost", "failed"} or not rank.end_known:
        return end if end.severity != INFO else None
    severity = Severity.WARNING if request else Severity.ERROR
    return None if request == "interrupted" else end._replace(values={**end.values, "severity": severity})


def _together(pairs: Sequence[tuple[RankView, Finding]], ranks: Sequence[RankView]) -> Finding:
    """Return one finding for all of one kind: the worst, with the names of all affected ranks."""
    first_source = source(ranks)
    undated = [pair for pair in pairs if not pair[1].values.get("since")] or pairs
    rank, worst = max(undated, key=lambda pair: (LEVELS[pair[1].severity].value, _size(pair[1]), pair[0] is first_source))
    affected = [rank] if worst.kind == "between" else [rank for rank, _ in pairs]
    named = _named(affected)
    is_everywhere = len(affected) == (sum(rank.up for rank in ranks) or len(ranks))
    values: dict[str, Any] = {"who": text.capital(named), "count": len(affected), "where": "" if is_everywhere else named}
    rows: list[dict[str, Any]] = [dict(item.values) for _, item in pairs]
    if since := [row["since"] for row in rows if row.get("since") and worst.values.get("since")]:
        values["since"] = min(since)
    if "workers" in worst.values:
        values["workers"] = sum(row["workers"] for row in rows)
    if "gpus" in worst.values:
        names = sorted({name for row in rows for name in row["names"]})
        values |= {"names": names, "gpus": len(names)}
    return worst._replace(rank="", values={**worst.values, **values})


def _named(ranks: Sequence[RankView]) -> str:
    return text.ranks([rank.rank for rank in ranks], _MOST_NAMED)


def _size(item: Finding) -> float:
    """Return the number by which findings of one kind are compared."""
    value = item.values.get("share") or item.values.get("saves")
    return value if isinstance(value, (int, float)) else 0.0


def _past(over: Sequence[Finding], *, is_ended: bool) -> Iterator[Finding]:
    """Yield the numbers of anomalies that are over; first those from which the training may not have recovered."""
    by_kind: dict[str, list[Finding]] = {}
    for item in over:
        if not item.values.get("scaled"):  # part of normal loss scaling
            by_kind.setdefault(str(item.values["anomaly"]), []).append(item)
    kinds = [kind for kind in PAST if kind in by_kind]
    recent = [kind for kind in kinds if not all(item.values.get("healthy") for item in by_kind[kind])]
    if recent:
        notable = any(item.severity != INFO for kind in recent for item in by_kind[kind])
        number, what = _counted({kind: by_kind[kind] for kind in recent})
        word = f"There {'has' if number == 1 else 'have'} been" if is_ended else "Lately:" if notable else "Earlier:"
        yield finding("past_anomalies", severity=Severity.WARNING if notable else Severity.INFO, word=word, what=what)
    if past := {kind: by_kind[kind] for kind in kinds if kind not in recent}:
        calm = min(healthy for items in past.values() for item in items if isinstance(healthy := item.values["healthy"], int))
        yield finding("past_anomalies", word="Past:", what=_counted(past)[1], calm=calm)


def _counted(by_kind: Mapping[str, Sequence[Finding]]) -> tuple[int, str]:
    """Return how many anomalies there were in all, and the number of each kind in words, on the rank with the most."""
    numbers = {
        kind: max(number for item in items if isinstance(number := item.values["number"], int))
        for kind, items in by_kind.items()
    }
    words = [f"{number:,} {PAST[kind][number > 1]}" for kind, number in numbers.items()]
    return sum(numbers.values()), text.joined(words)
