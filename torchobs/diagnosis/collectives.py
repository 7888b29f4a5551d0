"""What torch's flight recorder knows of a hung run's collectives, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torchobs.detect import collectives
from torchobs.detect.collectives import Absence, Mismatch
from torchobs.diagnosis import text_format
from torchobs.diagnosis.status import RankStatus

_MOST_NAMED = 4


def evidence(ranks: Sequence[RankStatus], named: Collection[str]) -> Iterator[str]:
    """Yield for ranks that the others wait for, and that did not come to a collective, to which they did not come."""
    by_absence: dict[Absence, list[str]] = {}
    for rank, one in collectives.absent({rank.rank: rank.collectives for rank in ranks}).items():
        if rank in named:
            by_absence.setdefault(one, []).append(rank)
    for one, names in by_absence.items():
        who = text_format.capital(text_format.ranks(names, _MOST_NAMED))
        yield f"{who} {'has' if len(names) == 1 else 'have'} not come to {_absence(one)}."


def mismatches(ranks: Sequence[RankStatus]) -> Iterator[str]:
    """Yield what differs where ranks of a group wait in different collectives."""
    for one in collectives.mismatched({rank.rank: rank.collectives for rank in ranks}):
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
