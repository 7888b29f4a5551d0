"""A function that is compiled again and again is a fault; one that is compiled for a second size is not."""

from __future__ import annotations

from torchobs.detect.recompiles import Recompiles


def test_three_are_usual_and_the_fourth_is_told() -> None:
    """The usual ones: a size that becomes dynamic, evaluation, a second dtype."""
    recompiles = Recompiles()
    assert [recompiles.note("forward", now) for now in (0.0, 1.0, 2.0, 3.0)] == [0, 0, 0, 4]


def test_a_storm_is_told_once_a_minute() -> None:
    """While it goes on."""
    recompiles = Recompiles()
    told = [recompiles.note("forward", float(now)) for now in range(0, 130, 2)]
    assert [count for count in told if count] == [4, 34, 64]


def test_functions_are_told_apart() -> None:
    """Four functions that are compiled twice are no storm."""
    recompiles = Recompiles()
    assert not any(recompiles.note(name, 0.0) for name in "abcd" * 3)


def test_recompilations_far_apart_are_no_storm() -> None:
    """One in five minutes is no more than two within ten."""
    recompiles = Recompiles()
    assert not any(recompiles.note("forward", 300.1 * index) for index in range(20))


def test_functions_without_end_are_forgotten() -> None:
    """The one longest without a recompilation first."""
    recompiles = Recompiles()
    for index in range(10_000):
        recompiles.note(str(index), float(index))
        recompiles.note("again", float(index))
    assert len(recompiles._times) <= 256
    assert "again" in recompiles._times
