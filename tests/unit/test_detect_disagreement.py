"""Ranks whose averaged gradient is not what the others have."""

from __future__ import annotations

import random

import pytest

from torchobs.detect.disagreement import LEAST_STEPS, differing


def norms(ranks: int, steps: int = 40, **odd: float) -> dict[str, dict[int, float]]:
    """The same norms on so many ranks but for rounding; those of the named ones (`r3`) are so many times that."""
    chance = random.Random(1)
    usual = {step: chance.lognormvariate(0.0, 1.0) for step in range(1, steps + 1)}
    return {
        str(rank): {step: norm * odd.get(f"r{rank}", 1.0) * (1 + chance.gauss(0, 1e-6)) for step, norm in usual.items()}
        for rank in range(ranks)
    }


@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_the_rank_that_differs_is_named(ranks: int) -> None:
    """By a fiftieth or by orders of magnitude."""
    assert differing(norms(ranks, r1=1.02)) == ("1",)
    assert differing(norms(ranks, r2=1e-3)) == ("2",)


def test_of_two_that_differ_neither_is_the_odd_one() -> None:
    """All are named where no majority agrees."""
    assert differing(norms(2, r1=2.0)) == ("0", "1")
    assert differing(norms(4, r2=2.0, r3=2.0)) == ("0", "1", "2", "3")


def test_ranks_that_agree_are_not_named() -> None:
    """Rounding, a single rank, too few common steps, one step in which they differed, a norm that is not finite."""
    assert differing(norms(8, 20_000)) == ()
    assert differing(norms(1)) == differing({}) == ()
    assert differing(norms(4, LEAST_STEPS - 1, r1=2.0)) == ()
    once = norms(4)
    once["1"][40] *= 2.0
    assert differing(once) == ()
    once["1"] = dict.fromkeys(once["1"], float("nan"))
    assert differing(once) == ()
