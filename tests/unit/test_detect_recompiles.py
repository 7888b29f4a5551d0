"""A function that is compiled again and again is a fault; one that is compiled for a second size is not."""

from __future__ import annotations

from torchobs.detect.learning import WITHIN_ONE, Recompiles


def test_three_are_usual_and_the_fourth_is_told() -> None:
    """The usual ones: a size that becomes dynamic, evaluation, a second dtype."""
    recompiles = Recompiles()
    assert [recompiles.note("forward", float(now), now) for now in range(4)] == [0, 0, 0, 4]


def test_a_storm_is_told_once_a_minute() -> None:
    """While it goes on."""
    recompiles = Recompiles()
    told = [recompiles.note("forward", float(now), now) for now in range(0, 130, 2)]
    assert [count for count in told if count] == [4, 34, 64]


def test_functions_are_told_apart() -> None:
    """Four functions that are compiled twice are no storm."""
    recompiles = Recompiles()
    assert not any(recompiles.note(name, 0.0, step) for step in range(3) for name in "abcd")


def test_those_of_one_step_are_no_storm_unless_torch_gives_up() -> None:
    """One for each kind of parameter, in an optimizer's first step: the remedy for a storm is none for it."""
    recompiles = Recompiles()
    assert not any(recompiles.note("single_param_adam", float(now), now // 5) for now in range(6))
    assert recompiles.note("single_param_adam", 6.0, 1) == WITHIN_ONE


def test_recompilations_far_apart_are_no_storm() -> None:
    """One in five minutes is no more than two within ten."""
    recompiles = Recompiles()
    assert not any(recompiles.note("forward", 300.1 * index, index) for index in range(20))


def test_functions_without_end_are_forgotten() -> None:
    """The one longest without a recompilation first."""
    recompiles = Recompiles()
    for index in range(10_000):
        recompiles.note(str(index), float(index), index)
        recompiles.note("again", float(index), index)
    assert len(recompiles._times) <= 256
    assert "again" in recompiles._times
