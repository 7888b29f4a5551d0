"""Group events of a kind into one line with their number, first and last; otherwise the newest hundred would hide the cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import Severity
from torchobs.exporter.ui import events

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchobs.exporter.ui.events import EventRow

KEPT = 200
"""Newest events of a rank that are kept individually."""
MOST_KINDS = 64
"""Most kinds that are grouped, because applications may name events freely; further kinds are listed individually."""
MOST_ALIKE = 3
"""Up to this number, events of a kind are listed individually."""
MOST_LINES = 100

Kind = tuple[str, str]
"""The title, and an anomaly's kind"""


class Tally(NamedTuple):
    """Number, first and last of the events of a kind."""

    number: int
    first: EventRow
    last: EventRow


@dataclass(frozen=True, slots=True)
class RankEvents:
    """A rank's events since the page has viewers, including those that were overwritten in the ring meanwhile."""

    newest: tuple[EventRow, ...] = ()
    """oldest first"""
    tallies: Mapping[Kind, Tally] = field(default_factory=dict)

    def add(self, told: Iterable[EventRow]) -> RankEvents:
        """Return a copy with later events added."""
        later, tallies = list(told), dict(self.tallies)
        for event in later:
            known, kind = tallies.get(kind_of(event)), kind_of(event)
            if known is not None:
                tallies[kind] = Tally(known.number + max(1, event.number), known.first, event)
            elif len(tallies) < MOST_KINDS:
                tallies[kind] = Tally(max(1, event.number), event, event)
        return RankEvents((*self.newest, *later)[-KEPT:], tallies)


class Line(NamedTuple):
    """One line of the list: an event, or the last of a group."""

    event: EventRow
    number: int = 1
    first: EventRow | None = None
    """the first of a group"""


class Log(NamedTuple):
    """The list of a run's events."""

    lines: tuple[Line, ...] = ()
    """newest first"""
    cause: EventRow | None = None
    """the first warning or error, which may have caused the later ones"""


NOTHING = RankEvents()


def log_of(ranks: Iterable[RankEvents]) -> Log:
    """Merge the events of several ranks: equal events of several ranks become one line, and so do many of a kind."""
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
    """Return the key by which an event is grouped."""
    return event.title, event.anomaly


def _merged(one: Tally, other: Tally) -> Tally:
    """Merge the tallies of two ranks. The number is the larger, not the sum: ranks usually report the same events."""
    first, last = min(one.first, other.first, key=_at), max(one.last, other.last, key=_at)
    ranks = tuple(dict.fromkeys((*one.last.ranks, *other.last.ranks)))
    return Tally(max(one.number, other.number), first, last._replace(ranks=ranks))


def _at(event: EventRow) -> float:
    return event.at_s
