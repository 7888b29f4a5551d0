"""Who did not come to a collective, and who called another, of ranks in one group and in several."""

from __future__ import annotations

from dataclasses import replace

from tests.ui import row
from torchobs.detect import hang
from torchobs.detect.collectives import Absence, GroupProgress, Surplus, absent, inserted, mismatched, surplus
from torchobs.detect.hang import Position, blamed
from torchobs.diagnosis import collectives, health
from torchobs.diagnosis.status import RankStatus

WAITS = GroupProgress(413, 412, 60.0, "all_reduce", 4000.0)
AWAY = GroupProgress(412, 412, 0.0)


def ranks(*progress: GroupProgress, group: str = "default") -> dict[str, dict[str, GroupProgress]]:
    """Ranks 0, 1, … of one group."""
    return {str(rank): {group: one} for rank, one in enumerate(progress)}


def test_the_rank_that_did_not_come_is_named() -> None:
    """Seven of eight wait in number 413, and rank 3 has called 412."""
    found = absent(ranks(*[AWAY if rank == 3 else WAITS for rank in range(8)]))
    assert found == {"3": Absence("default", 413, "all_reduce", 412, 7)}


def test_several_that_did_not_come_are_named() -> None:
    """All for the same collective."""
    found = absent(ranks(WAITS, AWAY, WAITS, AWAY))
    assert {name: (one.number, one.operation, one.waiting) for name, one in found.items()} == {
        "1": (413, "all_reduce", 2), "3": (413, "all_reduce", 2),
    }  # fmt: skip


def test_who_has_called_ahead_waits_in_the_first_that_is_open() -> None:
    """DDP calls several buckets at once: number 413 is what does not come back."""
    assert absent(ranks(WAITS._replace(enqueued=416), AWAY))["1"].number == 413


def test_nobody_is_named_where_all_came() -> None:
    """A network or a GPU that does not answer; and where nobody waits, nothing hangs."""
    assert absent(ranks(WAITS, WAITS, WAITS)) == {}
    assert absent(ranks(AWAY, AWAY)) == {}
    assert absent({}) == {}


def test_a_rank_that_waits_in_another_group_is_not_to_blame() -> None:
    """Ranks 0 and 1 are one group, 1 and 2 another: 0 waits for 1, 1 for 2, and 2 sleeps."""
    found = absent(
        {
            "0": {"tp:1": WAITS},
            "1": {"tp:1": AWAY, "dp:2": GroupProgress(8, 7, 60.0, "all_gather")},
            "2": {"dp:2": GroupProgress(7, 7, 0.0)},
        }
    )
    assert found == {"2": Absence("dp:2", 8, "all_gather", 7, 1)}


def test_groups_are_judged_each_by_itself() -> None:
    """Four ranks in two halves, of which the second is fine and further, as pipeline stages may be."""
    found = absent({**ranks(WAITS, AWAY, group="dp:1"), "2": {"dp:2": GroupProgress(900, 900, 0.0)}, "3": {"dp:2": AWAY}})
    assert set(found) == {"1"}


def test_a_circle_names_nobody() -> None:
    """Each waits in a group in which the other is missing: the order of their collectives differs."""
    assert absent({"0": {"a": WAITS, "b": AWAY}, "1": {"a": AWAY, "b": WAITS}}) == {}


def test_a_rank_in_an_operation_without_a_number_waits() -> None:
    """NCCL's recorder has send and recv, which the numbers leave out."""
    assert absent(ranks(WAITS, GroupProgress(412, 412, 30.0, "recv"))) == {}


def test_other_operations_of_the_same_number_are_told() -> None:
    """Rank 1 has left one out, or called one more."""
    (one,) = mismatched(ranks(WAITS, WAITS._replace(operation="broadcast"), WAITS))
    assert (one.group, one.number) == ("default", 413)
    assert one.kinds == {("all_reduce", None): ("0", "2"), ("broadcast", None): ("1",)}


def test_other_sizes_are_told_where_they_have_to_be_equal() -> None:
    """Not of what may be uneven, or is unknown."""
    (one,) = mismatched(ranks(WAITS, WAITS._replace(size=8.0)))
    assert one.kinds == {("all_reduce", 4000.0): ("0",), ("all_reduce", 8.0): ("1",)}
    assert mismatched(ranks(WAITS, WAITS._replace(size=None))) == []
    uneven = WAITS._replace(operation="all_to_all")
    assert mismatched(ranks(uneven, uneven._replace(size=8.0))) == []


def test_other_numbers_are_no_mismatch() -> None:
    """They are compared only where each was called next."""
    assert mismatched(ranks(WAITS, GroupProgress(414, 413, 9.0, "broadcast"))) == []
    assert mismatched(ranks(WAITS, AWAY)) == []


def at(one: GroupProgress | None, state: str = "hung", phase: str = "backward", frames: tuple[str, ...] = ()) -> Position:
    """A rank in step 11."""
    return Position(state, 10, phase, frames, {} if one is None else {"default": one})


def test_ranks_in_one_phase_are_told_apart() -> None:
    """All are in backward of the same step, and there are no stacks."""
    found = blamed({"0": at(WAITS), "1": at(AWAY), "2": at(WAITS)})
    assert {name: one.why for name, one in found.items()} == {"1": hang.NOT_ARRIVED}
    assert blamed({"0": at(None), "1": at(None)}) == {}


def test_the_recorder_decides_before_phases_do() -> None:
    """Rank 0 waits in a collective of its evaluation; rank 1, in backward, did not come to it."""
    found = blamed({"0": at(WAITS, "alive", "evaluation"), "1": at(AWAY)})
    assert set(found) == {"1"}


def test_an_ended_rank_comes_first() -> None:
    """It is known to be gone."""
    assert {one.why for one in blamed({"0": at(WAITS), "1": at(AWAY, "failed")}).values()} == {hang.ENDED}


def test_a_stack_in_an_operation_that_is_not_recorded_absolves() -> None:
    """The recorder of gloo leaves recv out: rank 1 waits there for rank 2."""
    recv = ("/x/torch/distributed/distributed_c10d.py:9 in recv",)
    found = blamed({"0": at(WAITS), "1": at(AWAY, frames=recv), "2": at(AWAY, frames=("/home/me/train.py:3 in load",))})
    assert set(found) == {"2"}


def test_ranks_that_called_different_numbers_are_told_apart_by_group() -> None:
    """The most calls first; a group in which all called the same, or of one rank here, has no difference."""
    called = {"0": {"default": 207, "tp:1": 9}, "1": {"default": 206, "tp:1": 9}, "2": {"default": 207, "dp:2": 4}, "3": {}}
    assert surplus(called) == [Surplus("default", {207: ("0", "2"), 206: ("1",)})]
    assert surplus({}) == []


def calls(*texts: str, first: int = 1) -> dict[int, str]:
    """Calls by number."""
    return dict(enumerate(texts, first))


def test_the_calls_that_one_rank_made_more_are_those_between_equal_ones() -> None:
    """A barrier in one rank's branch shifts all that follow; a second rank's lines before and behind it are the same."""
    one, other = calls("step", "step", "save", "finish"), calls("step", "step", "finish")
    assert inserted(one, other) == ("save",)
    assert inserted(calls("step", "step", "finish"), calls("step", "step")) == ("finish",)
    assert inserted(calls("step", "a", "b", "finish"), calls("step", "finish")) == ("a", "b")


def test_calls_that_do_not_align_show_nothing() -> None:
    """Lines that differ by rank, windows without a common beginning, and none at all."""
    assert inserted(calls("rank 0", "x", "finish"), calls("rank 1", "finish")) == ()
    assert inserted(calls("step", "save", "other", "finish"), calls("step", "more", "finish")) == ()
    assert inserted(calls("save", "finish", first=9), calls("step", "finish", first=7)) == ()
    assert inserted(calls("step"), calls("step")) == inserted({}, {}) == inserted(calls("step"), {}) == ()


def hung(name: str, progress: GroupProgress) -> RankStatus:
    """A rank in backward of step 11, with its progress in a process group."""
    return replace(row(0, "hung").status, rank=name, collectives={"x": progress}, called={"x": progress.enqueued})


def test_ranks_of_replica_groups_are_compared_each_by_itself() -> None:
    """Promise: each has a default group of its own, whose number, operation and size are those of its ranks alone."""
    ranks = [hung("0-g0", WAITS), hung("1-g0", WAITS), hung("0-g1", AWAY), hung("1-g1", AWAY)]
    assert not [*collectives.surplus(ranks), *health.waited_for(ranks)]
    assert not [*health.waited_for([*ranks[:2], hung("0-g1", WAITS._replace(operation="broadcast", size=8.0))])]
    (text,) = (one.text for one in health.waited_for([ranks[0], hung("1-g0", AWAY), *ranks[2:]]))
    assert "Rank 1-g0 has not come to all_reduce number 413 of group x" in text
    assert "-g1" not in text
    apart = [*ranks[:1], hung("0-g1", WAITS), hung("1-g1", WAITS._replace(operation="broadcast"))]
    assert [one.kind for one in health.waited_for(apart)] == ["collectives_differ"]
