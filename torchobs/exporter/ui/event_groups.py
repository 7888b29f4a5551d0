"""Events of a kind as one line: how many there were, the first and the last. Else the newest hundred hide what began it all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import Severity
from torchobs.exporter.ui import events

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchobs.exporter.ui.events import EventRow

KEPT = 200
"""Events of a rank that are kept as they are, the newest."""
MOST_KINDS = 64
"""An application's own events may have any names: those of further kinds are told one by one."""
MOST_ALIKE = 3
"""So many of a kind are still told one by one."""
MOST_LINES = 100

Kind = tuple[str, str]
"""The title, and an anomaly's kind"""


class Tally(NamedTuple):
    """The events of a kind that one rank has told of."""

    number: int
    first: EventRow
    last: EventRow


@dataclass(frozen=True, slots=True)
class RankEvents:
    """What a rank's ring has told since somebody watches, also what has left the ring since then."""

    newest: tuple[EventRow, ...] = ()
    """oldest first"""
    tallies: Mapping[Kind, Tally] = field(default_factory=dict)

    def add(self, told: Iterable[EventRow]) -> RankEvents:
        """Return it with later events."""
        later, tallies = list(told), dict(self.tallies)
        for event in later:
            known, kind = tallies.get(kind_of(event)), kind_of(event)
            if known is not None:
                tallies[kind] = Tally(known.number + max(1, event.number), known.first, event)
            elif len(tallies) < MOST_KINDS:
                tallies[kind] = Tally(max(1, event.number), event, event)
        return RankEvents((*self.newest, *later)[-KEPT:], tallies)


class Line(NamedTuple):
    """One line of the list: an event, or several of a kind, of which it shows the last."""

    event: EventRow
    number: int = 1
    first: EventRow | None = None
    """of several"""


class Log(NamedTuple):
    """What has happened to a run."""

    lines: tuple[Line, ...] = ()
    """newest first"""
    cause: EventRow | None = None
    """the first warning or error: what came after it may be its consequence"""


NOTHING = RankEvents()


def log_of(ranks: Iterable[RankEvents]) -> Log:
    """Return the events of several ranks as one list: what happened to several alike is one, and so are many of a kind."""
    every = list(ranks)
    merged: dict[Kind, Tally] = {}
    for rank in every:
        for kind, tally in rank.tallies.items():
            merged[kind] = _merged(merged[kind], tally) if kind in merged else tally
    many = {kind for kind, tally in merged.items() if tally.number > MOST_ALIKE}
    single = (event for rank in every for event in rank.newest if kind_of(event) not in many)
    lines = [Line(event) for event in events.grouped(sorted(single, key=lambda event: event.at_s, reverse=True))]
    lines += [Line(merged[kind].last, merged[kind].number, merged[kind].first) for kind in many]
    lines.sort(key=lambda line: line.event.at_s, reverse=True)
    serious = (tally.first for tally in merged.values() if tally.first.severity is not Severity.INFO)
    return Log(tuple(lines[:MOST_LINES]), min(serious, key=lambda event: event.at_s, default=None))


def kind_of(event: EventRow) -> Kind:
    """Return what an event is grouped by."""
    return event.title, event.anomaly


def _merged(one: Tally, other: Tally) -> Tally:
    """Return the tally of both, who are different ranks: what happened to all alike is counted as often as to each."""
    first, last = min(one.first, other.first, key=_at), max(one.last, other.last, key=_at)
    ranks = tuple(dict.fromkeys((*one.last.ranks, *other.last.ranks)))
    return Tally(max(one.number, other.number), first, last._replace(ranks=ranks))


def _at(event: EventRow) -> float:
    return event.at_s
