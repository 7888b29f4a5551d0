"""The judgment of `torchobs compare` whether two runs differ by more than noise."""

from __future__ import annotations

from random import Random

from torchobs.report.compare import parsed
from torchobs.report.noise import judge


def steps(seed: int, mean: float, count: int = 400) -> list[float]:
    """Step times with slow drifts, as real ones have: neighbours are alike."""
    random, level, found = Random(seed), 0.0, []
    for _ in range(count):
        level = 0.95 * level + random.gauss(0, 0.004)
        found.append(mean * (1 + level + random.gauss(0, 0.05)))
    return found


def test_runs_of_one_speed_are_mostly_judged_the_same() -> None:
    """At most a few of a hundred pairs differ, although neighbouring steps are alike."""
    real = sum(bool(found.real) for seed in range(100) if (found := judge(steps(seed, 0.1), steps(seed + 1000, 0.1))))
    assert real <= 3


def test_a_tenth_slower_is_found() -> None:
    """In nearly each of a hundred pairs."""
    found = [judge(steps(seed, 0.1), steps(seed + 1000, 0.11)) for seed in range(100)]
    assert sum(bool(one.real) for one in found if one) >= 95
    assert all(one and abs(one.change - 0.1) < 0.06 for one in found)


def test_what_cannot_be_judged() -> None:
    """No values: nothing; a few: figures without a judgment; equal ones: no difference."""
    assert judge([], [1.0]) is None
    few = judge([1.0] * 8, [2.0] * 8)
    assert few is not None
    assert (few.change, few.real) == (1.0, None)
    same = judge([1.0] * 100, [1.0] * 100)
    assert same is not None
    assert same.real is False


def test_arguments_by_name() -> None:
    """In each way that they are given; a negative number is a value."""
    given = ["data.bin", "--lr", "3e-4", "--wd=0.1", "model.depth=12", "--shift", "-1", "--fused", "--seed", "7", "-v"]
    assert parsed(given) == {
        "argument 1": "data.bin", "--lr": "3e-4", "--wd": "0.1", "model.depth": "12", "--shift": "-1", "--fused": "yes",
        "--seed": "7", "-v": "yes",
    }  # fmt: skip
