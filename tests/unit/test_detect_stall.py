"""After how long without a step a rank's stacks are written."""

from __future__ import annotations

from bisect import bisect_left

from torchobs.catalog import SECONDS_BOUNDS
from torchobs.detect.stall import (
    EARLY_FIRST_S,
    PATIENT_PHASES,
    Durations,
    Standstill,
    early_limit_s,
    standstill,
    usual_and_long_s,
)
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.state import hang_timeout_s


def limit_s(durations_s: list[float], survived: int = 0) -> float:
    """Of a run whose steps took so long."""
    return early_limit_s(counts(durations_s), SECONDS_BOUNDS, max(durations_s, default=0.0), survived)


def counts(durations_s: list[float]) -> list[int]:
    """Their histogram."""
    found = [0] * (len(SECONDS_BOUNDS) + 1)
    for duration_s in durations_s:
        found[bisect_left(SECONDS_BOUNDS, duration_s)] += 1
    return found


def test_short_steps_have_ten_seconds() -> None:
    """As long as people wait."""
    assert limit_s([0.02] * 40) == limit_s([0.3] * 5000) == 10.0


def test_long_steps_have_several_times_their_own() -> None:
    """Earlier than a rank is called hung, and never within a usual step."""
    for usual_s in (2.0, 7.0, 30.0, 400.0):
        durations_s = [usual_s] * 300
        found_s = limit_s(durations_s)
        of_hang_s = hang_timeout_s(Distribution(tuple(counts(durations_s)), sum(durations_s), usual_s, usual_s), SECONDS_BOUNDS)
        assert 5 * usual_s <= found_s <= of_hang_s / 3.9 + 10


def test_a_run_with_minutes_now_and_then_has_twice_those() -> None:
    """The first minibatch after a rollout; a single one is no habit."""
    assert limit_s([0.1] * 1000 + [60.0]) == 10.0
    assert limit_s([0.1] * 1000 + [60.0] * 2) >= 120.0


def test_a_stall_that_was_survived_doubles_it() -> None:
    """So that a run of a month writes a few at most, whatever it does."""
    assert [limit_s([0.1] * 500, survived) for survived in range(4)] == [10.0, 20.0, 40.0, 80.0]


def test_before_the_steps_are_known_it_is_long() -> None:
    """Data are loaded and models are compiled; but a collective may end the run by its own timeout."""
    assert limit_s([]) == limit_s([8.0]) == EARLY_FIRST_S


def test_a_cold_first_step_is_left_out_of_the_usual_of_a_few() -> None:
    """And allowed twice."""
    usual_s, long_s = usual_and_long_s(counts([8.0, *[0.02] * 30]), SECONDS_BOUNDS, 8.0)
    assert usual_s < 0.05
    assert long_s >= 8.0


def still(durations_s: list[float], quiet_s: float, phase: str = "other", age_s: float | None = None) -> Standstill | None:
    """The verdict on a run whose steps took so long, so many seconds after its last sign of one."""
    known = Durations(counts(durations_s), SECONDS_BOUNDS, max(durations_s))
    return standstill(quiet_s if age_s is None else age_s, quiet_s, phase, sorted(durations_s)[len(durations_s) // 2], known)


def test_a_rank_stands_still_after_twenty_usual_steps_and_ten_seconds() -> None:
    """With the time since its last step, and what is usual."""
    for usual_s, limit in ((0.02, 10.0), (0.4, 10.0)):
        assert still([usual_s] * 300, limit - 0.1) is None
        assert still([usual_s] * 300, limit + 0.1) == Standstill(limit + 0.1, usual_s)
    assert still([0.02] * 300, 12.0, age_s=60.0) == Standstill(60.0, 0.02)


def test_a_rank_stands_still_from_the_moment_that_its_stacks_are_written() -> None:
    """Which is before twenty of its steps where these take seconds, and after twenty where few of them take minutes."""
    for durations_s in ([3.0] * 300, [20.0] * 50):
        written_s = limit_s(durations_s)
        assert written_s < 20 * durations_s[0]
        assert still(durations_s, written_s - 0.1) is None
        assert still(durations_s, written_s + 0.1) is not None


def test_what_takes_its_time_does_not_stand_still() -> None:
    """An evaluation, a checkpoint, a compilation, code after the loop; nor a rank that has only just begun the next step."""
    assert all(still([0.02] * 300, 600.0, phase) is None for phase in PATIENT_PHASES)
    assert still([0.02] * 300, 1.0, age_s=600.0) is None
    assert standstill(600.0, 600.0, "other", None, Durations()) is None


def test_a_pause_that_a_run_has_made_before_is_its_habit() -> None:
    """The rollouts of reinforcement learning; one pause is none."""
    assert still([0.1] * 1000 + [60.0] * 2, 50.0) == Standstill(50.0, 0.1, habitual=True)
    assert still([0.1] * 1000 + [60.0] * 2, 200.0) == Standstill(200.0, 0.1)
    assert still([0.1] * 1000 + [60.0], 50.0) == Standstill(50.0, 0.1)
    assert still([0.1, 60.0], 50.0) is None
