"""Choice of the incarnation that is served for a rank: the newest of each (job_name, run_id, rank).

Incarnations are never summed or merged. Two that live at the same time (two scripts started with one run id) are both served,
the older with the first digits of its incarnation appended to its rank: ``rank="0-3f9a12bc"``. The decision depends on the
files alone, so that a restarted exporter decides the same and no label changes.
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


def resolve(candidates: Iterable[RankCandidate]) -> Mapping[str, str]:
    """Return the incarnations to serve, each with the suffix of its rank: "" for the newest."""
    rivals: dict[tuple[str, str, str], list[RankCandidate]] = defaultdict(list)
    for candidate in candidates:
        rivals[candidate.rank].append(candidate)
    served: dict[str, str] = {}
    for group in rivals.values():
        newest = max(group, key=_seniority)
        others = [candidate for candidate in group if candidate is not newest and _side_by_side(candidate, newest)]
        served |= {candidate.incarnation: f"-{candidate.incarnation[:DIGITS]}" for candidate in others}
        served[newest.incarnation] = ""
    return served


def _seniority(candidate: RankCandidate) -> tuple[bool, int, str]:
    return candidate.same_boot, candidate.born_ns, candidate.incarnation


def _side_by_side(older: RankCandidate, newest: RankCandidate) -> bool:
    # different restart counts: by the launcher's account one replaces the other
    comparable = older.same_boot and newest.same_boot and older.restart == newest.restart
    return comparable and older.heartbeat_ns - newest.born_ns > OVERLAP_NS
