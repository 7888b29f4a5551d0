"""Which ranks the others of a hung run wait for."""

from __future__ import annotations

import random

import pytest

from torchobs.detect import hang
from torchobs.detect.hang import Position, blamed, waits

WAITS = ("/x/torch/autograd/graph.py:800 in _engine_run_backward", "/x/train.py:9 in main")
SLEEPS = ("/home/me/hooks.py:12 in pause", *WAITS)


def at(steps: int | None, phase: str | None, state: str = "hung", frames: tuple[str, ...] = ()) -> Position:
    """A rank."""
    return Position(state, steps, phase, frames)


def among(others: Position, count: int, **odd: Position) -> dict[str, Position]:
    """So many ranks in all, of which the named ones (`r3`) are elsewhere."""
    return {str(rank): odd.get(f"r{rank}", others) for rank in range(count)}


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (at(10, "forward"), hang.ELSEWHERE),
        (at(10, "other"), hang.ELSEWHERE),
        (at(10, "data"), hang.FETCHING),
        (at(9, "data"), hang.FETCHING),
        (at(11, "forward"), hang.ELSEWHERE),  # it has left a collective out, and went on
        (at(10, "evaluation", "alive"), hang.ASIDE_OF_TRAINING),
        (at(20, "idle", "alive"), hang.ASIDE_OF_TRAINING),
        (at(10, "backward", "unresponsive"), hang.SILENT),
        (at(10, None, "finished"), hang.ENDED),
        (at(None, "data"), hang.FETCHING),
    ],
)
def test_the_rank_that_is_not_in_the_collective_is_named(count: int, odd: Position, why: str) -> None:
    """All the others wait in backward of step 11."""
    found = blamed(among(at(10, "backward"), count, r1=odd))
    assert {name: one.why for name, one in found.items()} == {"1": why}


def test_the_minority_is_named_where_collectives_are_in_forward() -> None:
    """FSDP gathers weights there: 63 ranks wait for the one that is still in its backward."""
    assert set(blamed(among(at(10, "forward"), 64, r5=at(9, "backward")))) == {"5"}


def test_several_are_named() -> None:
    """One stage of eight is elsewhere, as when a file server does not answer one node."""
    odd = {f"r{rank}": at(10, "data") for rank in range(8, 16)}
    assert set(blamed(among(at(10, "backward"), 64, **odd))) == {str(rank) for rank in range(8, 16)}


def test_stacks_distinguish_ranks_in_the_same_phase() -> None:
    """A hook of backward sleeps on rank 6: all are in backward of the same step."""
    ranks = among(at(10, "backward", frames=WAITS), 8, r6=at(10, "backward", frames=SLEEPS))
    assert {name: one.why for name, one in blamed(ranks).items()} == {"6": hang.NOT_IN_COLLECTIVE}
    assert waits(("/x/torch/distributed/c10d_logger.py:83 in wrapper", "/home/me/train.py:1 in main"))
    assert not waits(SLEEPS)
    assert not waits(())


@pytest.mark.parametrize(
    "ranks",
    [
        {"0": at(10, "backward")},
        among(at(10, "backward"), 8),
        among(at(10, "backward", "alive"), 8, r1=at(10, "data", "alive")),
        among(at(10, "backward"), 8, r1=at(10, None)),
        among(at(10, "backward", frames=WAITS), 8, r1=at(10, "backward")),
        among(at(10, "data"), 8),
        {},
    ],
)
def test_nobody_is_named_without_evidence(ranks: dict[str, Position]) -> None:
    """A single rank, all at one place, no rank that hangs, an unknown phase, stacks of some only."""
    assert blamed(ranks) == {}


def test_whoever_is_named_is_never_everybody() -> None:
    """Of random runs: a name is one of the ranks, and somebody is left who waits."""
    made = random.Random(5)
    phases = [*("data", "forward", "backward", "optimizer", "other", "evaluation", "idle"), None]
    states = ["hung", "hung", "hung", "alive", "unresponsive", "finished", "lost"]
    for _ in range(20_000):
        count = made.choice([2, 3, 8])
        ranks = {
            str(rank): at(
                made.choice([9, 10, None]), made.choice(phases), made.choice(states), made.choice([(), WAITS, SLEEPS])
            )
            for rank in range(count)
        }
        found = blamed(ranks)
        assert set(found) < set(ranks) or not found
