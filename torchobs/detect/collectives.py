"""Compare the collectives that ranks have called, by torch's flight recorder: who did not come, and who called another.

The ranks of a process group number its collectives alike. If one waits in number n and another, which waits nowhere, has
called fewer than n, that one did not come: this is the comparison of torch's own analyzer of dumps
(``torch/distributed/flight_recorder``), by numbers instead of all entries. A rank that is missing in one group because it waits
in another is not to blame; the rank that it waits for is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SAME_SIZE = frozenset({"all_reduce", "reduce", "broadcast"})
"""Operations whose inputs have the same size on all ranks; others may be uneven."""


class GroupProgress(NamedTuple):
    """How far a rank is in one process group, while it makes no step."""

    enqueued: int
    """number of the last collective that it has called"""
    completed: int
    """number of the last one that has come back"""
    waits_s: float
    """since it called what it waits for; 0: it waits for nothing in this group"""
    operation: str = "none"
    """what it waits for; one of ``catalog.COLLECTIVE_OPERATIONS``"""
    size: float | None = None
    """bytes of that operation's input here; ``None``: unknown"""

    @property
    def waiting(self) -> bool:
        """Return True if it waits in this group."""
        return self.waits_s > 0 or self.enqueued > self.completed


class Absence(NamedTuple):
    """A collective to which a rank did not come."""

    group: str
    number: int
    operation: str
    """as those call it who wait; none: unknown"""
    enqueued: int
    """number of the last collective of the group that the rank has called"""
    waiting: int
    """number of ranks seen to wait for it"""


class Surplus(NamedTuple):
    """Ranks of a group that have called different numbers of collectives."""

    group: str
    ranks: Mapping[int, tuple[str, ...]]
    """by the number of collectives, the highest first; two or more"""


class Mismatch(NamedTuple):
    """Ranks of a group that wait in different operations, each of which was its next."""

    group: str
    number: int
    kinds: Mapping[tuple[str, float | None], tuple[str, ...]]
    """ranks by operation, and by its size where that is what differs"""


def absent(ranks: Mapping[str, Mapping[str, GroupProgress]]) -> dict[str, Absence]:
    """Return the ranks that did not come to a collective in which others wait, by name.

    ``ranks``: of each rank, its progress by group. Groups are compared among the ranks that have them here.
    """
    busy = {rank for rank, groups in ranks.items() if any(one.waiting for one in groups.values())}
    found: dict[str, Absence] = {}
    for group in _groups(ranks):
        members = {rank: groups[group] for rank, groups in ranks.items() if group in groups}
        there = {rank: one for rank, one in members.items() if one.enqueued > one.completed}
        if not there:
            continue
        number = min(one.completed for one in there.values()) + 1
        waiting = [one for one in there.values() if one.completed + 1 == number]
        kinds = {one.operation for one in waiting}
        kind = kinds.pop() if len(kinds) == 1 else "none"
        for rank, one in members.items():
            if one.enqueued < number and rank not in busy:
                found.setdefault(rank, Absence(group, number, kind, one.enqueued, len(there)))
    return found


def surplus(called: Mapping[str, Mapping[str, int]]) -> list[Surplus]:
    """Return the groups in which ranks have called different numbers of collectives. ``called``: of each rank, by group."""
    found = []
    for group in sorted({group for counts in called.values() for group in counts}):
        by_number: dict[int, list[str]] = {}
        for rank, counts in called.items():
            if group in counts:
                by_number.setdefault(counts[group], []).append(rank)
        if len(by_number) > 1:
            found.append(Surplus(group, {number: tuple(ranks) for number, ranks in sorted(by_number.items(), reverse=True)}))
    return found


def inserted(longer: Mapping[int, str], shorter: Mapping[int, str]) -> tuple[str, ...]:
    """Return the calls that one rank has made more than another; empty if their calls do not show that.

    ``longer``, ``shorter``: the last calls of each in one group, by number. They show it where they are the same up to some
    number, and from there on the same again when the additional ones are left out.
    """
    more = max(longer, default=0) - max(shorter, default=0)
    common = [number for number in sorted(shorter) if number in longer]
    first = next((number for number in common if longer[number] != shorter[number]), max(shorter, default=0) + 1)
    same_before = bool(common) and common[0] < first
    same_behind = all(longer.get(number + more) == text for number, text in shorter.items() if number >= first)
    found = tuple(longer[number] for number in range(first, first + more) if number in longer)
    return found if same_before and same_behind and 0 < len(found) == more else ()


def mismatched(ranks: Mapping[str, Mapping[str, GroupProgress]]) -> list[Mismatch]:
    """Return the groups whose ranks wait in the same number, but in different operations or with different sizes."""
    found = []
    for group in _groups(ranks):
        there = {
            rank: one
            for rank, groups in ranks.items()
            if (one := groups.get(group)) is not None and one.enqueued > one.completed and one.operation != "none"
        }
        numbers = {one.completed + 1 for one in there.values()}
        if len(numbers) != 1:
            continue
        sized = {one.operation for one in there.values()} <= SAME_SIZE and all(one.size is not None for one in there.values())
        same_kind = len({one.operation for one in there.values()}) == 1
        kinds: dict[tuple[str, float | None], tuple[str, ...]] = {}
        for rank, one in there.items():
            key = one.operation, one.size if same_kind and sized else None
            kinds[key] = (*kinds.get(key, ()), rank)
        if len(kinds) > 1:
            found.append(Mismatch(group, numbers.pop(), kinds))
    return found


def _groups(ranks: Mapping[str, Mapping[str, GroupProgress]]) -> list[str]:
    return sorted({group for groups in ranks.values() for group in groups})
