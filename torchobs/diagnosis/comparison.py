"""Findings on the ranks of a run compared with each other: what they train, how fast, and how many are missing. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torchobs.catalog import DISTRIBUTED_INFO, PHASES
from torchobs.catalog.findings import Finding, finding
from torchobs.detect.disagreement import differing, drifted, same_batches, same_losses
from torchobs.detect.speed import LEAST_EXCESS_S, LEAST_STEPS, SLOW
from torchobs.ranks import labels
from torchobs.ranks.rank_file import DIGITS
from torchobs.ranks.rank_view import RankView
from torchobs.support import text

_MOST_NAMED = 4


def beside_each_other(ranks: Sequence[RankView], expected: int) -> Iterator[Finding]:
    """Yield the differences between ranks, and how many are missing of the ``expected`` ones on this machine."""
    for team in labels.teams(ranks):
        uneven = any("+join" in kinds for rank in team for values in rank.values(DISTRIBUTED_INFO) for kinds in values)
        if not uneven:  # else a step's number is not the same step on all ranks
            yield from _disagreeing(team)
            yield from _weights_apart(team)
        yield from _batches_alike(team)
    if len(ranks) < expected:
        yield finding("ranks_missing", missing=expected - len(ranks), here=len(ranks), expected=expected)
    claimed = [name for rank in ranks if (name := rank.rank.removesuffix(f"-{rank.incarnation[:DIGITS]}")) != rank.rank]
    if claimed:
        yield finding("same_rank", rank=claimed[0], here=claimed.count(claimed[0]) + 1)
    yield from _slowest(ranks)


def _disagreeing(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the ranks with another gradient, though DistributedDataParallel makes it the same on all."""
    norms = {rank.rank: rank.alike_norms for rank in ranks}
    odd = differing(norms) if all(norms.values()) else ()
    if odd:
        step = max(set.intersection(*(set(by_step) for by_step in norms.values())))
        values = [f"{name}: {text.number(norms[name][step])}" for name in odd]
        usual = next((by_step[step] for name, by_step in norms.items() if name not in odd), None)
        named = f"rank {text.joined(values, 2 * _MOST_NAMED)}"
        yield finding("ranks_disagree", step=step, odd=text.ranks(odd, _MOST_NAMED), norms=named, usual=usual)


def _weights_apart(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the ranks with other weights, though DistributedDataParallel trains one model."""
    drift = drifted({rank.rank: rank.weights for rank in ranks})
    if drift is not None:
        since, alike, odd = drift
        named, everything = text.ranks(odd, 2 * _MOST_NAMED), len(odd) == len(ranks)
        yield finding("weights_differ", step=since, odd=named, all=everything, alike=alike or None)


def _batches_alike(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that all ranks get the same data."""
    since = same_batches({rank.rank: rank.batches for rank in ranks})
    if since is not None and same_losses(rank.losses for rank in ranks):
        yield finding("same_batches", step=since)


def _slowest(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield the rank that the others wait for."""
    there = [rank for rank in ranks if rank.up] or ranks
    slow = [(rank, rank.slowness) for rank in there if rank.slowness and rank.slowness.is_slow]
    if slow:
        rank, slowness = max(slow, key=lambda pair: pair[1].factor)
        times = {"factor": round(slowness.factor, 1), "own": slowness.own_s, "others_s": slowness.others_s}
        yield finding("slowest_rank", rank=rank.rank, up=rank.up, phase=PHASES[slowness.phase], **dict[str, Any](times))
    else:
        yield from chain.from_iterable(map(_apart, labels.teams(there)))


def _apart(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Yield that ranks wait for each other: their steps take equally long, but their phases do not.

    It is not certain then which rank is slow: the time that one spends in forward another may wait in backward, or the reverse.
    """
    # between two steps is one thing with other: which of them a pause is counted as differs from rank to rank
    paces = [(rank.rank, rank.pace.phases_s) for rank in ranks if rank.pace and rank.pace.steps >= LEAST_STEPS]
    if len(paces) < max(2, len(ranks)):
        return
    rows = {name: (*phases_s[:-2], sum(phases_s[-2:])) for name, phases_s in paces}
    spread = [max(column) - min(column) for column in zip(*rows.values(), strict=True)]
    phase = max(range(len(spread)), key=spread.__getitem__)
    more, less = (choose(rows, key=lambda name: rows[name][phase]) for choose in (max, min))
    long, short = rows[more], rows[less]
    if spread[phase] < max((SLOW - 1) * sum(long), LEAST_EXCESS_S) or abs(sum(long) - sum(short)) > spread[phase] / 2:
        return
    elsewhere = max(range(len(spread)), key=lambda index: short[index] - long[index])
    values = {"up": any(rank.up for rank in ranks), "phase": PHASES[phase], "elsewhere": PHASES[elsewhere]}
    yield finding("ranks_wait", rank=more, other=less, own=long[phase], others_s=short[elsewhere], **dict[str, Any](values))
