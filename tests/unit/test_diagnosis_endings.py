"""How ranks ended, which failed first, and what comparing them shows: from numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnosis_files import PHASES, START_S, fact, facts, step, steps, told
from torchobs import catalog
from torchobs.catalog import RANK_STATES
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.endings import compare, first_failed
from torchobs.diagnosis.health import diagnose
from torchobs.flight.throughput import Throughput
from torchobs.ranks.rank_view import RankView, run_at_end
from torchobs.ranks.state import MemoryUse

FINISHED: dict[str, Any] = {"state": "finished", "reason": "finished"}
ALIVE: dict[str, Any] = {"state": "alive", "reason": "", "up": True}


def raised_event(seconds: float, kind: str = "builtins.ValueError", location: str = "net.py:7 in f", **given: Any) -> Any:
    """An exception."""
    return fact(catalog.EVENT_EXCEPTION, seconds, round(10 * seconds), exception__type=kind, location=location, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state": "failed", "reason": "terminated", "exit_code": 143}, "Rank 0 was terminated by SIGTERM after step 50"),
        ({"state": "failed", "reason": "terminated", "exit_code": 129}, "Rank 0 was terminated by SIGHUP after step 50"),
        ({"state": "failed", "reason": "crashed", "exit_code": 139}, "crashed in a thread that ran no Python code (SIGSEGV"),
        ({"unwritten": True}, "without a word after step 50 at least, in the phase forward: killed (SIGKILL)"),
        ({"same_boot": False}, "without a word after step 50, in the phase forward: the machine has been started"),
        ({"copied": True, "same_boot": False}, "or a crash, or it went on after this copy was made."),
        (
            {
                "reason": "out_of_memory", "memory_use": MemoryUse(0.98, 0.5, 4.0),
                "values": {catalog.CGROUP_MEMORY_LIMIT: 2.0**32},
            },
            (
                "Rank 0 vanished with memory full after step 50, in the phase forward. The kernel killed a process of its "
                "cgroup 4 s before its last sign of life. 98 % of its cgroup's memory was taken. The cgroup's limit is 4 GiB."
            ),
        ),
    ],
)  # fmt: skip
def test_how_a_rank_ended(given: dict[str, Any], said: str) -> None:
    """In one sentence, with how far it came."""
    assert said in diagnose(facts(steps(50), **given))[0].long


def test_every_exit_reason_and_living_state_has_its_kind() -> None:
    """None falls through to another's; a rank that lives is not called dead."""
    kinds = {reason: diagnose(facts(steps(5), reason=reason))[0].kind for reason in catalog.EXIT_REASONS}
    assert kinds == {reason: reason for reason in catalog.EXIT_REASONS}
    living = [state for state in RANK_STATES if state in {"alive", "hung", "unresponsive"}]
    for state in living:
        (first, *_) = diagnose(facts(steps(50), state=state, reason="", up=True, last_s=START_S + 70))
        assert (first.kind, first.severity == "error") == (state, state != "alive")


def test_a_part_of_a_file_proves_nothing_that_is_missing_from_it() -> None:
    """Neither that there was no step, nor a stall, nor how it ended without its live words."""
    assert "step" not in diagnose(facts([], partial=True))[0].long
    assert "after step 40" in diagnose(facts([], partial=True, values={catalog.STEPS: 40}))[0].long
    late = START_S + 3600
    assert "stalled" not in told(facts(steps(50), values={catalog.STEPS: 36_000}, partial=True, last_s=late))
    assert "stalled" in told(facts(steps(50), values={catalog.STEPS: 50}, partial=True, last_s=late))
    part = facts(steps(50), reason="", partial=True, end_known=False, last_s=late, values={catalog.STEPS: 50})
    (only,) = diagnose(part)
    assert (only.kind, only.severity) == ("end_unknown", "warning")
    assert only.long == "How rank 0 ended is not in this part of the file; it had come to step 50 at least."
    assert first_failed([part]) == (None, None)


def test_a_thread_that_ended_by_an_exception_stands_beside_the_end() -> None:
    """A prefetch thread fails, and a minute later the main thread, which waits for it, or somebody who kills it."""
    events = [
        raised_event(2.0, "builtins.OSError", "q.py:3 in log", thread="log"),
        raised_event(3.1, "builtins.ValueError", "q.py:7 in pre", thread="prefetch"),
        raised_event(61.1, "_queue.Empty", "q.py:12 in <module>"),
    ]
    for state, reason in (("lost", "lost"), ("failed", "exception")):
        found = told(facts(steps(31), state=state, reason=reason, events=events, last_s=START_S + 61.1))
        words = "Thread 'prefetch' ended by ValueError at q.py:7 in pre, after step 31, 58 s before the end. So did 1 other"
        assert found["thread_exception"].startswith(words)
    assert "thread_exception" not in told(facts(steps(31), **FINISHED, events=events))


@pytest.mark.parametrize(
    ("event", "attributes", "kind", "said"),
    [
        (catalog.EVENT_WORKER_DIED, {"pid": 77, "signal": "SIGKILL"}, "worker_died", "(pid 77) was ended by SIGKILL"),
        (catalog.EVENT_GPU_XID, {"hw__id": "GPU-1", "xid": 79}, "gpu_xid", "The driver reports XID 79 of GPU GPU-1, 1 s"),
        (
            catalog.EVENT_OUT_OF_MEMORY, {"device": "cpu", "requested": 2**30, "limit": 6 * 2**30}, "host_out_of_memory",
            "The process had no memory left, 1 s before the end: 1 GiB were asked for, at its limit of 6 GiB (ulimit).",
        ),
    ],
)  # fmt: skip
def test_what_was_reported_shortly_before_the_end_stands_beside_it(
    event: catalog.Event, attributes: dict[str, Any], kind: str, said: str
) -> None:
    """Not what was an hour before, and nothing after an end in order."""
    events = [fact(event, 9.0, 90, **attributes)]
    assert said in told(facts(steps(100), state="failed", reason="exception", events=events))[kind]
    assert kind not in told(facts(steps(100), **FINISHED, events=events))
    assert kind not in told(facts(steps(100), events=events, last_s=START_S + 3600))


def test_a_save_that_ends_the_rank_is_one_finding() -> None:
    """It has both facts; a save whose exception was caught is a finding of its own beside the end."""
    save = {"exception__type": "builtins.OSError", "free": 2**30, "needed": 3 * 2**30, "saved_step": 50}
    values: dict[Any, float] = {(catalog.CHECKPOINTS, "failed"): 1, catalog.CHECKPOINT_FAILURE_STREAK: 1}
    failed: dict[str, Any] = {"state": "failed", "reason": "exception", "values": values}
    events = [fact(catalog.EVENT_CHECKPOINT_FAILED, 9.9, 100, **save), raised_event(10.0, "builtins.OSError", "train.py:9")]
    rank = facts(steps(100), events=events, **failed)
    assert [one.kind for one in diagnose(rank)] == ["exception"]
    assert told(rank)["exception"] == (
        "Rank 0 ended by OSError at train.py:9, after step 100. It was saving a checkpoint. 1 GiB were left on the file "
        "system, and a checkpoint takes 3 GiB. The last one saved is of step 50."
    )
    assert "Rank 0 failed, as it saved a checkpoint: OSError" in diagnose(rank)[0].short
    caught = facts(steps(100), events=[*events[:1], raised_event(10.0)], **failed)
    assert [one.kind for one in diagnose(caught)] == ["exception", "checkpoint_failed"]


# --- ranks together -----------------------------------------------------------------------------------------------------------
def rank(number: int, *, phases: dict[str, float] | None = None, count: int = 100, **given: Any) -> RankView:
    """One of two ranks."""
    times = tuple((phases or PHASES).get(phase, 0.0) for phase in catalog.PHASES)
    pace = Throughput(100, sum(times), sum(times), times, 10.0, 10.0, None, None)
    history = [step(n, phase_s=phases or PHASES) for n in range(1, count + 1)]
    return facts(history, resource={"rank": number, "local_world_size": 2, "world_size": 2}, **{"pace": pace, **given})


def raised(number: int, seconds: float, location: str) -> RankView:
    """A rank that an exception ended."""
    events = [fact(catalog.EVENT_DISTRIBUTED, 0.1, world_size=2), raised_event(seconds, location=location)]
    return rank(number, state="failed", reason="exception", last_s=START_S + seconds, events=events)


IN_COLLECTIVE = "torch/distributed/distributed_c10d.py:83 in wrapper"
GONE = rank(1, last_s=START_S + 9.9)


@pytest.mark.parametrize(
    ("ranks", "kind", "first"),
    [
        ([rank(0, last_s=START_S + 12), rank(1, last_s=START_S + 10)], "failed_first", 1),
        ([rank(0, **ALIVE), rank(1)], "only_failed", 1),
        ([raised(0, 10.1, IN_COLLECTIVE), GONE], "vanished_first", 1),
        ([raised(0, 10.1, "torch/autograd/graph.py:979 in _engine_run_backward"), GONE], "vanished_first", 1),
        ([rank(0, state="failed", reason="terminated", last_s=START_S + 10.1), GONE], "vanished_first", 1),
        ([rank(0, last_s=START_S + 9.9), raised(1, 10.1, "train.py:7 in batch")], "failed_by_itself", 1),
        ([raised(0, 10.0, IN_COLLECTIVE), raised(1, 10.1, "train.py:7 in batch")], "failed_by_itself", 1),
        ([raised(0, 10.003, "train.py:7 in main"), raised(1, 10.0, "train.py:7 in main")], "", 1),
        ([rank(0, last_s=START_S + 10), rank(1, last_s=START_S + 10.3)], "", 0),
        ([rank(n, state="failed", reason="terminated", last_s=START_S + 10 + n) for n in (0, 1)], "", 0),
        ([rank(0, **ALIVE), rank(1, state="failed", reason="terminated")], "only_failed", 1),
        ([rank(0, **ALIVE), rank(1, **FINISHED)], "", None),
    ],
    ids=[
        "by the clock", "alone", "peers raised in a collective", "in backward", "peers were told to end", "raised itself",
        "raised in its own code", "all raised alike", "too close", "told to end together", "told to end alone", "none failed",
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_named_where_that_is_certain(ranks: list[RankView], kind: str, first: int | None) -> None:
    """By the clock, or by how they ended; else no rank is accused."""
    found = [one for one in compare(ranks) if one.kind in {"failed_first", "only_failed", "vanished_first", "failed_by_itself"}]
    assert [(one.kind, one.rank) for one in found] == ([(kind, str(first))] if kind else [])
    assert first_failed(ranks)[0] is (None if first is None else ranks[first])


def test_the_rank_from_which_a_nan_came_is_shown() -> None:
    """Promise: not the first, which has had it in averaged gradients and knows no more."""

    def shown(*origins: str) -> int:
        found = [[fact(catalog.EVENT_NONFINITE_ORIGIN, 5.0, 50, origin=origin)] if origin else [] for origin in origins]
        return diagnose_run([rank(n, **FINISHED, events=events) for n, events in enumerate(found)]).principal

    assert shown("unknown", "", "input") == shown("parameter", "unknown", "operator") == 2
    assert shown("unknown", "") == shown("backward", "backward") == 0


def test_missing_ranks_are_counted() -> None:
    """By the size that the launcher gave."""
    many = [facts(steps(10), resource={"rank": n, "local_world_size": 8}) for n in range(6)]
    (missing,) = (one for one in compare(run_at_end(many).ranks) if one.kind == "ranks_missing")
    assert missing.long.startswith("6 of the 8 ranks of this machine are here")
