"""The rate limiter."""

from __future__ import annotations

from torchobs.support.rate_limit import RateLimiter

S = 1_000_000_000


def test_a_burst_and_then_one_every_so_often() -> None:
    """Three at once, then one in ten seconds, however often it is asked for."""
    limiter = RateLimiter(10 * S, 3)
    start = 1_000 * S
    taken = [second for second in range(100) if limiter.take(start + second * S)]
    assert taken == [0, 1, 2, *range(10, 100, 10)]


def test_what_was_not_used_is_there_later_but_no_more_than_the_burst() -> None:
    """A quiet hour does not save up for a flood."""
    limiter = RateLimiter(10 * S, 3)
    for _ in range(3):
        assert limiter.take(0)
    assert not limiter.take(0)
    assert [limiter.take(3600 * S) for _ in range(5)] == [True, True, True, False, False]


def test_each_key_has_its_own_and_knows_what_was_held_back() -> None:
    """One cause's flood takes nothing from another."""
    limiter = RateLimiter(60.0)
    assert [limiter.take(now, "a") for now in (0.0, 1.0, 59.0)] == [True, False, False]
    assert limiter.take(59.0, "b")
    assert limiter.take(60.0, "a")
    assert (limiter.held_back("a"), limiter.held_back("b"), limiter.held_back("c")) == (2, 0, 0)


def test_keys_that_somebody_else_chooses_fill_no_memory() -> None:
    """They are forgotten; what they had taken may then be taken anew."""
    limiter = RateLimiter(60.0, most_keys=10)
    assert all(limiter.take(0.0, number) for number in range(1000))
    assert len(limiter._states) <= 10
