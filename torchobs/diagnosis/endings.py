"""How ranks ended, which failed first, and which rank the others waited for until a collective timed out. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.catalog.findings import (
    FATAL_SIGNALS,
    MODEL_MEMORY,
    NOT_HERE,
    RAISED,
    ROOM,
    TIMED_OUT,
    WAITED_APART,
    WAITED_FOR_PEER,
    WAITED_TOGETHER,
    WHERE,
    Finding,
    finding,
    sentence,
)
from torchobs.detect import hangs as detect_hang
from torchobs.detect.hangs import PATIENT_PHASES, Blamed
from torchobs.diagnosis import hangs
from torchobs.diagnosis.comparison import beside_each_other
from torchobs.diagnosis.from_events import KIND_OF, LAST_WORDS, values_of
from torchobs.diagnosis.hangs import Stall, place, stall, stalled, without_launcher
from torchobs.flight.events import Event
from torchobs.ranks import labels, state
from torchobs.ranks.rank_view import RankView, started_here
from torchobs.support import text

_MOST_NAMED = 8
_IN_BACKWARD = "_engine_run_backward"
"""The function of torch that raises a collective's error in backward; the phase is another one afterwards"""
_NO_FAILURE = frozenset({"finished", "interrupted", "terminated"})
SHORTLY_S = 60.0
"""Errors of machine, device or workers within this time before the end are reported with it."""
_KILLED_WITHIN_S = 40.0
"""torchrun sends SIGKILL 30 s after SIGTERM."""
_RAISED_WITHIN_S = 2.0
"""From the save that raises to the end of the script, which nothing catches."""
_TICK_S = 0.01
"""A signal's mark has the time of a file, which the kernel takes from the last tick of its clock."""
_ABORTED, _INTERRUPTED = 128 + signal.SIGABRT, 128 + signal.SIGINT
_COLLECTIVE = (
    "torch/distributed/", "torch/nn/parallel/distributed.py", "DistBackendError", "DistNetworkError", "DistStoreError",
    "DistError",
)  # fmt: skip


# --- how a rank ended ---------------------------------------------------------------------------------------------------------
def ending(report: RankView) -> Iterator[Finding]:
    """Yield how a rank ended, or that it has not."""
    if report.up:
        yield _living(report)
        yield from stalled(report)
        if not report.recorded:
            yield finding("unrecorded")
        return
    if not report.end_known:
        yield finding("end_unknown", rank=report.rank, step=report.last_step or None)
        return
    yield how_ended(report)
    yield from stalled(report)
    yield from _threads(report)
    for kind, fact in last_words(report).items():
        ago_s = report.last_s - fact.time_s
        values = {**_last_word(fact), "ago": ago_s if ago_s >= state.BEAT_S else None}
        yield Finding(kind, report.rank, fact.step, values)


def launcher_ending(report: RankView) -> Iterator[Finding]:
    """Yield how a process that only started the ranks ended, if that was a failure."""
    if report.state not in {"alive", "finished"}:
        end = next(ending(report))
        yield end._replace(values={**end.values, "who": "The process that started the ranks", "where": None})


def _living(report: RankView) -> Finding:
    quiet, phase = max(0.0, report.last_s - report.progress_s), report.phase if report.last_step else None
    stepless = report.lifetime if not report.done and report.last_s - report.begun_s >= detect_hang.EARLY_FIRST_S else None
    moment, where = text.moment(report.last_s), _where(report)
    return finding(report.state, rank=report.rank, where=where, quiet=quiet, phase=phase, moment=moment, lifetime=stepless)


def _where(report: RankView) -> str:
    """Return the rank's progress at its end: ``after step 812``."""
    if not report.last_step and report.partial:
        return ""
    return sentence(WHERE, {"steps": report.last_step or None, "unwritten": report.unwritten and report.last_step})


def how_ended(report: RankView) -> Finding:
    """Return how a rank that is over ended."""
    values: dict[str, Any] = {"where": _where(report), "phase": report.phase if report.last_step else None}
    reason = report.reason
    if reason == "exception":
        values |= _exception(report)
    elif reason == "exit_code":
        values |= {"code": report.exit_code, "signal": _signal(report)}
    elif reason in {"interrupted", "terminated"}:
        number = 0 if report.exit_code == _INTERRUPTED else report.exit_code - 128  # a handler of SIGTERM may raise Ctrl-C's
        values |= {"signal": _name_of(number, "SIGTERM"), **_signal_result(report)}
    elif reason == "crashed":
        crash, name = without_launcher(report.crash), _name_of(report.exit_code - 128, "a fatal signal")
        meaning = FATAL_SIGNALS.get(name, "a fatal signal")
        values |= {"place": place(crash) if crash else None, "signal": name, "meaning": meaning}
    elif reason == "out_of_memory":
        values |= _memory(report)
    elif reason == "lost":
        values |= {"rebooted": not report.same_boot and not report.copied, "copied": report.copied}
    else:
        values |= {"lifetime": report.lifetime, "signal": _signal(report)}
        reason = "finished" if report.last_step or report.partial else "finished_without_step"
    return finding(reason, rank=report.rank, **values)


def _name_of(number: int, other: str) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else other


def _exception(report: RankView) -> dict[str, Any]:
    if not report.main_exceptions:
        return {"raised": "an exception that is not in the file", "exception": report.exception}
    last = report.main_exceptions[-1]
    raised, cause = _raised(last), _raised(last, "cause.") if last.text("cause.type") else None
    unused, count = last.texts("unused", _MOST_NAMED, 80), last.number("unused_count")
    more = ["more"] if count is None else [f"{count - len(unused):,.0f} more"] if count > len(unused) else []
    waited = None
    if last.text("timeout"):
        absent = _absent(last)
        whom = f"{text.ranks(absent, _MOST_NAMED)}, which did not come" if absent else "a rank that did not come"
        waited = sentence(WAITED_FOR_PEER, {"timeout": last.number("timeout_s"), "peers": whom})
    return {
        "raised": raised,
        "cause": cause if cause != raised else None,
        "signal": last.text("signal"),
        "waited": waited,
        "unused": text.joined([*unused, *more]) if unused else None,
        "unused_of": last.text("unused_of") or "the model",
        "exception": report.exception,
        **(failed_saves(report) if is_ended_by_a_save(report) else {}),
    }


def failed_saves(report: RankView) -> dict[str, Any]:
    """Return how many checkpoints could not be saved, and why the last of them could not; empty if none failed."""
    events = report.events_named(catalog.EVENT_CHECKPOINT_FAILED)
    saves = report.count(catalog.CHECKPOINTS, "failed")
    if not saves:
        return {}
    raised = values_of(events[-1]) if events else {}
    free, needed = raised.get("free"), raised.get("needed")
    full = isinstance(free, (int, float)) and isinstance(needed, (int, float)) and free < needed
    room = sentence(ROOM, raised) if full else ""
    return {"saves": saves, "why": raised.get("exception.type"), "saved_step": raised.get("saved_step") or None, "room": room}


def is_ended_by_a_save(report: RankView) -> bool:
    """Return whether the exception that ended a rank is what a save has just raised."""
    failed, ended = report.events_named(catalog.EVENT_CHECKPOINT_FAILED), report.main_exceptions
    if report.reason != "exception" or not failed or not ended:
        return False
    is_alike = failed[-1].text("exception.type") == ended[-1].text("exception.type") and failed[-1].step == ended[-1].step
    return is_alike and 0 <= ended[-1].time_s - failed[-1].time_s <= _RAISED_WITHIN_S


def _raised(fact: Event, prefix: str = "") -> str:
    """Return an exception in words; ``prefix``: ``cause.`` for the one at its root."""
    names = ("message", "location", "caller", "origin", "reraised")
    values = {name: fact.text(f"{prefix or 'exception.' * (name == 'message')}{name}") for name in names}
    kind = fact.text(f"{prefix or 'exception.'}type").removeprefix("builtins.") or "an exception"
    return sentence(RAISED, {"type": kind, **values})


def _signal(report: RankView) -> str:
    """Return the signal if the script's handler of it ended the rank; else empty."""
    ended = report.events_named(catalog.EVENT_RUN_END)
    return ended[-1].text("signal") if ended else ""


def _signal_result(report: RankView) -> dict[str, Any]:
    """Return the exception or exit code that the script's handler of the signal ended with, if it is not the usual one."""
    raised = [fact for fact in report.main_exceptions if fact.text("signal")]
    if raised and raised[-1].text("exception.type") != "builtins.KeyboardInterrupt":
        return {"handled": _raised(raised[-1])}
    return {"code": report.exit_code if _signal(report) and report.exit_code not in {0, 130, 143} else None}


def _memory(report: RankView) -> dict[str, Any]:
    memory = report.memory_use
    killed = memory.kill_age_s is not None and memory.kill_age_s <= state.OOM_KILL_LATELY_S
    full = memory.cgroup >= state.FULL_CGROUP
    return {
        "kill_age": memory.kill_age_s if killed else None,
        "cgroup": memory.cgroup if full else None,
        "limit": report.value(catalog.CGROUP_MEMORY_LIMIT) if full else None,
        "machine": memory.machine if memory.machine >= state.FULL_MACHINE else None,
    }


def _threads(report: RankView) -> Iterator[Finding]:
    """Yield the last thread that ended by an exception, however early: whoever waits for it may fail hours later, or hang."""
    ended = [fact for fact in report.events_named(catalog.EVENT_EXCEPTION) if fact.text("thread")]
    if not ended or report.reason in _NO_FAILURE:
        return
    last, others = ended[-1], {fact.text("thread") for fact in ended[:-1]} - {ended[-1].text("thread")}
    ago = max(0.0, report.last_s - last.time_s)
    values = {"thread": last.text("thread"), "raised": _raised(last), "ago": ago, "others": len(others) or None}
    yield finding("thread_exception", rank=report.rank, step=last.step or None, **dict[str, Any](values))


def last_words(report: RankView) -> dict[str, Event]:
    """Return the last error of each kind, of machine, device or workers, shortly before an abnormal end."""
    if report.up or report.reason in _NO_FAILURE:
        return {}
    late = [fact for fact in report.events if report.last_s - fact.time_s <= SHORTLY_S]
    return {kind: facts[-1] for kind in LAST_WORDS if (facts := [fact for fact in late if _makes(kind, fact)])}


def _makes(kind: str, fact: Event) -> bool:
    source, key = KIND_OF[kind]
    return fact.name == source and (not key or (key == "cpu") == (fact.text("device") == "cpu"))


def _last_word(fact: Event) -> dict[str, Any]:
    """Return the values of such an error's words."""
    model = sentence(MODEL_MEMORY, fact.attributes).removeprefix(", ")
    return {**values_of(fact), "model": model, "modules": fact.texts("modules", 1, 120), "largest": fact.texts("largest", 1)}


# --- ranks together -----------------------------------------------------------------------------------------------------------
def compare(ranks: Sequence[RankView]) -> list[Finding]:
    """Return the findings on ranks together."""
    if len(ranks) < 2:  # noqa: PLR2004  # a single rank has no peers
        return []
    return [*culprits(ranks), *beside_each_other(ranks, started_here(ranks))]


def culprits(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the ranks that failed first, and those that the others wait for or waited for in vain."""
    only, teams = len(_failed(ranks)) == 1, labels.teams(ranks) if len(ranks) > 1 else ()
    return chain.from_iterable(_in_team(team, only_one_failed=only) for team in teams)


def _in_team(ranks: Sequence[RankView], *, only_one_failed: bool) -> Iterator[Finding]:
    """Yield whom a replica group waited for until a timeout ended it, else which rank failed first; and whom it waits for now.

    A failed rank that is alone in its group is left out if ranks of other groups failed as well.
    """
    gave_up = _gave_up(ranks)
    if gave_up:
        first = next(iter(gave_up.values()))
        what, timeout_s = TIMED_OUT.get(first.text("timeout"), TIMED_OUT["collective"]), first.number("timeout_s")
        names, waiting = text.ranks(list(gave_up), _MOST_NAMED), _waiting(ranks, gave_up)
        yield finding("collective_timeout", what=what, timeout=timeout_s, gave_up=names, waiting=waiting)
    elif (failure := first_failed(ranks)[1]) is not None and (only_one_failed or len(_failed(ranks)) > 1):
        yield failure
    together = stalled_together(ranks)
    if not gave_up and (blames := hangs.blamed(together)):
        early = any(report.up for report in ranks) and all(report.state != "hung" for report in ranks)
        yield finding("waited_for", severity=Severity.WARNING if early else None, waiting=hangs.sentences(together, blames))
    yield from hangs.mismatches(together)


def awaited_at_timeout(ranks: Sequence[RankView]) -> dict[str, Blamed]:
    """Return by name the ranks that the others of their replica group waited for until a timeout ended it.

    Empty without a timeout, if a rank had failed earlier for another reason, and if nothing distinguishes the ranks.
    """
    return {name: blame for team in labels.teams(ranks) for name, blame in _blamed(team, _statuses(team)).items()}


def _waiting(ranks: Sequence[RankView], gave_up: Mapping[str, Event]) -> str:
    """Return whom the ranks ended by a timeout waited for, or where they were; empty if that is unknown."""
    whole, facts = _statuses(ranks), list(gave_up.values())
    blames = _blamed(ranks, whole)
    absent = [rank for rank in _absentees(facts) if rank not in {report.rank for report in ranks}]
    surplus = [] if absent else list(hangs.surplus(whole, ranks))
    sentences = []
    if surplus and not _absentees(facts) and _are_alike(whole, blames):
        sentences = surplus
    elif blames:
        sentences = [hangs.sentences(whole, blames)]
    elif len(gave_up) == len(ranks) and not absent:
        sentences = [_places(whole)]
    if absent:
        who = text.capital(text.ranks(absent, _MOST_NAMED))
        sentences.append(sentence(NOT_HERE, {"who": who, "count": len(absent)}))
    return " ".join(sentences)


def _statuses(ranks: Sequence[RankView]) -> list[RankView]:
    """Return the ranks as they were when the timeout came: those that had not ended by then hung, and were ended by it."""
    gave_up = _gave_up(ranks)
    begun_s = min((fact.time_s for fact in gave_up.values()), default=0.0)
    statuses = []
    for report in ranks:
        before = report.rank not in gave_up and not report.up and report.last_s < begun_s - state.BEAT_S
        here = before or (report.state == "finished" and report.rank not in gave_up)
        raised = gave_up.get(report.rank)
        phase = "backward" if raised is not None and _IN_BACKWARD in raised.text("location") else report.phase
        statuses.append(report if here else replace(report, state="hung", phase=phase))
    return statuses


def _gave_up(ranks: Sequence[RankView]) -> dict[str, Event]:
    """Return the exceptions of the ranks that a timeout ended; none if another rank had failed before for another reason."""
    ended = {report.rank: report.main_exceptions[-1:] for report in ranks if report.reason == "exception"}
    timeouts = {rank: fact for rank, raised in ended.items() for fact in raised if fact.text("timeout")}
    begun_s = min((fact.time_s for fact in timeouts.values()), default=0.0)
    others = (report for report in ranks if report.rank not in timeouts and report.state in {"failed", "lost"})
    return {} if any(report.last_s < begun_s - state.BEAT_S for report in others) else timeouts


def _blamed(ranks: Sequence[RankView], whole: Sequence[RankView]) -> dict[str, Blamed]:
    gave_up = _gave_up(ranks)
    if not gave_up:
        return {}
    at = {status.rank: hangs.position(status) for status in whole}
    named = _absentees(list(gave_up.values()))
    if named:
        return {rank: detect_hang.alone(at[rank]) for rank in named if rank in at}
    blames = {rank: blame for rank, blame in hangs.blamed(whole).items() if rank not in gave_up}
    if blames:
        return blames
    others = [rank for rank in at if rank not in gave_up]
    if len(others) != 1:
        return {}
    alone = {others[0]: detect_hang.alone(at[others[0]])}
    called_least = {rank for group in hangs.surpluses(whole) for rank in group.ranks[min(group.ranks)]}
    return alone if others[0] in called_least or not _are_alike(whole, alone) else {}


def _are_alike(whole: Sequence[RankView], blames: Mapping[str, Blamed]) -> bool:
    """Return whether the ranks in ``blames`` differ from those that wait only in that they did not give up."""
    waiting = {hangs.where(hangs.position(status)) for status in whole if status.rank not in blames}
    return all(blame.why == detect_hang.ELSEWHERE and hangs.where(blame.position) in waiting for blame in blames.values())


def _places(whole: Sequence[RankView]) -> str:
    """Return where the ranks waited; all of them gave up."""
    places: dict[str, list[str]] = {}
    for status in whole:
        places.setdefault(hangs.where(hangs.position(status)), []).append(status.rank)
    if len(places) == 1:
        return sentence(WAITED_TOGETHER, {"place": next(iter(places))})
    apart = [f"{text.ranks(names, _MOST_NAMED)} {there}" for there, names in places.items()]
    return sentence(WAITED_APART, {"places": text.joined(apart, _MOST_NAMED)})


def _absentees(facts: Sequence[Event]) -> list[str]:
    return sorted({rank for fact in facts for rank in _absent(fact)}, key=int)


def _absent(fact: Event) -> list[str]:
    absent = fact.attributes.get("absent_ranks")
    return [str(rank) for rank in absent if type(rank) is int] if isinstance(absent, list) else []


def stalled_together(ranks: Sequence[RankView]) -> list[RankView]:
    """Return the ranks of a replica group; those that stand still all together count as hung, and those killed as they did.

    A launcher kills the ranks of a hung run, or a collective's timeout raises in them, so that at the end none lives. Their
    last phases show where they were. It need not have been so long that the exporter would call them hung.
    """
    living = [report for report in ranks if report.up and report.state != "unresponsive"]
    if living and all(report.standstill and not report.standstill.habitual for report in living):
        return [replace(report, state="hung") if report in living else report for report in ranks]
    stops = [stall(report) for report in ranks]
    if any(report.up or report.state == "finished" for report in ranks) or not any(map(_stood_still, stops)):
        return list(ranks)
    if max(report.last_s for report in ranks) - min(report.last_s for report in ranks) > _KILLED_WITHIN_S:
        return list(ranks)
    return [replace(report, state="hung" if _stood_still(stop) else "alive") for stop, report in zip(stops, ranks, strict=True)]


def _stood_still(stop: Stall | None) -> bool:
    return stop is not None and (stop.hung or (stop.long and stop.phase not in PATIENT_PHASES))


def typical_phases(report: RankView) -> dict[str, float]:
    """Return the median seconds of the last steps in each phase."""
    recent = [step.divided_s(report.share) for step in report.steps[-hangs.RECENT_STEPS :]]
    return {phase: median([phases.get(phase, 0.0) for phases in recent]) for phase in catalog.PHASES} if recent else {}


def first_failed(ranks: Sequence[RankView]) -> tuple[RankView | None, Finding | None]:
    """Return the rank of a replica group that failed first, ``None`` if none failed, and the finding, if that is certain.

    Ends too close for the clocks to order are distinguished by their kind: ranks raise in a collective operation when a peer is
    gone, and the launcher kills the others once one has raised.
    """
    failed = _failed(ranks)
    ended = sorted(((_end_s(report), report) for report in failed), key=lambda pair: pair[0])
    if not ended:
        return None, None
    (first_s, first), *others = ended
    goes_on = any(report.state in {"alive", "finished"} for report in ranks)
    if all(report.reason in {"terminated", "interrupted"} for report in failed) and (others or not goes_on):
        return first, None  # somebody ended them, and not one among others that go on
    if not others:
        return first, finding("only_failed", rank=first.rank, moment=text.moment(first_s, "%H:%M:%S"))
    later_s = others[0][0] - first_s
    by_default = first.reason == "terminated" and not first.events_named(catalog.EVENT_RUN_END)
    if later_s > (_TICK_S if by_default else state.BEAT_S):
        marked = _name_of(first.exit_code - 128, "SIGTERM") if by_default else None
        return first, finding("failed_first", rank=first.rank, later=later_s, next=others[0][1].rank, signal=marked)
    return _first_of([report for end_s, report in ended if end_s - first_s <= state.BEAT_S])


def _first_of(together: Sequence[RankView]) -> tuple[RankView, Finding | None]:
    """Return the rank that failed first by how the ranks ended: their ends are too close for the clocks to order."""
    raised = [report for report in together if report.reason == "exception"]
    by_itself = [report for report in raised if not in_collective(report)]
    # an abort may be a collective's own, which a peer's end has caused
    silent = [rank for rank in together if rank.state == "lost" or (rank.reason == "crashed" and rank.exit_code != _ABORTED)]
    if len(by_itself) == 1:
        return by_itself[0], finding("failed_by_itself", rank=by_itself[0].rank, within=state.BEAT_S)
    if len(silent) == 1 and not by_itself:
        crashed = silent[0].reason == "crashed"
        values = {"within": state.BEAT_S, "crashed": crashed, "raised": bool(raised)}
        return silent[0], finding("vanished_first", rank=silent[0].rank, **dict[str, Any](values))
    return together[0], None


def in_collective(report: RankView) -> bool:
    """Return whether a peer's end may have caused the exception: torch.distributed or DDP raised it, or the one at its root."""
    for fact in report.main_exceptions[-1:]:
        origin = " ".join(map(fact.text, ("location", "exception.type", "cause.location", "cause.type")))
        if any(sign in origin for sign in _COLLECTIVE):
            return True
        return _IN_BACKWARD in origin and len(report.events_named(catalog.EVENT_DISTRIBUTED)) > 0
    return False


def _failed(ranks: Sequence[RankView]) -> list[RankView]:
    return [report for report in ranks if report.state in {"failed", "lost"} and report.end_known]


def _end_s(report: RankView) -> float:
    raised = report.main_exceptions
    return raised[-1].time_s if raised and report.reason == "exception" else report.last_s
