"""The state of a rank is a function of numbers: every state has its literal, and so has every limit."""

import pytest

from torchobs import catalog
from torchobs.catalog import SECONDS_BOUNDS
from torchobs.flight.format.layout import Exit
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks import state as rank_state
from torchobs.ranks.state import MemoryUse, Observation

ALIVE = Observation(
    same_boot=True,
    lock_held=True,
    beat_age_s=0.3,
    exit_reason=None,
    exit_code=0,
    phase="forward",
    quiet_s=0.1,
    hang_timeout_s=60.0,
)
GONE = ALIVE._replace(lock_held=False, beat_age_s=1.0)


def durations(**counts: int) -> Distribution:
    """A histogram of step times: `durations(b8=3)` is three steps of at most `SECONDS_BOUNDS[8]`."""
    buckets = [0] * (len(SECONDS_BOUNDS) + 1)
    for name, count in counts.items():
        buckets[int(name[1:])] = count
    return Distribution(tuple(buckets), 1.0, 0.1, 5000.0)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (ALIVE, "alive"),
        (ALIVE._replace(beat_age_s=2.0), "alive"),
        (ALIVE._replace(beat_age_s=2.1), "unresponsive"),
        (ALIVE._replace(beat_age_s=2.1, quiet_s=1e6), "unresponsive"),
        (ALIVE._replace(quiet_s=60.0), "alive"),
        (ALIVE._replace(quiet_s=60.1), "hung"),
        (ALIVE._replace(quiet_s=1e6, phase=None), "hung"),
        (ALIVE._replace(quiet_s=1e6, phase="evaluation"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="checkpoint"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="compile"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="idle"), "alive"),
        (ALIVE._replace(quiet_s=None), "alive"),
        (GONE, "lost"),
        (GONE._replace(exit_reason=Exit.FINISHED), "finished"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=0), "finished"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=3), "failed"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=-9), "failed"),
        (GONE._replace(exit_reason=Exit.EXCEPTION, exit_code=1), "failed"),
        (GONE._replace(exit_reason=Exit.TERMINATED, exit_code=143), "failed"),
        (GONE._replace(exit_reason=77), "lost"),
    ],
)
def test_each_state_follows_from_what_was_seen(seen: Observation, state: str) -> None:
    """Heartbeat and lock decide who lives, the exit word how it ended, the learned timeout who hangs."""
    assert rank_state.judge(seen) == state
    assert state in catalog.RANK_STATES


def test_a_free_lock_alone_is_no_death() -> None:
    """A process that closes descriptors it does not know loses its lock and lives on: its heartbeat shows it."""
    seen = GONE._replace(beat_age_s=0.2)
    assert rank_state.judge(seen) == "alive"
    assert rank_state.fading(seen)
    assert not rank_state.fading(GONE)
    assert not rank_state.fading(ALIVE)


def test_a_free_lock_and_an_exit_word_are_the_end_at_once() -> None:
    """Who has said how it ends, and let go of the lock, needs no second look."""
    assert rank_state.judge(GONE._replace(beat_age_s=0.0, exit_reason=Exit.FINISHED)) == "finished"


def test_who_is_torn_down_after_its_last_word_has_ended() -> None:
    """29 ms per GiB, a core dump 11 s: the lock is held that long, and it is not called unresponsive."""
    assert rank_state.judge(ALIVE._replace(beat_age_s=5.0, exit_reason=Exit.FINISHED)) == "finished"
    assert rank_state.judge(ALIVE._replace(beat_age_s=5.0, exit_reason=Exit.EXCEPTION)) == "failed"


def test_an_exit_word_does_not_end_who_goes_on_living() -> None:
    """A notebook survives an exception: the heartbeat counts."""
    assert rank_state.judge(ALIVE._replace(exit_reason=Exit.EXCEPTION)) == "alive"


def test_nothing_of_another_boot_lives() -> None:
    """Its lock and its CLOCK_MONOTONIC mean nothing here."""
    seen = ALIVE._replace(same_boot=False)
    assert rank_state.judge(seen) == "lost"
    assert not rank_state.fading(seen)


def test_the_hang_timeout_is_learned_from_the_ranks_own_steps() -> None:
    """20 times the 99th percentile, from 60 s on; half an hour before the first step."""
    assert rank_state.hang_timeout_s(None, SECONDS_BOUNDS) == rank_state.FIRST_STEP_S
    assert rank_state.hang_timeout_s(durations(), SECONDS_BOUNDS) == rank_state.FIRST_STEP_S
    assert rank_state.hang_timeout_s(durations(b8=1000), SECONDS_BOUNDS) == 60.0
    four_s = SECONDS_BOUNDS.index(4.0)
    assert rank_state.hang_timeout_s(durations(**{f"b{four_s}": 100}), SECONDS_BOUNDS) == 80.0


def test_one_slow_step_among_a_hundred_is_not_the_usual() -> None:
    """A compilation or a cold cache at the start must not make the timeout hours long."""
    slow, usual = len(SECONDS_BOUNDS) - 1, SECONDS_BOUNDS.index(4.0)
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 99, f"b{slow}": 1}), SECONDS_BOUNDS) == 80.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 98, f"b{slow}": 2}), SECONDS_BOUNDS) == 20 * 1024.0


def test_a_slow_first_step_does_not_hide_a_hang_soon_after_it() -> None:
    """Of few steps the percentile is the longest. A single one is all that is known; a second long one is no exception."""
    slow, usual = SECONDS_BOUNDS.index(32.0), SECONDS_BOUNDS.index(0.125)
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 2, f"b{slow}": 1}), SECONDS_BOUNDS) == 64.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 98, f"b{slow}": 1}), SECONDS_BOUNDS) == 64.0
    assert rank_state.hang_timeout_s(durations(**{f"b{slow}": 1}), SECONDS_BOUNDS) == 20 * 32.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 9, f"b{slow}": 2}), SECONDS_BOUNDS) == 20 * 32.0


def test_a_step_that_takes_long_again_and_again_is_no_hang() -> None:
    """One rollout to hundreds of minibatches is beyond the percentile; twice the longest but one is time enough."""
    long, usual = SECONDS_BOUNDS.index(128.0), SECONDS_BOUNDS.index(0.125)
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 999, f"b{long}": 1}), SECONDS_BOUNDS) == 60.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 998, f"b{long}": 2}), SECONDS_BOUNDS) == 256.0


def test_steps_beyond_the_last_bound_count_as_the_longest() -> None:
    """The overflow bucket has no bound of its own."""
    assert rank_state.hang_timeout_s(durations(**{f"b{len(SECONDS_BOUNDS)}": 5}), SECONDS_BOUNDS) == 20 * 5000.0


@pytest.mark.parametrize("reason", [None, Exit.FINISHED, Exit.EXCEPTION, Exit.EXIT_CODE, 99])
@pytest.mark.parametrize("code", [0, 1, -15])
def test_every_ending_has_a_series_created_beforehand(reason: int | None, code: int) -> None:
    """Reasons and states are those of the catalog, whatever the exit word says."""
    for memory in (None, MemoryUse(), MemoryUse(cgroup=1.0)):
        state, why = rank_state.ending(reason, code, memory)
        assert state in set(catalog.RANK_STATES) - rank_state.LIVING
        assert why in catalog.EXIT_REASONS


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (None, "lost"),
        (MemoryUse(), "lost"),
        (MemoryUse(cgroup=0.949, machine=0.979), "lost"),
        (MemoryUse(cgroup=0.95), "out_of_memory"),
        (MemoryUse(machine=0.98), "out_of_memory"),
        (MemoryUse(kill_age_s=60.0), "out_of_memory"),
        (MemoryUse(kill_age_s=61.0), "lost"),
    ],
)
def test_who_vanishes_near_a_limit_likely_ran_out_of_memory(memory: MemoryUse | None, why: str) -> None:
    """The state is lost all the same: nobody saw the kernel do it."""
    assert rank_state.ending(None, 0, memory) == ("lost", why)


def test_who_is_told_to_end_has_not_failed_by_itself() -> None:
    """The mark of a SIGTERM, and the status of a program that handles it itself; and it is not for memory, however full."""
    full = MemoryUse(cgroup=1.0, machine=1.0, kill_age_s=0.0)
    for reason, code in ((Exit.TERMINATED, 143), (Exit.EXIT_CODE, 143), (Exit.EXIT_CODE, -15)):
        assert rank_state.ending(reason, code, full) == ("failed", "terminated")
    assert rank_state.ending(Exit.EXIT_CODE, 137) == ("failed", "exit_code")


def test_who_said_how_it_ends_did_not_run_out_of_memory() -> None:
    """An exit word is a word, at whatever limit."""
    full = MemoryUse(cgroup=1.0, machine=1.0, kill_age_s=0.0)
    assert rank_state.ending(Exit.FINISHED, 0, full) == ("finished", "finished")
    assert rank_state.ending(Exit.EXCEPTION, 1, full) == ("failed", "exception")
