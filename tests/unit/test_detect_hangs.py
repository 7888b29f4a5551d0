"""Whether a rank hangs, for whom the others wait, who did not come to a collective, and whom a timeout waited for."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import replace
from statistics import median_high
from typing import TYPE_CHECKING, Any

from tests.diagnosis_files import START_S, fact, facts, row, steps
from torchobs import catalog
from torchobs.catalog import SECONDS_BOUNDS
from torchobs.detect import hangs
from torchobs.detect.hangs import PATIENT_PHASES, Absence, CollectiveTimeout, Durations, GroupProgress, Position, Standstill
from torchobs.diagnosis import endings
from torchobs.diagnosis.endings import compare, culprits
from torchobs.flight.reader import Distribution
from torchobs.ranks.events import Events
from torchobs.ranks.snapshot import Readings
from torchobs.ranks.state import hang_timeout_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.ranks.rank_view import RankView


WAITS = ("/x/torch/autograd/graph.py:800 in _engine_run_backward", "/x/train.py:9 in main")
SLEEPS = ("/home/me/hooks.py:12 in pause", *WAITS)


def at(steps: int | None, phase: str | None, state: str = "hung", frames: tuple[str, ...] = ()) -> Position:
    """A rank."""
    return Position(state, steps, phase, frames)


def among(others: Position, count: int, **odd: Position) -> dict[str, Position]:
    """So many ranks in all; the named ones (`r3`) are elsewhere."""
    return {str(rank): odd.get(f"r{rank}", others) for rank in range(count)}


def test_the_rank_that_is_not_in_the_collective_is_named() -> None:
    """All the others wait in backward of step 11; or in forward, where FSDP gathers weights, for one in its backward."""
    for odd, why in (
        (at(10, "forward"), hangs.ELSEWHERE),
        (at(10, "data"), hangs.FETCHING),
        (at(11, "forward"), hangs.ELSEWHERE),  # it has left a collective out, and went on
        (at(10, "evaluation", "alive"), hangs.ASIDE_OF_TRAINING),
        (at(10, "backward", frames=SLEEPS), hangs.NOT_IN_COLLECTIVE),
        (at(10, "backward", "unresponsive"), hangs.SILENT),
        (at(10, None, "finished"), hangs.ENDED),
    ):
        for count in (2, 8, 64):
            blamed = hangs.blamed(among(at(10, "backward", frames=WAITS), count, r1=odd))
            assert {name: blame.why for name, blame in blamed.items()} == {"1": why}
    assert set(hangs.blamed(among(at(10, "forward"), 64, r5=at(9, "backward")))) == {"5"}
    assert set(hangs.blamed(among(at(10, "optimizer"), 2, r1=at(10, "backward")))) == {"1"}


def test_nobody_is_named_without_evidence() -> None:
    """A single rank, all at one place, no rank that hangs, an unknown phase, stacks of some only."""
    for ranks in (
        {"0": at(10, "backward")},
        among(at(10, "backward"), 8),
        among(at(10, "backward", "alive"), 8, r1=at(10, "data", "alive")),
        among(at(10, "backward"), 8, r1=at(10, None)),
        among(at(10, "backward", frames=WAITS), 8, r1=at(10, "backward")),
    ):
        assert hangs.blamed(ranks) == {}


def test_whoever_is_named_is_never_everybody() -> None:
    """Of random runs: a name is one of the ranks, and somebody is left who waits."""
    chance = random.Random(5)
    phases = [*("data", "forward", "backward", "optimizer", "other", "evaluation", "idle"), None]
    states = ["hung", "hung", "hung", "alive", "unresponsive", "finished", "lost"]
    choices: tuple[Sequence[Any], ...] = ([9, 10, None], phases, states, [(), WAITS, SLEEPS])
    for _ in range(20_000):
        count = chance.choice([2, 3, 8])
        ranks = {str(rank): at(*[chance.choice(choice) for choice in choices]) for rank in range(count)}
        blamed = hangs.blamed(ranks)
        assert set(blamed) < set(ranks) or not blamed


def counts(durations_s: list[float]) -> list[int]:
    """Their histogram."""
    buckets = [0] * (len(SECONDS_BOUNDS) + 1)
    for duration_s in durations_s:
        buckets[bisect_left(SECONDS_BOUNDS, duration_s)] += 1
    return buckets


def test_long_steps_have_several_times_their_own() -> None:
    """Earlier than a rank is called hung, and never within a usual step."""
    for usual_s in (2.0, 7.0, 30.0, 400.0):
        durations_s = [usual_s] * 300
        found_s = hangs.early_limit_s(counts(durations_s), SECONDS_BOUNDS, usual_s, 0)
        of_hang_s = hang_timeout_s(Distribution(tuple(counts(durations_s)), sum(durations_s), usual_s, usual_s), SECONDS_BOUNDS)
        assert 5 * usual_s <= found_s <= of_hang_s / 3.9 + 10


def still(durations_s: list[float], quiet_s: float, phase: str = "other", age_s: float | None = None) -> Standstill | None:
    """The verdict on a run with these durations of steps, so many seconds after its last sign of one."""
    durations = Durations(counts(durations_s), SECONDS_BOUNDS, max(durations_s))
    return hangs.standstill(quiet_s if age_s is None else age_s, quiet_s, phase, median_high(durations_s), durations)


def test_a_rank_stands_still_after_twenty_usual_steps_and_ten_seconds() -> None:
    """Not in a phase that takes its time, nor once the next step has begun; a pause that it has made before is its habit."""
    for durations_s, least_s in (([0.02] * 300, 10.0), ([0.4] * 300, 10.0), ([1.0] * 300 + [7.0] * 9, 20.0)):
        assert still(durations_s, least_s - 0.1) is None
        assert still(durations_s, least_s + 0.1) == Standstill(least_s + 0.1, durations_s[0])
    assert still([0.02] * 300, 12.0, age_s=60.0) == Standstill(60.0, 0.02)
    assert all(still([0.02] * 300, 600.0, phase) is None for phase in PATIENT_PHASES)
    assert still([0.02] * 300, 1.0, age_s=600.0) is None
    assert hangs.standstill(600.0, 600.0, "other", None, Durations()) is None
    assert still([0.1] * 1000 + [60.0] * 2, 50.0) == Standstill(50.0, 0.1, habitual=True)
    assert still([0.1] * 1000 + [60.0] * 2, 200.0) == Standstill(200.0, 0.1)
    assert still([0.1] * 1000 + [60.0], 50.0) == Standstill(50.0, 0.1)
    assert [still([0.1, 60.0], quiet_s) for quiet_s in (120.0, 130.0)] == [None, Standstill(130.0, 60.0)]


WAITING = GroupProgress(413, 412, 60.0, "all_reduce", 4000.0)
AWAY = GroupProgress(412, 412, 0.0)


def ranks(*progress: GroupProgress, group: str = "default") -> dict[str, dict[str, GroupProgress]]:
    """Ranks 0, 1, … of one group."""
    return {str(rank): {group: group_progress} for rank, group_progress in enumerate(progress)}


ABSENT = {
    "one of eight": (ranks(*[WAITING] * 3, AWAY, *[WAITING] * 4), {"3": ("default", 413, "all_reduce", 412, 7)}),
    "several": (ranks(WAITING, AWAY, WAITING, AWAY), dict.fromkeys("13", ("default", 413, "all_reduce", 412, 2))),
    "0 waits for 1, and 1 in another group for 2": (
        {"0": {"tp:1": WAITING}, "1": {"tp:1": AWAY, "dp:2": WAITING}, "2": {"dp:2": AWAY}},
        {"2": ("dp:2", 413, "all_reduce", 412, 1)},
    ),
    "all came": (ranks(WAITING, WAITING, WAITING), {}),
    "a circle": ({"0": {"a": WAITING, "b": AWAY}, "1": {"a": AWAY, "b": WAITING}}, {}),
    "NCCL's send and recv have no number": (ranks(WAITING, GroupProgress(412, 412, 30.0, "recv")), {}),
}


def test_who_did_not_come_to_a_collective_or_waits_in_another() -> None:
    """Promise: who waits nowhere and has called fewer, by group; who waits in another operation, or size where that counts."""
    for name, (progress, expected) in ABSENT.items():
        assert hangs.absent(progress) == {rank: Absence(*fields) for rank, fields in expected.items()}, name
    for waiting, kinds in MISMATCHED:
        mismatches = hangs.mismatched(ranks(*waiting))
        expected_kinds = [("default", 413, kinds)] if kinds else []
        assert [(mismatch.group, mismatch.number, mismatch.kinds) for mismatch in mismatches] == expected_kinds


UNEVEN, OTHER = WAITING._replace(operation="all_to_all"), WAITING._replace(operation="broadcast")
MISMATCHED: list[tuple[tuple[GroupProgress, ...], dict[tuple[str, float | None], tuple[str, ...]]]] = [
    ((WAITING, OTHER, WAITING), {("all_reduce", None): ("0", "2"), ("broadcast", None): ("1",)}),
    ((WAITING, WAITING._replace(size=8.0)), {("all_reduce", 4000.0): ("0",), ("all_reduce", 8.0): ("1",)}),
    ((WAITING, WAITING._replace(size=None)), {}),
    ((UNEVEN, UNEVEN._replace(size=8.0)), {}),
    ((WAITING, GroupProgress(414, 413, 9.0, "broadcast")), {}),
    ((WAITING, AWAY), {}),
]


def test_ranks_that_called_different_numbers_are_told_apart_with_the_calls_made_more() -> None:
    """The most calls first; calls that one rank made more are those between equal ones, and none where lines do not align."""
    called = {"0": {"default": 207, "tp:1": 9}, "1": {"default": 206, "tp:1": 9}, "2": {"default": 207, "dp:2": 4}, "3": {}}
    assert hangs.surplus(called) == [hangs.Surplus("default", {207: ("0", "2"), 206: ("1",)})]
    for first, second, more in (
        (calls("step", "step", "save", "finish"), calls("step", "step", "finish"), ("save",)),
        (calls("step", "step", "finish"), calls("step", "step"), ("finish",)),
        (calls("step", "a", "b", "finish"), calls("step", "finish"), ("a", "b")),
        (calls("rank 0", "x", "finish"), calls("rank 1", "finish"), ()),
        (calls("step", "save", "other", "finish"), calls("step", "more", "finish"), ()),
        (calls("save", "finish", first=9), calls("step", "finish", first=7), ()),
        *((calls("step"), calls("step"), ()), ({}, {}, ()), (calls("step"), {}, ())),
    ):
        assert hangs.inserted(first, second) == more


def calls(*texts: str, first: int = 1) -> dict[int, str]:
    """Calls by number."""
    return dict(enumerate(texts, first))


def hung(name: str, progress: GroupProgress) -> RankView:
    """A rank in backward of step 11, with its progress in a process group."""
    view = replace(row(0, "hung"), rank=name)
    vars(view).update(collectives={"x": progress}, called={"x": progress.enqueued})
    return view


def test_ranks_of_replica_groups_are_compared_each_by_itself() -> None:
    """Promise: each has a default group of its own, with the number, operation and size of its ranks alone."""
    ranks = [hung("0-g0", WAITING), hung("1-g0", WAITING), hung("0-g1", AWAY), hung("1-g1", AWAY)]
    assert not [*culprits(ranks)]
    assert not [*culprits([*ranks[:2], hung("0-g1", OTHER._replace(size=8.0))])]
    (text,) = (finding.long for finding in culprits([ranks[0], hung("1-g0", AWAY), *ranks[2:]]))
    assert "Rank 1-g0 has not come to all_reduce number 413 of group x" in text
    assert "-g1" not in text
    apart = [*ranks[:1], hung("0-g1", WAITING), hung("1-g1", OTHER)]
    assert [finding.kind for finding in culprits(apart)] == ["collectives_differ"]


GLOO = "[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"
MESSAGES = {
    GLOO: CollectiveTimeout("collective", 4.0, ()),
    "[/x/pair.cc:534] Application timeout caused pair closure": CollectiveTimeout("collective", None, ()),
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=5000) ran for 5023 milliseconds before timing out.": CollectiveTimeout("collective", 5.0, ()),
    f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms\n Original exception: \n{GLOO}": CollectiveTimeout(
        "monitored_barrier", 3.0, (1,)
    ),
    "Timed out after 301 seconds waiting for clients. 1/2 clients joined.": CollectiveTimeout("rendezvous", 301.0, ()),
    "wait timeout after 300000ms, keys: /default_pg/0//cuda//0": CollectiveTimeout("rendezvous", 300.0, ()),
    "Timed out initializing process group in store based barrier on rank: 0": CollectiveTimeout("rendezvous", None, ()),
}


def test_messages_of_torch() -> None:
    """Numbers alone are taken."""
    assert {message: hangs.parse_timeout(message) for message in MESSAGES} == MESSAGES


END_S = 24.0
IN_BACKWARD = "torch/autograd/graph.py:979 in _engine_run_backward"


def timeout(location: str, **attributes: Any) -> Any:
    """A timeout that was raised there."""
    at = {"exception__type": "builtins.RuntimeError", "location": location, **attributes}
    return fact(catalog.EVENT_EXCEPTION, END_S, 201, timeout="collective", timeout_s=4.0, **at)


def rank(number: int, *, gave_up: bool = False, **changes: Any) -> RankView:
    """One of a run's ranks after 201 steps, ended by a timeout in backward, or by a launcher."""
    fields: dict[str, Any] = {"state": "failed", "reason": "terminated", "phase": "other", "last_s": START_S + END_S}
    if gave_up:
        fields |= {"reason": "exception", "events": [timeout(IN_BACKWARD)]}
    return facts(steps(201), resource={"rank": number, "world_size": 8}, **{**fields, **changes})


def told(*ranks: RankView) -> str:
    """What is said first of the ranks together."""
    return compare(ranks)[0].long


def test_ranks_that_all_gave_up_waited_for_each_other() -> None:
    """In different places; in one place no rank is named."""
    at_barrier = timeout("torch/distributed/distributed_c10d.py:4 in barrier")
    assert told(rank(0, gave_up=True), rank(1, gave_up=True, events=[at_barrier], phase="forward")) == (
        "A collective timed out after 4 s on ranks 0 and 1. They waited for each other: rank 0 in backward of step 202 and"
        " rank 1 in forward of step 202."
    )
    assert told(rank(0, gave_up=True), rank(1, gave_up=True)).endswith("which rank did not come is not known.")
    waits = rank(0, gave_up=True, events=[timeout(IN_BACKWARD, absent_ranks=[5, 6])])
    assert told(waits, rank(1, gave_up=True)).endswith(" Ranks 5 and 6 did not come, and are not among the files here.")
    assert not endings.awaited_at_timeout([rank(0, gave_up=True), rank(1, gave_up=True)])


def counted(report: RankView, number: int, *calls: str) -> RankView:
    """The same rank with the number of collectives that it has called, and the last of them."""
    readings = Readings({catalog.COLLECTIVE_ENQUEUED.name: {("gloo", "default"): float(number)}})
    numbered = [f"default (gloo) #{number - len(calls) + 1 + at} {call}" for at, call in enumerate(calls)]
    events = [event._replace(attributes={**event.attributes, "collectives": numbered}) for event in report.events]
    return replace(report, readings=readings, events=Events(tuple(events)))


def test_a_rank_that_called_one_collective_more_is_told_with_the_line() -> None:
    """Promise: by the numbers that groups count, and where both ranks' last calls are known with the one that was more."""
    last_steps = ["all_reduce at a.py:9 in main"] * 2
    stacks = fact(catalog.EVENT_STACKS, END_S - 1, 201, cause="stalled")
    waits = counted(rank(0, gave_up=True), 207, *last_steps, "barrier at a.py:2 in save", "barrier at a.py:5 in finish")
    other = counted(rank(1, phase="idle", events=[stacks]), 206, *last_steps, "barrier at a.py:5 in finish")
    more = "Rank 0 called 1 collective more than rank 1 (207 and 206 of group default (gloo))"
    assert told(waits, other) == (
        "A collective timed out after 4 s on rank 0. Rank 1 has left its training loop, and the other rank waits in backward of"
        f" step 202. {more}: barrier at a.py:2 in save."
    )
    assert told(waits, counted(other, 206)).endswith(f"{more}.")


def test_ranks_in_one_place_are_told_apart_by_their_counts_alone() -> None:
    """Promise: nobody is named for being where the rank is that waits for it; without counts no rank is."""
    waits, other = rank(0, gave_up=True), rank(1, phase="backward")
    assert told(waits, other) == "A collective timed out after 4 s on rank 0."
    assert not endings.awaited_at_timeout([waits, other])
    assert told(counted(waits, 9), counted(other, 7)) == (
        "A collective timed out after 4 s on rank 0. "
        "Rank 0 called 2 collectives more than rank 1 (9 and 7 of group default (gloo))."
    )
    assert set(endings.awaited_at_timeout([counted(waits, 9), counted(other, 7)])) == {"1"}
    apart = [counted(replace(waits, rank="0-g0"), 9), counted(replace(other, rank="1-g1"), 7)]  # default groups of their own
    assert not endings.awaited_at_timeout(apart)
    assert "more than" not in told(*apart)
