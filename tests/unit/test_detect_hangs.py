"""Whether a rank hangs, and for whom the others wait."""

from __future__ import annotations

import random
import sys
from bisect import bisect_left
from typing import TYPE_CHECKING

import pytest

from torchobs.catalog import SECONDS_BOUNDS
from torchobs.detect import hangs
from torchobs.detect.hangs import (
    EARLY_FIRST_S,
    PATIENT_PHASES,
    Durations,
    Position,
    Standstill,
    blamed,
    early_limit_s,
    loop_lines,
    standstill,
    usual_and_long_s,
    waits,
)
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.state import hang_timeout_s

if TYPE_CHECKING:
    from types import CodeType

WAITS = ("/x/torch/autograd/graph.py:800 in _engine_run_backward", "/x/train.py:9 in main")
SLEEPS = ("/home/me/hooks.py:12 in pause", *WAITS)


def at(steps: int | None, phase: str | None, state: str = "hung", frames: tuple[str, ...] = ()) -> Position:
    """A rank."""
    return Position(state, steps, phase, frames)


def among(others: Position, count: int, **odd: Position) -> dict[str, Position]:
    """So many ranks in all, of which the named ones (`r3`) are elsewhere."""
    return {str(rank): odd.get(f"r{rank}", others) for rank in range(count)}


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (at(10, "forward"), hangs.ELSEWHERE),
        (at(10, "other"), hangs.ELSEWHERE),
        (at(10, "data"), hangs.FETCHING),
        (at(9, "data"), hangs.FETCHING),
        (at(11, "forward"), hangs.ELSEWHERE),  # it has left a collective out, and went on
        (at(10, "evaluation", "alive"), hangs.ASIDE_OF_TRAINING),
        (at(20, "idle", "alive"), hangs.ASIDE_OF_TRAINING),
        (at(10, "backward", "unresponsive"), hangs.SILENT),
        (at(10, None, "finished"), hangs.ENDED),
        (at(None, "data"), hangs.FETCHING),
    ],
)
def test_the_rank_that_is_not_in_the_collective_is_named(count: int, odd: Position, why: str) -> None:
    """All the others wait in backward of step 11."""
    found = blamed(among(at(10, "backward"), count, r1=odd))
    assert {name: one.why for name, one in found.items()} == {"1": why}


def test_the_minority_is_named_where_collectives_are_in_forward() -> None:
    """FSDP gathers weights there: 63 ranks wait for the one that is still in its backward."""
    assert set(blamed(among(at(10, "forward"), 64, r5=at(9, "backward")))) == {"5"}


def test_several_are_named() -> None:
    """One stage of eight is elsewhere, as when a file server does not answer one node."""
    odd = {f"r{rank}": at(10, "data") for rank in range(8, 16)}
    assert set(blamed(among(at(10, "backward"), 64, **odd))) == {str(rank) for rank in range(8, 16)}


def test_stacks_distinguish_ranks_in_the_same_phase() -> None:
    """A hook of backward sleeps on rank 6: all are in backward of the same step."""
    ranks = among(at(10, "backward", frames=WAITS), 8, r6=at(10, "backward", frames=SLEEPS))
    assert {name: one.why for name, one in blamed(ranks).items()} == {"6": hangs.NOT_IN_COLLECTIVE}
    assert waits(("/x/torch/distributed/c10d_logger.py:83 in wrapper", "/home/me/train.py:1 in main"))
    assert not waits(SLEEPS)
    assert not waits(())


@pytest.mark.parametrize(
    "ranks",
    [
        {"0": at(10, "backward")},
        among(at(10, "backward"), 8),
        among(at(10, "backward", "alive"), 8, r1=at(10, "data", "alive")),
        among(at(10, "backward"), 8, r1=at(10, None)),
        among(at(10, "backward", frames=WAITS), 8, r1=at(10, "backward")),
        among(at(10, "data"), 8),
        {},
    ],
)
def test_nobody_is_named_without_evidence(ranks: dict[str, Position]) -> None:
    """A single rank, all at one place, no rank that hangs, an unknown phase, stacks of some only."""
    assert blamed(ranks) == {}


def test_whoever_is_named_is_never_everybody() -> None:
    """Of random runs: a name is one of the ranks, and somebody is left who waits."""
    made = random.Random(5)
    phases = [*("data", "forward", "backward", "optimizer", "other", "evaluation", "idle"), None]
    states = ["hung", "hung", "hung", "alive", "unresponsive", "finished", "lost"]
    for _ in range(20_000):
        count = made.choice([2, 3, 8])
        ranks = {
            str(rank): at(
                made.choice([9, 10, None]), made.choice(phases), made.choice(states), made.choice([(), WAITS, SLEEPS])
            )
            for rank in range(count)
        }
        found = blamed(ranks)
        assert set(found) < set(ranks) or not found


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


NULL = "from contextlib import nullcontext\n"
LOOPS = {
    "for": ("for _ in (1,):\n    here()\ndone()", 2),
    "while": ("go = True\nwhile go:\n    here()\n    go = False\ndone()", 4),
    # Python 3.14 has the code of `break` behind the jump back
    "forever": ("go = True\nwhile True:\n    here()\n    if done():\n        break\ndone()", 5 - (sys.version_info >= (3, 14))),
    "nested": ("for _ in (1,):\n    for _ in (1,):\n        here()\n    done()\ndone()", 4),
    "before": ("for _ in (1,):\n    done()\nhere()", None),
    "none": ("here()", None),
    "with": (f"{NULL}for _ in (1,):\n    with nullcontext():\n        here()\n    done()\ndone()", 5),
    "behind a with": (
        f"{NULL}for _ in (1,):\n    with nullcontext():\n        done()\n    here()\ndone()", 5,
    ),
    "handled": ("for _ in (1,):\n    try:\n        here()\n    except ValueError:\n        continue\n    done()\ndone()", 6),
    "behind a handler": (
        "for _ in (1,):\n    try:\n        int('')\n    except ValueError:\n        pass\n    here()\ndone()", 6,
    ),
    "after handlers": ("try:\n    done()\nexcept ValueError:\n    done()\nfor _ in (1,):\n    here()\ndone()", 6),
    "within a try": ("try:\n    for _ in (1,):\n        here()\nfinally:\n    done()", 3),
    "behind one within a try": ("try:\n    for _ in (1,):\n        done()\nfinally:\n    here()", None),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_the_outermost_loop_around_an_instruction(name: str) -> None:
    """Its last line is the loop's own, whatever jumps there are for exceptions; the first is never behind the instruction's."""
    source, expected = LOOPS[name]
    found: list[tuple[CodeType, int, int]] = []

    def here() -> None:
        frame = sys._getframe(1)
        found.append((frame.f_code, frame.f_lasti, frame.f_lineno))

    code = compile(source, "script", "exec")
    exec(code, {"here": here, "done": lambda: True})  # noqa: S102  # the script above
    ((made, offset, line),) = found
    lines = loop_lines(made, offset)
    assert (lines[1] if lines else None) == expected
    assert lines is None or lines[0] <= line
