"""What torch's messages of a timeout tell, and whom a run waited for that one ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.diagnosis_files import START_S, fact, facts, steps
from torchobs import catalog
from torchobs.detect.collective_timeout import CollectiveTimeout, parse
from torchobs.diagnosis.collective_timeout import blamed
from torchobs.diagnosis.compare import compare
from torchobs.diagnosis.exit_cause import ending
from torchobs.diagnosis.rank_report import RankReport
from torchobs.probes.lifecycle.exceptions import describe

GLOO = "[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"
MESSAGES = {
    GLOO: CollectiveTimeout("collective", 4.0, ()),
    "[/x/unbound_buffer.cc:137] Timed out waiting 1800000ms for send operation to complete": CollectiveTimeout(
        "collective", 1800.0, ()
    ),
    "[/x/pair.cc:534] Application timeout caused pair closure": CollectiveTimeout("collective", None, ()),
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=5000) ran for 5023 milliseconds before timing out.": CollectiveTimeout("collective", 5.0, ()),
    "[Rank 0] Caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600123"
    " milliseconds before timing out.": CollectiveTimeout("collective", 600.0, ()),
    f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms\n Original exception: \n{GLOO}": CollectiveTimeout(
        "monitored_barrier", 3.0, (1,)
    ),
    "[Rank 0]: Ranks 1, 5, 12 failed to pass monitoredBarrier in 250 ms": CollectiveTimeout(
        "monitored_barrier", 0.25, (1, 5, 12)
    ),
    "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check"
    " rank 0 logs for faulty rank.": CollectiveTimeout("monitored_barrier", None, ()),
    "Timed out after 301 seconds waiting for clients. 1/2 clients joined.": CollectiveTimeout("rendezvous", 301.0, ()),
    "wait timeout after 300000ms, keys: /default_pg/0//cuda//0": CollectiveTimeout("rendezvous", 300.0, ()),
    "Timed out initializing process group in store based barrier on rank: 0": CollectiveTimeout("rendezvous", None, ()),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_torch(message: str) -> None:
    """Numbers alone are taken."""
    assert parse(message) == MESSAGES[message]


@pytest.mark.parametrize(
    "message",
    [
        "", "CUDA error: the launch timed out and was terminated", "DataLoader timed out after 5 seconds",
        "[/x/pair.cc:534] Connection closed by peer [127.0.0.1]:31337", "Timed out waiting for the lock", "x" * 100_000,
    ],
)  # fmt: skip
def test_other_messages(message: str) -> None:
    """A peer that has ended, an operator's own words."""
    assert parse(message) is None


def test_an_exception_s_message_is_read_for_that_alone() -> None:
    """Of a `RuntimeError`, which torch raises, or of the one at its root; a text that is another's code is not."""

    class Mine(str):
        __slots__ = ()

    assert describe(RuntimeError(GLOO))["timeout_s"] == 4.0
    outer = ValueError("while averaging")
    outer.__cause__ = RuntimeError(GLOO)
    assert describe(outer)["timeout"] == "collective"
    for error in (ValueError(GLOO), RuntimeError(), RuntimeError(Mine(GLOO)), RuntimeError("out of luck")):
        assert "timeout" not in describe(error)


END_S = 24.0
IN_BACKWARD = "torch/autograd/graph.py:979 in _engine_run_backward"


def rank(number: int, *, gave_up: bool = False, seconds: float = END_S, **given: Any) -> RankReport:
    """One of a run's ranks after 201 steps, ended by a timeout in backward, or by a launcher."""
    attributes = {
        "exception__type": "builtins.RuntimeError",
        "location": IN_BACKWARD,
        "timeout": "collective",
        "timeout_s": 4.0,
    }
    fields: dict[str, Any] = {"state": "failed", "reason": "terminated", "phase": "other", "last_s": START_S + seconds}
    if gave_up:
        fields |= {"reason": "exception", "events": [fact(catalog.EVENT_EXCEPTION, seconds, 201, **attributes)]}
    return facts(steps(201), resource={"rank": number, "world_size": 8}, **{**fields, **given})


def told(*ranks: RankReport) -> str:
    """What is said first of the ranks together."""
    return compare(ranks)[0].text


def test_the_one_of_many_that_is_elsewhere() -> None:
    """Some gave up, the others were ended before they did."""
    ranks = [rank(0, gave_up=True), rank(1, phase="data"), *(rank(number, phase="backward") for number in range(2, 8))]
    text = told(*ranks)
    assert text == (
        "A collective timed out after 4 s on rank 0. Rank 1 fetches data of step 202, and the other 7 ranks wait in backward of"
        " step 202."
    )
    assert set(blamed(ranks)) == {"1"}


def test_a_rank_that_had_finished_in_order_is_waited_for() -> None:
    """It had fewer batches."""
    ranks = rank(0, gave_up=True), rank(1, state="finished", reason="finished", seconds=20.5)
    assert told(*ranks).endswith("Rank 1 ended in order, and the other rank waits in backward of step 202.")


def test_ranks_that_all_gave_up_waited_for_each_other() -> None:
    """In different places; or in the same, of which it cannot be told."""
    apart = rank(0, gave_up=True), rank(1, gave_up=True, events=[timeout_elsewhere()], phase="forward")
    assert told(*apart) == (
        "A collective timed out after 4 s on ranks 0 and 1. They waited for each other: rank 0 in backward of step 202 and"
        " rank 1 in forward of step 202."
    )
    assert told(rank(0, gave_up=True), rank(1, gave_up=True)).endswith("which rank did not come cannot be told.")
    assert not blamed([rank(0, gave_up=True), rank(1, gave_up=True)])


def counted(report: RankReport, number: int, *calls: str) -> RankReport:
    """The same rank with the number of collectives that it has called, and the last of them."""
    values: dict[tuple[str, ...], Any] = {(catalog.COLLECTIVE_ENQUEUED.name, "gloo", "default"): float(number)}
    numbered = [f"default (gloo) #{number - len(calls) + 1 + at} {call}" for at, call in enumerate(calls)]
    events = [one._replace(attributes={**one.attributes, "collectives": numbered}) for one in report.events]
    return replace(report, values=values, events=tuple(events))


def test_a_rank_that_called_one_collective_more_is_told_with_the_line() -> None:
    """Promise: by the numbers that groups count, and where both ranks' last calls are known with the one that was more."""
    last_steps = ["all_reduce at a.py:9 in main"] * 2
    stacks = fact(catalog.EVENT_STACKS, END_S - 1, 201, cause="stalled")
    one = counted(rank(0, gave_up=True), 207, *last_steps, "barrier at a.py:2 in save", "barrier at a.py:5 in finish")
    other = counted(rank(1, phase="idle", events=[stacks]), 206, *last_steps, "barrier at a.py:5 in finish")
    more = "Rank 0 called one collective more than rank 1 (207 and 206 of group default (gloo))"
    assert told(one, other) == (
        "A collective timed out after 4 s on rank 0. Rank 1 has left its training loop, and the other rank waits in backward of"
        f" step 202. {more}: barrier at a.py:2 in save."
    )
    assert told(one, counted(other, 206)).endswith(f"{more}.")


def test_ranks_in_one_place_are_told_apart_by_their_counts_alone() -> None:
    """Promise: nobody is named for being where the rank is that waits for it; without counts it cannot be told."""
    waits, other = rank(0, gave_up=True), rank(1, phase="backward")
    assert told(waits, other) == "A collective timed out after 4 s on rank 0. Which rank did not come cannot be told."
    assert not blamed([waits, other])
    assert told(counted(waits, 9), counted(other, 7)) == (
        "A collective timed out after 4 s on rank 0. "
        "Rank 0 called 2 collectives more than rank 1 (9 and 7 of group default (gloo))."
    )
    assert set(blamed([counted(waits, 9), counted(other, 7)])) == {"1"}
    apart = [counted(replace(waits, suffix="-g0"), 9), counted(replace(other, suffix="-g1"), 7)]  # default groups of their own
    assert not blamed(apart)
    assert "more than" not in told(*apart)


def test_counts_of_a_rank_that_trained_to_its_end_are_not_compared() -> None:
    """Promise: they are published once a second, and may be those of a step before its last."""
    killed = counted(rank(1, phase="other", seconds=20.5), 7)
    assert "more than" not in told(counted(rank(0, gave_up=True, seconds=20.9), 9), killed)


def timeout_elsewhere() -> Any:
    """A timeout that was raised outside of backward."""
    at = {"exception__type": "builtins.RuntimeError", "location": "torch/distributed/distributed_c10d.py:4 in barrier"}
    return fact(catalog.EVENT_EXCEPTION, END_S, 201, timeout="collective", timeout_s=4.0, **at)


def test_a_rank_of_another_machine_is_named_by_its_number() -> None:
    """By a monitored barrier alone."""
    attributes = {"timeout": "monitored_barrier", "timeout_s": 4.0, "absent_ranks": [5]}
    event = fact(
        catalog.EVENT_EXCEPTION, END_S, 201, exception__type="builtins.RuntimeError", location="a.py:1 in b", **attributes
    )
    ranks = rank(0, gave_up=True, events=[event]), rank(1)
    assert told(*ranks) == (
        "A monitored barrier timed out after 4 s on rank 0. Rank 5 did not come, and is not among the files here."
    )
    assert next(ending(ranks[0])).text.endswith(": a timeout after 4 s, it waited for rank 5, which did not come.")


def test_a_rank_that_failed_before_is_the_cause() -> None:
    """By an exception of its own, minutes before the others gave up."""
    own = fact(catalog.EVENT_EXCEPTION, 21.0, 201, exception__type="builtins.KeyError", location="/home/me/train.py:3 in load")
    ranks = rank(0, gave_up=True), rank(1, seconds=21.0, reason="exception", events=[own])
    assert told(*ranks).startswith("Rank 1 failed first, 3 s before rank 0")
    assert not blamed(ranks)
