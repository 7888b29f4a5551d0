"""Which rank the others wait for."""

import pytest

from torchobs.detect.stragglers import Spent, compare, slowness

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


def test_a_rank_for_which_nobody_waits_is_not_slow() -> None:
    """A rank that takes twice as long in everything, while its peers go on."""
    found = compare(fleet(4, r1=tuple(2 * value for value in FAST)))
    assert {one.factor for one in found.values()} == {1.0}


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


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("waiting", range(5))
@pytest.mark.parametrize("busy", [None, 4])
def test_who_waits_for_a_peer_s_evaluation_is_not_slow(waiting: int, busy: int | None, ranks: int) -> None:
    """Wherever in the step the others wait; the evaluation is in no phase, or in `other` where it is not known as one.

    Its evaluation outside of all phases says nothing of the rank, and a fetch in which it waits while it works in `other` is
    all that cannot be distinguished from work.
    """
    if (waiting, busy) == (0, 4):
        return
    waits, evaluates = list(FAST), list(FAST)
    waits[waiting] += 20.0
    if busy is not None:
        evaluates[busy] += 20.0
    times = {str(rank): tuple(waits) for rank in range(1, ranks)} | {"0": tuple(evaluates)}
    found = compare(times)
    assert not any(one.is_slow for one in found.values())
    assert {one.factor for one in found.values()} == {1.0}


def test_a_rank_that_waits_in_its_forward_pass_for_another_s_data_is_not_slow() -> None:
    """The one that loads is: buffers are broadcast at the beginning of a forward pass."""
    loads, waits = (0.4, 0.1, 0.3, 0.1, 0.1), (0.0, 0.5, 0.3, 0.1, 0.1)
    found = compare({"0": loads, "1": waits})
    assert found["0"].factor == pytest.approx(1 / 0.6)
    assert found["1"].factor == 1.0
    assert found["1"].excess_s == (0.0,) * 5


@pytest.mark.parametrize(("steps", "is_slow"), [(39, False), (200, True)])
def test_a_fraction_of_a_second_makes_no_rank_slow(steps: int, is_slow: bool) -> None:  # noqa: FBT001  # parametrized
    """One forward pass of a quarter of a second, as a first one is, in 39 steps; and the same mean over more of them."""
    usual, late = (0.0, 0.002, 0.0125, 0.001, 0.0), (0.0, 0.0085, 0.006, 0.001, 0.0)
    found = slowness({"0": Spent(steps, late), "1": Spent(steps, usual)})
    assert found["0"].is_slow is is_slow
