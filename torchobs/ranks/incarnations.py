"""Which incarnation of a rank is served: only the newest of (job_name, run_id, rank), the older at once no more.

They are never summed, and nothing is merged. Two that live side by side (two scripts started with one run id) are both
served, the older with the first digits of its incarnation behind its rank: ``rank="0-3f9a12bc"``. That is decided from what the
files say alone, so that an exporter that starts again decides the same, and the label of no series changes with it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OVERLAP_NS = 3_000_000_000
"""Two that both beat for this long are two; less is one that ends while its successor starts."""

DIGITS = 8
"""Of an incarnation, behind the rank"""


class RankCandidate(NamedTuple):
    """One flight file's claim to a rank."""

    rank: tuple[str, str, str]
    """job_name, run_id, rank"""
    incarnation: str
    """in hexadecimal"""
    same_boot: bool
    """whether its times on CLOCK_MONOTONIC compare with those of the others"""
    born_ns: int
    """CLOCK_MONOTONIC, which no jump of the wall clock moves; the wall clock in a file of another boot"""
    restart: int
    heartbeat_ns: int


def resolve(claims: Iterable[RankCandidate]) -> Mapping[str, str]:
    """Return the incarnations to serve, each with what to add to its rank: "" for the newest."""
    rivals: dict[tuple[str, str, str], list[RankCandidate]] = defaultdict(list)
    for claim in claims:
        rivals[claim.rank].append(claim)
    served: dict[str, str] = {}
    for group in rivals.values():
        newest = max(group, key=_seniority)
        others = [claim for claim in group if claim is not newest and _side_by_side(claim, newest)]
        served |= {claim.incarnation: f"-{claim.incarnation[:DIGITS]}" for claim in others}
        served[newest.incarnation] = ""
    return served


def _seniority(claim: RankCandidate) -> tuple[bool, int, str]:
    return claim.same_boot, claim.born_ns, claim.incarnation


def _side_by_side(older: RankCandidate, newest: RankCandidate) -> bool:
    # with another restart count the launcher itself has said that the one succeeds the other
    comparable = older.same_boot and newest.same_boot and older.restart == newest.restart
    return comparable and older.heartbeat_ns - newest.born_ns > OVERLAP_NS
