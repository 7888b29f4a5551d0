"""Waiting for data as literals: counters in, verdicts out."""

from __future__ import annotations

from torchobs.detect.starvation import BEGINS, ENDS, LEAST_STEPS, WINDOW_S, DataCounters, Starvation


def verdicts(*shares: float, steps: int = 100) -> list[bool]:
    """The verdict after each window, of which training waited that share."""
    judge, now_s, data_s = Starvation(), 0.0, 0.0
    found = []
    judge.judge(DataCounters(0.0, 0, 0.0, 0.0))
    for number, share in enumerate(shares, 1):
        now_s, data_s = now_s + WINDOW_S, data_s + share * WINDOW_S
        if judge.judge(DataCounters(now_s, number * steps, data_s, now_s)):
            found.append(judge.starved)
    return found


def test_a_loader_that_keeps_up_is_quiet() -> None:
    """A tenth of waiting is none to call anybody for."""
    assert verdicts(0.0, 0.01, 0.1, BEGINS - 0.01) == [False] * 4


def test_a_fifth_of_waiting_is_starvation_until_it_is_half_of_that() -> None:
    """What varies around the limit is one finding."""
    assert verdicts(BEGINS + 0.01, BEGINS - 0.05, BEGINS + 0.05, ENDS + 0.01, ENDS - 0.01, ENDS + 0.05) == [
        True, True, True, True, False, False,
    ]  # fmt: skip


def test_few_steps_tell_nothing() -> None:
    """The wait of one slow step is no share of anything: it takes ten of them, however long that is."""
    assert verdicts(0.9, steps=LEAST_STEPS - 1) == []
    assert verdicts(0.9, 0.9, steps=LEAST_STEPS // 2 + 1) == [True]


def test_less_than_a_minute_tells_nothing() -> None:
    """The start of an epoch's workers is a part of a minute, and not all there is."""
    judge = Starvation()
    judge.judge(DataCounters(0.0, 0, 0.0, 0.0))
    assert not judge.judge(DataCounters(WINDOW_S / 2, 1000, 30.0, 30.0))
    assert judge.judge(DataCounters(WINDOW_S, 2000, 31.0, 60.0))
    assert (judge.starved, judge.share) == (True, 31 / 60)
