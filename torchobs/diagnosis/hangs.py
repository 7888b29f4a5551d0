"""Which ranks the others of a hung run wait for, and what torch's flight recorder knows of its collectives, in sentences. Pure.

Ranks are compared within their replica group alone: each such group has a default group of its own, of the same name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby

from torchobs.detect import hangs
from torchobs.detect.hangs import Absence, Blamed, Mismatch, Position, Surplus
from torchobs.diagnosis import text_format
from torchobs.diagnosis.rank_report import RankReport
from torchobs.diagnosis.status import RankStatus
from torchobs.ranks import labels

_MOST_NAMED = 4
_RECENT = re.compile(r"(.{1,200}) #(\d{1,18}) (\w+ at .+)")
"""Group, number, kind and line of ``probes.lifecycle.collectives``"""
_MOST_GROUPS = 3
_ASIDE = {
    "evaluation": "evaluates", "checkpoint": "saves a checkpoint", "compile": "compiles", "idle": "has left its training loop",
}  # fmt: skip


def evidence(ranks: Sequence[RankStatus], named: Collection[str]) -> Iterator[str]:
    """Yield for ranks that the others wait for, and that did not come to a collective, to which they did not come."""
    by_absence: dict[tuple[str, Absence], list[str]] = {}
    for team in labels.teams(ranks):
        for rank, one in hangs.absent({rank.rank: rank.collectives for rank in team}).items():
            if rank in named:
                by_absence.setdefault((labels.team(rank), one), []).append(rank)
    for (_, one), names in by_absence.items():
        who = text_format.capital(text_format.ranks(names, _MOST_NAMED))
        yield f"{who} {'has' if len(names) == 1 else 'have'} not come to {_absence(one)}."


def surpluses(ranks: Sequence[RankStatus]) -> list[Surplus]:
    """Return the groups in which ranks have called different numbers of collectives."""
    called = ({rank.rank: rank.called for rank in team} for team in labels.teams(ranks))
    return list(chain.from_iterable(map(hangs.surplus, called)))


def surplus(ranks: Sequence[RankStatus], reports: Sequence[RankReport] = ()) -> Iterator[str]:
    """Yield which ranks called more collectives of a group than others, and with reports which, if their calls show that."""
    calls = {report.rank: recent_calls(report) for report in reports}
    for found in surpluses(ranks):
        numbers = list(found.ranks)
        if len(numbers) > 2:  # noqa: PLR2004  # two are compared in words
            told = [f"{number:,} on {text_format.ranks(found.ranks[number], _MOST_NAMED)}" for number in numbers]
            yield f"Of group {_group(found.group)} ranks called different numbers of collectives: {text_format.joined(told)}."
            continue
        (most, ahead), (least, behind) = found.ranks.items()
        more = "one collective" if most - least == 1 else text_format.plural(most - least, "collective")
        who, others = text_format.ranks(ahead, _MOST_NAMED), text_format.ranks(behind, _MOST_NAMED)
        extra = hangs.inserted(*(calls.get(names[0], {}).get(found.group, {}) for names in (ahead, behind)))
        which = (
            f": {text_format.joined([text_format.source_location(text_format.clean(text)) for text in extra], _MOST_NAMED)}"
            if extra
            else ""
        )
        counts = f"{most:,} and {least:,} of group {_group(found.group)}"
        yield f"{text_format.capital(who)} called {more} more than {others} ({counts}){which}."


def recent_calls(report: RankReport) -> dict[str, dict[int, str]]:
    """Return a rank's last collectives by group and number, as it wrote them down when it stood still, or was timed out."""
    facts = [fact for fact in report.events if fact.time_s >= report.progress_s and "collectives" in fact.attributes]
    found: dict[str, dict[int, str]] = {}
    for text in facts[-1].texts("collectives") if facts else ():
        if (parsed := _RECENT.fullmatch(text)) is not None:
            found.setdefault(parsed[1], {})[int(parsed[2])] = parsed[3]
    return found


def mismatches(ranks: Sequence[RankStatus]) -> Iterator[str]:
    """Yield what differs where ranks of a group wait in different collectives."""
    waiting = ({rank.rank: rank.collectives for rank in team} for team in labels.teams(ranks))
    for one in chain.from_iterable(map(hangs.mismatched, waiting)):
        yield f"Ranks do not call the same collective: number {one.number:,} of group {_group(one.group)} is {_kinds(one)}."


def _absence(one: Absence) -> str:
    operation = "a collective" if one.operation == "none" else one.operation
    wait = text_format.plural(one.waiting, "rank")
    last = f"the last called there is number {one.enqueued:,}" if one.enqueued else "none was called there"
    verb = "waits" if one.waiting == 1 else "wait"
    return f"{operation} number {one.number:,} of group {_group(one.group)}, in which {wait} {verb} ({last})"


def _kinds(one: Mismatch) -> str:
    kinds = []
    for (operation, size), names in one.kinds.items():
        amount = "" if size is None else f" of {text_format.size(size)}"
        kinds.append(f"{operation}{amount} on {text_format.ranks(names, _MOST_NAMED)}")
    return text_format.joined(kinds, _MOST_NAMED)


def _group(name: str) -> str:
    return text_format.clean(name)


def blamed(ranks: Sequence[RankStatus]) -> dict[str, Blamed]:
    """Return the ranks that the others of their replica group wait for, by name."""
    teams = ({rank.rank: position(rank) for rank in team} for team in labels.teams(ranks))
    return {name: one for team in teams for name, one in hangs.blamed(team).items()}


def sentences(ranks: Sequence[RankStatus], found: Mapping[str, Blamed]) -> str:
    """Return who waits for whom, without figures that change; ``found``: as of :func:`blamed`, not empty."""
    teams = labels.teams(ranks)
    awaited = ({rank.rank: found[rank.rank] for rank in team if rank.rank in found} for team in teams)
    return " ".join(_sentence(team, names) for team, names in zip(teams, awaited, strict=True) if names)


def _sentence(ranks: Sequence[RankStatus], found: Mapping[str, Blamed]) -> str:
    others = Counter(where(position(rank)) for rank in ranks if rank.rank not in found)
    (place, number), *more = others.most_common()
    waiting = f"the other {text_format.plural(number, 'rank')}" if number > 1 else "the other rank"
    rest = " (most of them)" if more else ""
    kinds = groupby(sorted(found, key=lambda name: _what(found[name])), key=lambda name: _what(found[name]))
    parts = [f"{text_format.ranks(list(names), _MOST_NAMED)} {what}" for what, names in kinds]
    named = text_format.joined(parts, _MOST_GROUPS)
    told = f"{text_format.capital(named)}, and {waiting}{rest} {'waits' if number == 1 else 'wait'} {place}."
    return " ".join([told, *(list(evidence(ranks, found)) or surplus(ranks))])


def _what(one: Blamed) -> str:
    """Return what a rank does instead of what the others wait for."""
    if one.why == hangs.ENDED:
        return "ended in order" if one.position.state == "finished" else "ended"
    if one.why == hangs.SILENT:
        return f"gave no sign of life since it was {where(one.position)}"
    arrived = one.why != hangs.NOT_ARRIVED
    if one.why == hangs.ASIDE_OF_TRAINING or (not arrived and one.position.phase in hangs.ASIDE):
        return _ASIDE[one.position.phase or "idle"]
    if one.why == hangs.NOT_IN_COLLECTIVE or (not arrived and one.position.frames):
        return f"runs {text_format.clean(one.position.frames[0])} {where(one.position)}"
    if one.why == hangs.FETCHING or (not arrived and one.position.phase == "data"):
        return f"fetches data{_step(one.position)}"
    return f"stays {where(one.position)}"


def where(position: Position) -> str:
    """Return in which phase of which step a rank is."""
    phase = position.phase
    if phase == "idle":
        return "after its training loop"
    within = "between two phases" if phase in {None, "other"} else f"in {phase}"
    return within + _step(position)


def _step(position: Position) -> str:
    return "" if position.steps is None else f" of step {position.steps + 1:,}"


def position(rank: RankStatus) -> Position:
    """Return where a rank is, for :mod:`torchobs.detect.hangs`: process groups of one name differ by the replica group."""
    team = labels.team(rank.rank)
    progress = {f"{group}-{team}" if team else group: one for group, one in rank.collectives.items()}
    return Position(rank.state, rank.steps if rank.recorded else None, rank.phase, rank.frames, progress)
