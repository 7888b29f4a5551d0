"""Which rank the others wait for."""

import pytest

from torchobs.detect.stragglers import Spent, compare, slowness, without_asides

FAST = (0.01, 0.15, 0.69, 0.10, 0.05)
"""data, forward, backward with 0.39 s of waiting in it, optimizer, other: one second"""
LATE = (0.40, 0.15, 0.30, 0.10, 0.05)


def fleet(count: int, **others: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    """As many ranks, all alike but some."""
    return {str(rank): FAST for rank in range(count)} | {name.removeprefix("r"): times for name, times in others.items()}


def test_who_is_late_in_data_is_found_though_all_steps_take_the_same() -> None:
    """The others' own work is 0.61 s, its own is the whole second; nobody else is slow."""
    found = compare(fleet(8, r3=LATE))
    assert found["3"].phase == 0
    assert found["3"].factor == pytest.approx(1 / 0.61)
    assert all(found[str(rank)].factor == pytest.approx(1.0) for rank in range(8) if rank != 3)


def test_of_two_ranks_the_one_that_does_not_wait_is_the_slow_one() -> None:
    """More time in the backward pass is waiting, as far as anyone can tell."""
    found = compare(fleet(2, r1=LATE))
    assert found["1"].factor == pytest.approx(1 / 0.61)
    assert found["1"].phase == 0
    assert found["0"].factor == pytest.approx(1.0)


@pytest.mark.parametrize(("phase", "name"), [(0, "data"), (1, "forward"), (3, "optimizer")])
def test_the_phase_is_the_one_in_which_it_is_late(phase: int, name: str) -> None:
    """In each in which nobody waits for anybody."""
    times = [*FAST]
    times[phase] += 0.3
    times[2] -= 0.3
    found = compare(fleet(4, r2=tuple(times)))
    assert found["2"].phase == phase, name
    assert found["2"].factor == pytest.approx(1 / 0.7)


def test_ranks_that_do_not_wait_for_each_other_are_compared_as_they_are() -> None:
    """A rank that takes twice as long in everything."""
    found = compare(fleet(4, r1=tuple(2 * value for value in FAST)))
    assert found["1"].factor == pytest.approx(2.0)
    assert found["0"].factor == pytest.approx(1.0)


@pytest.mark.parametrize("count", [0, 1])
def test_nobody_is_slow_alone(count: int) -> None:
    """There is nothing to compare with."""
    assert compare(fleet(count)) == {}


def test_ranks_that_do_nothing_are_not_divided_by() -> None:
    """Times of zero, as of a file that somebody made up."""
    nothing = dict.fromkeys(("0", "1", "2"), (0.0,) * 5)
    assert {found.factor for found in compare(nothing).values()} == {1.0}
    huge = {**nothing, "0": (1e300,) * 5}
    assert all(found.factor == found.factor for found in compare(huge).values())  # the NaN test


def test_what_was_waited_for_an_evaluation_is_taken_out_where_it_was_waited() -> None:
    """In the phase in which a rank is most above its peers, and no more than that; the slow one stays slow."""
    waiting = (0.01, 0.15, 0.69, 0.10, 0.55)
    assert without_asides({"0": FAST, "1": waiting}, {"0": 0.5, "1": 0.0}) == {"0": FAST, "1": pytest.approx(FAST)}
    assert without_asides({"0": FAST, "1": waiting}, {"0": 0.2, "1": 0.0})["1"] == pytest.approx((0.01, 0.15, 0.69, 0.10, 0.35))
    assert without_asides({"0": FAST, "1": LATE}, {"0": 0.0, "1": 0.0}) == {"0": FAST, "1": LATE}
    assert without_asides({"0": FAST}, {"0": 0.0}) == {"0": FAST}


@pytest.mark.parametrize(("steps", "is_slow"), [(39, False), (200, True)])
def test_a_fraction_of_a_second_makes_no_rank_slow(steps: int, is_slow: bool) -> None:  # noqa: FBT001  # parametrized
    """One forward pass of a quarter of a second, as a first one is, in 39 steps; and the same mean over more of them."""
    usual, late = (0.0, 0.002, 0.006, 0.001, 0.0), (0.0, 0.0085, 0.006, 0.001, 0.0)
    found = slowness({"0": Spent(steps, late, 0.0), "1": Spent(steps, usual, 0.0)})
    assert found["0"].is_slow is is_slow
