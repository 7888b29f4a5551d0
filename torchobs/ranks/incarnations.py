"""Choice of the incarnations that are served for a rank: of each (job_name, run_id, rank) one, unless several live.

Incarnations are never summed or merged. Of two processes that live at the same time and claim one rank (two scripts started
with one run id) the older keeps the rank, and the younger gets the first digits of its incarnation behind it for all its life:
``rank="0-3f9a12bc"``. After its restart it has other digits, so that no series goes back. A process that starts while its
predecessor still dies is served once that is over, at once where the launcher counted a restart. The decision depends on the
files, so that a restarted exporter decides the same.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OVERLAP_NS = 3_000_000_000
"""Two incarnations coexist if both have heartbeats for this long; a shorter overlap is a restart."""

DIGITS = 8
"""Digits of the incarnation that are appended to the rank."""


NOW_NS = (1 << 63) - 1
"""A time after the birth of every file, also of one that is made during the scan."""


class RankCandidate(NamedTuple):
    """A flight file as a candidate for serving a rank."""

    rank: tuple[str, str, str]
    """job_name, run_id, rank"""
    incarnation: str
    """in hexadecimal"""
    same_boot: bool
    """True if its CLOCK_MONOTONIC times are comparable with ours"""
    born_ns: int
    """creation time: CLOCK_MONOTONIC, unaffected by clock jumps; wall clock for a file of another boot"""
    restart: int
    heartbeat_ns: int
    launch: str = ""
    """what the processes that one launcher started have in common (``identity.launch``); empty: unknown"""
    launched_by: str = ""
    """incarnation of the process that started this one by ``multiprocessing``; it is no rank then"""
    alive_ns: int = 0
    """until when its process lived: :data:`NOW_NS` while it holds its lock and beats; 0 if it is dead, stopped or unknown"""
    displaced: bool = False
    """it was served with a suffix, or until a younger one took its place: it does not take the plain rank (back)"""


def resolve(candidates: Iterable[RankCandidate]) -> Mapping[str, str]:
    """Return the incarnations to serve, each with the suffix of its rank: "" for one of each rank."""
    rivals: dict[tuple[str, str, str], list[RankCandidate]] = defaultdict(list)
    for candidate in candidates:
        rivals[candidate.rank].append(candidate)
    served: dict[str, str] = {}
    for group in rivals.values():
        holders = _holders(sorted(group, key=_seniority))
        served |= {candidate.incarnation: f"-{candidate.incarnation[:DIGITS]}" for candidate in holders}
        served |= {candidate.incarnation: "" for candidate in [one for one in holders if not one.displaced][:1]}
    return served


def _holders(group: Iterable[RankCandidate]) -> list[RankCandidate]:
    """Return the latest of each line of successors, the oldest line first; ``group``: the oldest candidate first."""
    holders: list[RankCandidate] = []
    for candidate in group:
        for place, holder in enumerate(holders):
            if _coexist(holder, candidate):
                continue
            if not _may_coexist(holder, candidate):
                holders[place] = candidate
            break
        else:
            holders.append(candidate)
    return holders


def _seniority(candidate: RankCandidate) -> tuple[bool, int, str]:
    return candidate.same_boot, candidate.born_ns, candidate.incarnation


def _coexist(older: RankCandidate, younger: RankCandidate) -> bool:
    return not _is_successor(older, younger) and older.heartbeat_ns - younger.born_ns > OVERLAP_NS


def _may_coexist(older: RankCandidate, younger: RankCandidate) -> bool:
    """Return True while the older one still lives, and may be about to end."""
    return not _is_successor(older, younger) and older.alive_ns > younger.born_ns


def _is_successor(older: RankCandidate, younger: RankCandidate) -> bool:
    """Return True if the younger one is in the older one's place by the account of whoever started them."""
    if not (older.same_boot and younger.same_boot) or younger.launched_by == older.incarnation:
        return True
    is_same_launch = not (older.launch and younger.launch) or older.launch == younger.launch
    return younger.restart > older.restart and is_same_launch
