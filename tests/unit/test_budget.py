"""The budget of spans."""

from __future__ import annotations

from torchobs.support.rate_limit import Budget

S = 1_000_000_000


def test_a_burst_and_then_one_every_so_often() -> None:
    """Three at once, then one in ten seconds, however often it is asked for."""
    budget = Budget(10 * S, 3)
    start = 1_000 * S
    taken = [second for second in range(100) if budget.take(start + second * S)]
    assert taken == [0, 1, 2, *range(10, 100, 10)]


def test_what_was_not_used_is_there_later_but_no_more_than_the_burst() -> None:
    """A quiet hour does not save up for a flood."""
    budget = Budget(10 * S, 3)
    for _ in range(3):
        assert budget.take(0)
    assert not budget.take(0)
    assert [budget.take(3600 * S) for _ in range(5)] == [True, True, True, False, False]
