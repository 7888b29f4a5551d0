"""Whom a run waited for that a collective's timeout ended: the rank whose exception it is has not failed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchobs.detect import hang as detect_hang
from torchobs.detect.hang import Blamed
from torchobs.diagnosis import collectives, hang, text_format
from torchobs.diagnosis.health import ERROR, Finding
from torchobs.diagnosis.rank_report import Fact, RankReport
from torchobs.diagnosis.status import RankStatus, compared
from torchobs.ranks import labels, state

_MOST_NAMED = 8
_IN_BACKWARD = "_engine_run_backward"
"""Where what a collective raises in backward comes out, after which the phase is another"""
_WHAT = {"collective": "A collective", "monitored_barrier": "A monitored barrier", "rendezvous": "The ranks' rendezvous"}


def exception(report: RankReport) -> Fact | None:
    """Return the exception by which a rank ended, if that was a timeout of torch.distributed."""
    raised = report.main_exceptions
    return raised[-1] if report.reason == "exception" and raised and raised[-1].text("timeout") else None


def waited(fact: Fact) -> str:
    """Return the same in words, for the sentence on the exception; empty for other exceptions."""
    if not fact.text("timeout"):
        return ""
    named = _absent(fact)
    whom = f"{text_format.ranks(named, _MOST_NAMED)}, which did not come" if named else "a rank that did not come"
    return f": a timeout{_after(fact)}, it waited for {whom}"


def blamed(ranks: Sequence[RankReport]) -> dict[str, Blamed]:
    """Return the ranks that the others of their replica group waited for, by name, where a timeout ended it.

    Empty if none did, if a rank had failed before otherwise, and if nothing distinguishes the ranks.
    """
    return {name: one for team in labels.teams(ranks) for name, one in _blamed(team, statuses(team)).items()}


def finding(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield for whom each replica group waited that a timeout ended: instead of which rank failed first."""
    for team in labels.teams(ranks):
        yield from _finding(team)


def _finding(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    gave_up = _gave_up(ranks)
    if not gave_up:
        return
    whole = statuses(ranks)
    found, facts = _blamed(ranks, whole), list(gave_up.values())
    what = _WHAT.get(facts[0].text("timeout"), "A collective")
    text = f"{what} timed out{_after(facts[0])} on {text_format.ranks(list(gave_up), _MOST_NAMED)}."
    absent = [rank for rank in _named(facts) if rank not in {report.rank for report in ranks}]
    counted = [] if absent else list(collectives.surplus(whole, ranks))
    if counted and not _named(facts) and _are_alike(whole, found):
        text = " ".join([text, *counted])
    elif found:
        uncounted = [replace(status, called={}) for status in whole]
        text = " ".join([text, hang.sentences(uncounted, found), *counted])
    elif len(gave_up) == len(ranks) and not absent:
        text = f"{text} {_each(whole)}"
    elif not absent:
        text = f"{text} Which rank did not come cannot be told."
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        who = text_format.capital(text_format.ranks(absent, _MOST_NAMED))
        text = f"{text} {who} did not come, and {verb} not among the files here."
    yield Finding(ERROR, "collective_timeout", text)


def statuses(ranks: Sequence[RankReport]) -> list[RankStatus]:
    """Return where the ranks were when the timeout came: those that had not ended by then hung, and were ended by it."""
    gave_up = _gave_up(ranks)
    begun_s = min((fact.time_s for fact in gave_up.values()), default=0.0)
    found = []
    for status, report in zip(compared(ranks), ranks, strict=True):
        before = report.rank not in gave_up and not report.up and report.last_s < begun_s - state.BEAT_S
        here = before or (report.state == "finished" and report.rank not in gave_up)
        raised = gave_up.get(report.rank)
        phase = "backward" if raised is not None and _IN_BACKWARD in raised.text("location") else report.phase
        found.append(status if here else replace(status, state="hung", phase=phase))
    return found


def _gave_up(ranks: Sequence[RankReport]) -> dict[str, Fact]:
    """Return the exceptions of the ranks that a timeout ended; none if another one had failed before for reasons of its own."""
    found = {report.rank: fact for report in ranks if (fact := exception(report)) is not None}
    begun_s = min((fact.time_s for fact in found.values()), default=0.0)
    others = (report for report in ranks if report.rank not in found and report.state in {"failed", "lost"})
    return {} if any(report.last_s < begun_s - state.BEAT_S for report in others) else found


def _blamed(ranks: Sequence[RankReport], whole: Sequence[RankStatus]) -> dict[str, Blamed]:
    gave_up = _gave_up(ranks)
    if not gave_up:
        return {}
    at = {status.rank: hang.position(status) for status in whole}
    named = _named(list(gave_up.values()))
    if named:
        return {rank: detect_hang.alone(at[rank]) for rank in named if rank in at}
    found = {rank: one for rank, one in hang.blamed(whole).items() if rank not in gave_up}
    if found:
        return found
    others = [rank for rank in at if rank not in gave_up]
    if len(others) != 1:
        return {}
    alone = {others[0]: detect_hang.alone(at[others[0]])}
    called_least = {rank for group in collectives.surpluses(whole) for rank in group.ranks[min(group.ranks)]}
    return alone if others[0] in called_least or not _are_alike(whole, alone) else {}


def _are_alike(whole: Sequence[RankStatus], found: Mapping[str, Blamed]) -> bool:
    """Return whether nothing but that they did not give up distinguishes those ``found`` from a rank that waits."""
    waiting = {hang.where(hang.position(status)) for status in whole if status.rank not in found}
    return all(one.why == detect_hang.ELSEWHERE and hang.where(one.position) in waiting for one in found.values())


def _each(whole: Sequence[RankStatus]) -> str:
    """Return where the ranks waited, all of which gave up."""
    places: dict[str, list[str]] = {}
    for status in whole:
        places.setdefault(hang.where(hang.position(status)), []).append(status.rank)
    if len(places) == 1:
        return f"All of them waited {next(iter(places))}: which rank did not come cannot be told."
    told = [f"{text_format.ranks(names, _MOST_NAMED)} {place}" for place, names in places.items()]
    return f"They waited for each other: {text_format.joined(told, _MOST_NAMED)}."


def _named(facts: Sequence[Fact]) -> list[str]:
    return sorted({rank for fact in facts for rank in _absent(fact)}, key=int)


def _absent(fact: Fact) -> list[str]:
    found = fact.attributes.get("absent_ranks")
    return [str(one) for one in found if type(one) is int] if isinstance(found, list) else []


def _after(fact: Fact) -> str:
    seconds = fact.number("timeout_s")
    return f" after {text_format.duration(seconds)}" if seconds else ""
