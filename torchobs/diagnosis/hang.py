"""Which ranks the others of a hung run wait for, in a sentence; for page, ``top`` and ``inspect`` alike. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from torchobs.detect import hang
from torchobs.detect.hang import Blamed, Position
from torchobs.diagnosis import collectives, text_format
from torchobs.diagnosis.status import RankStatus
from torchobs.ranks import labels

_MOST_NAMED = 4
_MOST_GROUPS = 3
_ASIDE = {
    "evaluation": "evaluates", "checkpoint": "saves a checkpoint", "compile": "compiles", "idle": "has left its training loop",
}  # fmt: skip


def blamed(ranks: Sequence[RankStatus]) -> dict[str, Blamed]:
    """Return the ranks that the others of their replica group wait for, by name."""
    teams = ({rank.rank: position(rank) for rank in team} for team in labels.teams(ranks))
    return {name: one for team in teams for name, one in hang.blamed(team).items()}


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
    evidence = list(collectives.evidence(ranks, found)) or list(collectives.surplus(ranks))
    return " ".join([told, *evidence])


def _what(one: Blamed) -> str:
    """Return what a rank does instead of what the others wait for."""
    if one.why == hang.ENDED:
        return "ended in order" if one.position.state == "finished" else "ended"
    if one.why == hang.SILENT:
        return f"gave no sign of life since it was {where(one.position)}"
    arrived = one.why != hang.NOT_ARRIVED
    if one.why == hang.ASIDE_OF_TRAINING or (not arrived and one.position.phase in hang.ASIDE):
        return _ASIDE[one.position.phase or "idle"]
    if one.why == hang.NOT_IN_COLLECTIVE or (not arrived and one.position.frames):
        return f"runs {text_format.clean(one.position.frames[0])} {where(one.position)}"
    if one.why == hang.FETCHING or (not arrived and one.position.phase == "data"):
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
    """Return where a rank is, for :mod:`torchobs.detect.hang`: process groups of one name differ by the replica group."""
    team = labels.team(rank.rank)
    progress = {f"{group}-{team}" if team else group: one for group, one in rank.collectives.items()}
    return Position(rank.state, rank.steps if rank.recorded else None, rank.phase, rank.frames, progress)
