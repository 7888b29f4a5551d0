"""What is said of ranks and runs, from numbers alone: how they ended, where they stand still, losses, gradients, rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.diagnosis_files import PACE, PHASES, START_S, fact, facts, origin_told, step, steps, told
from torchobs import catalog
from torchobs.catalog import RANK_STATES
from torchobs.catalog.findings import OTHER_RANKS, Finding, finding
from torchobs.detect.hangs import Standstill
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.endings import compare, culprits, first_failed
from torchobs.diagnosis.hangs import stall
from torchobs.diagnosis.health import ERROR, INFO, WARNING, diagnose
from torchobs.document.run import Options, _findings, document
from torchobs.flight.artifacts import PROFILE, STACKS, STUCK, ArtifactName, named
from torchobs.flight.reader import Distribution
from torchobs.flight.throughput import Throughput
from torchobs.ranks.rank_view import RankView, run_at_end

if TYPE_CHECKING:
    from torchobs.flight.events import Event
    from torchobs.ranks.rank_view import Step

FINISHED: dict[str, Any] = {"state": "finished", "reason": "finished"}
ALIVE: dict[str, Any] = {"state": "alive", "reason": "", "up": True}


def raised_event(seconds: float, **attributes: Any) -> Any:
    """An exception."""
    return fact(catalog.EVENT_EXCEPTION, seconds, round(10 * seconds), exception__type="builtins.ValueError", **attributes)


def test_how_a_rank_ended() -> None:
    """In one sentence, with how far it came."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"state": "failed", "reason": "terminated", "exit_code": 129}, "Rank 0 was terminated by SIGHUP after step 50"),
        ({"state": "failed", "reason": "crashed", "exit_code": 139}, "crashed in a thread that ran no Python code (SIGSEGV"),
        ({"unwritten": True}, "without a word after step 50 at least, in the phase forward: killed (SIGKILL)"),
        ({"same_boot": False}, "without a word after step 50, in the phase forward: the machine has been started"),
        ({"copied": True, "same_boot": False}, "or a crash, or it went on after this copy was made."),
    ]  # fmt: skip
    for changes, said in cases:
        assert said in diagnose(facts(steps(50), **changes))[0].long


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
    events = [raised_event(2.0, location="q.py:3 in log", thread="log"), raised_event(61.1, location="q.py:12 in <module>")]
    events.insert(1, raised_event(3.1, location="q.py:7 in pre", thread="prefetch"))
    for state, reason in (("lost", "lost"), ("failed", "exception")):
        texts = told(facts(steps(31), state=state, reason=reason, events=events, last_s=START_S + 61.1))
        words = "Thread 'prefetch' ended by ValueError at q.py:7 in pre, after step 31, 58 s before the end. So did 1 other"
        assert texts["thread_exception"].startswith(words)
    assert "thread_exception" not in told(facts(steps(31), **FINISHED, events=events))


def test_what_was_reported_shortly_before_the_end_stands_beside_it() -> None:
    """Not what was more than a minute before, and nothing after an end in order."""
    full = fact(catalog.EVENT_OUT_OF_MEMORY, 9.0, 90, device="cpu", requested=2**30, limit=6 * 2**30)
    for event, kind, said in (
        (fact(catalog.EVENT_WORKER_DIED, 9.0, 90, pid=77, signal="SIGKILL"), "worker_died", "(pid 77) was ended by SIGKILL"),
        (fact(catalog.EVENT_GPU_XID, 9.0, 90, hw__id="GPU-1", xid=79), "gpu_xid", "reports XID 79 of GPU GPU-1, 59 s"),
        (full, "host_out_of_memory", "before the end: 1 GiB were asked for, at its limit of 6 GiB (ulimit)."),
    ):
        assert said in told(facts(steps(100), state="failed", reason="exception", events=[event], last_s=START_S + 68))[kind]
        assert kind not in told(facts(steps(100), **FINISHED, events=[event]))
        assert kind not in told(facts(steps(100), events=[event], last_s=START_S + 70))


def test_a_save_that_ends_the_rank_is_one_finding() -> None:
    """It has both facts; a save with an exception that was caught is a finding of its own beside the end."""
    save = {"exception__type": "builtins.OSError", "free": 2**30, "needed": 3 * 2**30, "saved_step": 50}
    values: dict[Any, float] = {(catalog.CHECKPOINTS, "failed"): 1, catalog.CHECKPOINT_FAILURE_STREAK: 1}
    failed: dict[str, Any] = {"state": "failed", "reason": "exception", "values": values}
    ends = fact(catalog.EVENT_EXCEPTION, 10.0, 100, exception__type="builtins.OSError", location="train.py:9")
    events = [fact(catalog.EVENT_CHECKPOINT_FAILED, 9.9, 100, **save), ends]
    rank = facts(steps(100), events=events, **failed)
    assert [finding.kind for finding in diagnose(rank)] == ["exception"]
    assert told(rank)["exception"] == (
        "Rank 0 ended by OSError at train.py:9, after step 100. It was saving a checkpoint. 1 GiB were left on the file "
        "system, and a checkpoint takes 3 GiB. The last one saved is of step 50."
    )
    assert "Rank 0 failed, as it saved a checkpoint: OSError" in diagnose(rank)[0].short
    caught = facts(steps(100), events=[*events[:1], raised_event(10.0)], **failed)
    assert [finding.kind for finding in diagnose(caught)] == ["exception", "checkpoint_failed"]


# --- ranks together -----------------------------------------------------------------------------------------------------------
def rank(number: int, *, phases: dict[str, float] | None = None, count: int = 100, **changes: Any) -> RankView:
    """One of two ranks."""
    times = tuple((phases or PHASES).get(phase, 0.0) for phase in catalog.PHASES)
    pace = Throughput(100, sum(times), sum(times), times, 10.0, 10.0, None, None)
    history = [step(n, phase_s=phases or PHASES) for n in range(1, count + 1)]
    return facts(history, resource={"rank": number, "local_world_size": 2, "world_size": 2}, **{"pace": pace, **changes})


def raised(number: int, seconds: float, location: str, **cause: str) -> RankView:
    """A rank that an exception ended."""
    events = [fact(catalog.EVENT_DISTRIBUTED, 0.1, world_size=2), raised_event(seconds, location=location, **cause)]
    return rank(number, state="failed", reason="exception", last_s=START_S + seconds, events=events)


IN_COLLECTIVE = "torch/distributed/distributed_c10d.py:83 in wrapper"
GONE = rank(1, last_s=START_S + 9.9)
ASKED: dict[str, Any] = {"state": "failed", "reason": "terminated", "exit_code": 143, "last_s": START_S + 10}


@pytest.mark.parametrize(
    ("ranks", "kind", "first"),
    [
        ([rank(0, last_s=START_S + 12), rank(1, last_s=START_S + 10)], "failed_first", 1),
        ([rank(0, **ALIVE), rank(1)], "only_failed", 1),
        ([raised(0, 10.1, IN_COLLECTIVE), GONE], "vanished_first", 1),
        ([raised(0, 10.1, "a.py:7 in main", cause__location="graph.py:9 in _engine_run_backward"), GONE], "vanished_first", 1),
        ([rank(0, **{**ASKED, "last_s": START_S + 10.1}), GONE], "vanished_first", 1),
        ([rank(0, last_s=START_S + 9.9), raised(1, 10.1, "train.py:7 in batch")], "failed_by_itself", 1),
        ([raised(0, 10.0, IN_COLLECTIVE), raised(1, 10.1, "train.py:7 in batch")], "failed_by_itself", 1),
        ([raised(0, 10.003, "train.py:7 in main"), raised(1, 10.0, "train.py:7 in main")], "", 1),
        ([rank(0, last_s=START_S + 10), rank(1, last_s=START_S + 10.3)], "", 0),  # too close
        ([raised(0, 10.06, IN_COLLECTIVE), rank(1, **ASKED)], "failed_first", 1),  # its mark has an exact time
        ([raised(0, 10.009, IN_COLLECTIVE), rank(1, **ASKED)], "", 1),  # but for a tick
        ([rank(n, **{**ASKED, "last_s": START_S + 10 + n}) for n in (0, 1)], "", 0),  # told to end together
        ([rank(0, **ALIVE), rank(1, **ASKED)], "only_failed", 1),
        ([rank(0, **{**ALIVE, "state": "unresponsive"}), rank(1, **ASKED)], "", 1),
        ([rank(0, **ALIVE), rank(1, **FINISHED)], "", None),
    ],
)
def test_the_rank_that_failed_first_is_named_where_that_is_certain(ranks: list[RankView], kind: str, first: int | None) -> None:
    """By the clock, or by how they ended; else no rank is accused."""
    accusations = [(finding.kind, finding.rank) for finding in culprits(ranks)]
    assert accusations == ([(kind, str(first))] if kind else [])
    assert first_failed(ranks)[0] is (None if first is None else ranks[first])


def test_only_ends_by_the_same_exception_are_one_sentence() -> None:
    """Another exception of another rank is not hidden behind them."""
    files = {0: "train", 2: "train", 3: "data"}
    ranks = [GONE, *(raised(number, 10.1, f"{file}.py:7 in main") for number, file in files.items())]
    texts = [item.words for item in _findings(ranks, diagnose_run(ranks), set()).items if "ended by" in item.words]
    assert ["Much the same goes for 1 more rank." in text for text in texts] == [True, False]
    assert "more ranks" not in finding("weights_differ", step=256, alike=128, odd="ranks 0 and 1").long, "a step is no rank"


def test_the_rank_from_which_a_nan_came_is_shown_and_missing_ones_are_counted() -> None:
    """Promise: not the first, which has had it in averaged gradients and knows no more; the launcher's size is what counts."""

    def shown(*origins: str) -> tuple[int, str]:
        named = [{"origin": origin, "operator": "log", "parameter": f"x{n}"} for n, origin in enumerate(origins)]
        events = [[fact(catalog.EVENT_NONFINITE_ORIGIN, 5.0, 50, **names)] if names["origin"] else [] for names in named]
        diagnosis = diagnose_run([rank(n, **FINISHED, events=of_rank) for n, of_rank in enumerate(events)])
        return diagnosis.principal, diagnosis.health.text.partition(" steps. ")[2]

    assert shown("unknown", "", "input") == (2, "The input x2 holds NaN or infinity.")
    assert [shown(*born)[0] for born in (("parameter", "unknown", "operator"), ("unknown", ""), ("backward",) * 2)] == [2, 0, 0]
    apart = [rank(n, values={(catalog.DISTRIBUTED_INFO, "ddp"): 1.0}) for n in range(3)]
    apart[0] = replace(apart[0], steps=tuple(step(n, 2.0, 4.0) for n in range(1, 101)))
    (disagree,) = (finding for finding in compare(apart) if finding.kind == "ranks_disagree")
    assert "its norm in step 100 is not the same (rank 0: 4, and 1 on the others)" in disagree.long
    many = [facts(steps(10), resource={"rank": n, "local_world_size": 8}) for n in range(6)]
    (missing,) = (finding for finding in compare(run_at_end(many).ranks) if finding.kind == "ranks_missing")
    assert missing.long.startswith("6 of the 8 ranks of this machine are here")
    pauses = [rank(number, phases={**PHASES, phase: 0.1}) for number, phase in enumerate(("other", "between"))]
    assert not compare(pauses), "the same pause is counted as one on this rank, and as the other on that"


# --- standing still ---------------------------------------------------------------------------------------------------------
FLIGHT = f"r0-{0:032x}.flight"


def left(kind: str, seconds: float = -START_S) -> ArtifactName:
    """A file written so many seconds after the start; by default its moment is 0, as that of a rank that is stuck."""
    return named(FLIGHT, kind, round(1e3 * (START_S + seconds)))


def quiet(seconds: float, **changes: Any) -> RankView:
    """A rank with 201 steps of 0.1 s each that ended so many seconds after the last."""
    last_s, durations = START_S + 20.1, Distribution((0,) * 4 + (201,), 20.1, 0.1, 0.1)
    ended = {"phase": "other", "phase_begun_s": last_s, "last_s": last_s + seconds}
    return facts(steps(201), **{**ended, "values": {catalog.STEP_DURATION: durations}, **changes})


def stalled(of: RankView) -> Finding:
    """What is said of it."""
    return next(finding for finding in diagnose(of) if finding.kind in {"stalled", "left_loop", "lock_held"})


def test_a_rank_that_was_killed_while_it_stood_still_is_said_to_have() -> None:
    """How long, what is usual, the phase, and where the stacks are: those of before the last step are of something else."""
    hung = quiet(69.0, left=(left(STACKS, 5.0), left(STACKS, 85.0), left(PROFILE, 86.0)))
    finding = stalled(hung)
    assert finding.severity == ERROR
    words = "No step ended in the last 1 min 9 s, where one usually took 100 ms: 1 min 9 s of it in the phase other. The stacks"
    assert finding.long == f"{words} of all its threads are in {left(STACKS, 85.0).name}, beside the flight file."
    (rank_document,) = document([hung], [], [], Options())["ranks"]
    assert rank_document["stall"] == {
        "seconds": pytest.approx(69.0), "usual_step": 0.1, "phase": "other", "phase_seconds": pytest.approx(69.0), "hung": True,
        "lock_held": False, "stacks": [left(STACKS, 85.0).name], "frames": [], "long": True,
    }  # fmt: skip
    event = fact(catalog.EVENT_STACKS, 80.0, evidence="0123456789abcdef")
    assert "are in evidence 0123456789abcdef" in stalled(quiet(69.0, events=[event])).long, "a copy of the flight file alone"


def test_what_is_long_and_how_bad_it_is() -> None:
    """A slow batch is nothing, a time that nobody would call a hang yet is worth a look, an evaluation takes what it takes."""
    cases: list[tuple[float, dict[str, Any], str | None]] = [
        (9.9, {}, None),
        (10.1, {}, WARNING),
        (30.0, {"state": "failed", "reason": "interrupted"}, WARNING),
        (600.0, {"state": "failed", "reason": "exception"}, ERROR),
        (600.0, {"phase": "evaluation"}, INFO),
        (600.0, {"state": "finished", "reason": "finished"}, None),
        (30.0, {**ALIVE, "standstill": Standstill(30.0, 0.1)}, WARNING),
        (30.0, {**ALIVE, "standstill": Standstill(30.0, 0.1, habitual=True)}, INFO),
        (30.0, ALIVE, None),
        (600.0, {**ALIVE, "phase": "evaluation"}, INFO),
        (69.0, {**ALIVE, "state": "hung"}, ERROR),
    ]
    for seconds, changes, severity in cases:
        severities = [finding.severity for finding in diagnose(quiet(seconds, **changes)) if finding.kind == "stalled"]
        assert severities == ([severity] if severity else [])


def test_what_is_long_where_the_lock_is_held_and_before_the_first_step() -> None:
    """Its heartbeat stopped with the lock; before the first step data are loaded and models compiled: half an hour is long."""
    finding = stalled(quiet(0.5, left=(left(STUCK),)))
    assert (finding.kind, finding.severity) == ("lock_held", ERROR)
    assert left(STUCK).name in finding.long
    assert stall(facts(last_s=START_S + 1700, phase="data")) is None
    finding = stalled(facts(last_s=START_S + 1900, phase="data", phase_begun_s=START_S))
    assert "No step ended in the last 31 min 40 s: 31 min 40 s of it in the phase data." in finding.long


def test_a_wait_for_a_batch_names_the_worker_that_it_was_to_come_from() -> None:
    """With its state; in another phase the loader is not what was waited for."""
    state = "worker 1 (pid 20): sleeping in futex_do_wait"
    dumped = fact(catalog.EVENT_STACKS, 40.0, 201, cause="stalled", workers=[state], awaited="worker 1 (pid 20)")
    waiting = quiet(69.0, phase="data", events=[dumped], left=(left(STACKS, 40.0),))
    words = "The next batch was to come from the loader's worker 1 (pid 20), then sleeping in futex_do_wait"
    assert stalled(waiting).long.endswith(f"beside the flight file. {words}.")
    assert "worker" not in stalled(replace(waiting, phase="backward")).long


FRAMES = ("/usr/lib/python3.11/threading.py:320 in wait", "/home/me/train.py:33 in load", "/home/me/train.py:50 in <module>")


def test_stacks_that_a_rank_wrote_early_are_shown_if_it_ended_there() -> None:
    """However short that was: its steps take a second, so that twelve are no hang; the user's own line is named."""
    event = fact(catalog.EVENT_STACKS, 31.0, cause="stalled", evidence="0123456789abcdef")
    usual = [step._replace(duration_s=1.0) for step in steps(201)]
    for seconds, severity in ((12.0, INFO), (30.0, WARNING)):
        killed = replace(quiet(seconds, events=[event], left=(left(STACKS, 31.0),), frames=FRAMES), steps=tuple(usual))
        assert stalled(killed).severity == severity
        assert f"Its main thread was at {FRAMES[0]}, called at {FRAMES[1]}." in stalled(killed).long
    went_on = quiet(1.0, events=[fact(catalog.EVENT_STACKS, 10.0, cause="stalled")], left=(left(STACKS, 10.0),))
    assert stall(went_on) is None


def living(seconds: float, **changes: Any) -> RankView:
    """A living rank that stands still."""
    return quiet(seconds, **{**ALIVE, "standstill": Standstill(seconds, 0.1), "pace": PACE, **changes})


def test_a_run_that_stands_still_is_not_all_well_and_has_no_speed() -> None:
    """In the report and its JSON, as on the page; ranks that wait for one that evaluates are not reported."""
    run_document = document([living(45.0)], [], [], Options())
    assert run_document["health"]["level"] == "warning"
    assert run_document["health"]["text"].startswith("No step for 45 s (usual: 100 ms): 1 of 2 ranks alive, step 201")
    assert run_document["ranks"][0]["speed"] is None
    assert document([quiet(0.1, **ALIVE, pace=PACE)], [], [], Options())["ranks"][0]["speed"]
    evaluates = living(45.0, phase="evaluation", standstill=None, resource={"rank": 1})
    diagnosis = diagnose_run([living(45.0), evaluates])
    assert diagnosis.health.headline.startswith("Evaluating: 2 of 2 ranks alive")
    assert "stalled" not in [finding.kind for finding in diagnosis.by_rank[0]]
    assert (diagnosis.verdict.severity, diagnosis.verdict.values["badge"]) == (INFO, "No steps now")
    waits, fetches = living(45.0, phase="backward"), living(45.0, phase="data", resource={"rank": 1})
    assert [(found.kind, found.severity) for found in compare([waits, fetches])] == [("waited_for", WARNING)]
    assert not compare([waits, quiet(0.1, **ALIVE, phase="data", resource={"rank": 1})]), "one of them goes on"


# --- losses, gradients, rates, speed ------------------------------------------------------------------------------------------
NAN = math.nan
REGION = {"origin": "unknown", "operator": "compiled_function", "module": "blocks.3", "location": "train.py:9"}
ORIGINS: dict[str, dict[str, str]] = {
    "The NaN or infinity of step 7 was born in log in blocks.3 (": {**REGION, "origin": "operator", "operator": "log"},
    "infinity of step 7 appeared inside compiled region blocks.3 (train.py:9). Run `debug.trace_nan(": REGION,
    "inside the backward pass of a checkpointed region. Run": {"origin": "backward", "operator": "checkpoint_function"},
    "found: it was first seen after sqrt in blocks.3 (train.py:9); on a": {**REGION, "operator": "sqrt", "note": "on a"},
    "if on this rank, most likely in the derivative of sqrt in blocks": {**REGION, "operator": "sqrt", "note": OTHER_RANKS},
    "came with the input; it went into mm: in float16": {"origin": "input", "operator": "mm", "note": "in float16"},
    "0.weight and 5 more held the NaN or infinity of": {"origin": "unknown", "parameter": "0.weight", "note": "and 5 more"},
    "born in the derivative of sqrt, outside of any module. That derivative is": {"origin": "backward", "operator": "sqrt"},
    "step 7 came with the input x; it went into addmm.": {"origin": "input", "operator": "addmm", "parameter": "x"},
    "overflowed in float16, in 0.weight: the largest number there is 65,504": {"origin": "overflow", "parameter": "0.weight"},
}


def test_an_origin_is_told_as_far_as_it_is_known() -> None:
    """An operator, a region and the call that looks inside, or what is not known."""
    for said, attributes in ORIGINS.items():
        assert said in origin_told(fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, 7, **attributes))


GRADIENT = [*steps(100), step(101, 2.5, math.inf), step(102, NAN, NAN)]
LEAPT = [*steps(100), step(101, 2.0, 1.0, learning_rate=1.0), step(102, NAN, NAN, learning_rate=1.0)]
ROSE = [*steps(808), step(809, 2.0, 40.0), step(810, 3.0), step(811, 4.0), *(step(n, NAN, NAN) for n in range(812, 822))]
WARM_UP = [*(step(n, learning_rate=1e-3 * n / 100) for n in range(1, 101)), step(101, NAN, NAN)]


def test_a_loss_that_is_not_finite_is_told_with_what_came_before() -> None:
    """The step, the gradient before it, the learning rate, and how much was wasted."""
    cases: list[tuple[list[Step], str]] = [
        (ROSE, "in step 812, 3 steps after the gradient norm rose 40-fold (from 1 to 40). The learning rate was 0.001"),
        (ROSE, " It trained on for 9 steps after that."),
        (GRADIENT, "1 step after its gradient was not finite while the loss still was 2.5"),
        ([*steps(100), step(101, 2.5, math.inf, skipped=True), step(102, NAN, NAN)], "turned NaN in step 102. The learning"),
        (LEAPT, "The learning rate had risen 1,000-fold (from 0.001 to 1) in step 101."),
        (WARM_UP, "The loss turned NaN in step 101. The learning rate was 0.001."),
        ([*steps(50), step(51, math.inf)], "turned infinite in step 51"),
        ([step(n, NAN, NAN) for n in range(1, 20)], "The loss turned NaN in step 1."),
    ]
    for history, said in cases:
        assert said in told(facts(history))["nonfinite_loss"]


def test_gradients_that_were_not_finite_or_vanished_are_told() -> None:
    """With the layers, three of them, and how many measured steps there were; no loss scaler skips what it has not."""
    layers = {"layers": ["h.0", "h.1", "h.2", "h.3"], "layers_affected": 5, "kinds": ["nan"]}
    event = fact(catalog.EVENT_NONFINITE_GRADIENT, 8.1, 81, **layers)
    text = told(facts(steps(90), events=[event], values={catalog.GRAD_NONFINITE_STEPS: 2}))["nonfinite_gradient"]
    assert text == "Gradients were NaN in step 81, in h.0, h.1, h.2 and 2 more; in 2 measured steps in all."
    for skipped in (True, False):  # divided by a scale next to 0 a finite gradient turns infinite, and the step is done
        said = told(facts([*steps(80), step(81, skipped=skipped)], events=[event], values={(catalog.AMP_SCALE, "0"): 0.0}))
        assert said["nonfinite_gradient"].endswith("such steps: a few are usual.") is skipped
    norms = {catalog.GRAD_NORM_DISTRIBUTION: Distribution((12, 0), 0.0, 0.0, 0.0)}
    values: dict[Any, Any] = {(catalog.ANOMALIES, "gradient_vanishing"): 8, **norms}
    text = told(facts(steps(100), values=values))["gradient_vanishing"]
    assert text == "The gradient norm was vanishingly small, or zero, in 8 steps of the 12 measured."
    for measured in (19, 20):  # from the first step on, so that no usual norm shows that it vanished
        norms = {catalog.GRAD_NORM_DISTRIBUTION: Distribution((measured, 0), 0.0, 0.0, 0.0)}
        assert ("zero_gradients" in told(facts(steps(100), values=norms))) is (measured == 20)


def rates(*runs: tuple[float | None, int], first: int = 1) -> list[Step]:
    """Steps in runs of one learning rate each."""
    every = [rate for rate, count in runs for _ in range(count)]
    return [step(number, learning_rate=rate) for number, rate in enumerate(every, first)]


def annealed(steps: int, power: int = 1) -> list[Step]:
    """A cosine to zero, or a power of it."""
    return rates(*((1e-3 * (0.5 + 0.5 * math.cos(math.pi * n / steps)) ** power, 1) for n in range(1, steps + 1)))


HALVED = [step(number, learning_rate=1e-3 * 0.5**number) for number in range(301)]
TUNED = [*rates((30.0, 100)), *(slow._replace(new_model=slow.step == 101) for slow in rates((1e-6, 300), first=101))]


def test_a_learning_rate_of_zero_is_told() -> None:
    """A schedule for fewer steps than there are, or one that nobody steps; not what schedules and frozen groups do as well."""
    cases: list[tuple[list[Step], dict[str, float], str]] = [
        (rates((1e-3, 900), (0.0, 50)), {"1": 0.0}, "was 0 from step 901 on: 50 steps changed nothing."),
        (rates((0.0, 300)), {}, "was 0 in all steps: 300 steps changed nothing."),
        (rates((0.0, 300), first=9_000), {}, "was 0 from step 9,000 or before on: 300 steps changed nothing."),
        (HALVED, {"1": 1e-20}, "was below 5.96e-11 from step 24 on, after 0.001: 277 steps changed next to nothing."),
        (HALVED, {"1": 1e-3}, ""),
        (TUNED, {}, ""),
        (annealed(100), {}, ""),
        (annealed(4_000, 2), {}, ""),
        (rates((1e-3, 900), (0.0, 40)), {}, ""),
        (rates((0.0, 30), (1e-3, 100), (0.0, 19)), {}, ""),
        (rates((None, 300)), {}, ""),
        (rates((0.0, 300)), {"1": 1e-3}, ""),
    ]
    for history, others, said in cases:
        by_kind = told(facts(history, values={(catalog.LEARNING_RATE, group): rate for group, rate in others.items()}))
        texts = [by_kind[kind] for kind in ("diverged", "zero_learning_rate", "tiny_learning_rate") if kind in by_kind]
        assert texts == ([f"The learning rate {said}"] if said else [])


def test_a_step_that_took_very_long_and_steps_that_became_slow_name_the_phase() -> None:
    """A stopped process, but no evaluation; steps slow for ten seconds at least, by a phase or by compilation."""
    stood = step(150, duration_s=160.1, phase_s={**PHASES, "forward": 160.0})
    history = [*steps(149), stood, *steps(300)[150:159], step(160, duration_s=300.0), *steps(300)[160:]]
    text = told(facts(history, state="finished", reason="finished"))["held_up"]
    assert text == "Step 150 took 2 min 40 s, where 100 ms was usual, most of it in the phase forward."
    slow = {"data": 0.21, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "other": 0.01}
    history = [*steps(600), *(step(n, duration_s=0.3, phase_s=slow) for n in range(601, 635))]
    text = "The last 34 steps (10.2 s) took 300 ms each, usual was 100 ms; 100 % of the difference is in the phase data."
    assert told(facts(history))["slowdown"] == text
    assert "slowdown" not in told(facts(history[:-10]))
    history = [*steps(600), *(step(n, duration_s=0.1, phase_s={**PHASES, "compile": 0.9}) for n in range(601, 611))]
    assert told(facts(history))["slowdown"].endswith("100 % of the difference is in the phase compile.")


def test_what_is_lost_since_the_last_checkpoint_is_told() -> None:
    """In steps and in time; without one nothing, for something unseen may have saved."""
    saved = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 7.05})
    text = "The last checkpoint was complete 2.95 s before the end: 30 steps must be done again."
    assert told(saved)["checkpoint_age"] == text
    late = facts(steps(100), values={catalog.CHECKPOINT_TIMESTAMP: START_S + 10.0377})
    assert told(late)["checkpoint_age"].endswith("complete at the end: nothing has to be done again.")
    assert "checkpoint_age" not in told(facts(steps(100), last_s=START_S + 600))


def test_a_loss_scaler_that_skips_is_told() -> None:
    """A collapsed scale is an error; a twentieth of all steps is worth a look."""
    events = [fact(catalog.EVENT_AMP_SCALE_COLLAPSED, 5.0, 50, scaler="0", scale=0.5)]
    values = {(catalog.AMP_SCALE, "0"): 0.25, catalog.STEPS: 100, catalog.AMP_STEPS_SKIPPED: 60}
    by_kind = {finding.kind: finding for finding in diagnose(facts(steps(100), events=events, values=values))}
    assert by_kind["amp_scale_collapsed"].severity == "error"
    assert "amp_many_skips" not in by_kind
    stuck = facts(steps(100), values={catalog.AMP_SKIP_STREAK: 30})
    assert told(stuck)["amp_skips"] == "The loss scaler skipped the last 30 steps: nothing was learned in them."
    assert told(facts(steps(100), values=values))["amp_many_skips"] == "The loss scaler skipped 60 of 100 steps."
    assert "amp_many_skips" not in told(facts(steps(100), values={**values, catalog.STEPS: 500, catalog.AMP_STEPS_SKIPPED: 24}))


def test_waiting_for_data_is_told_from_a_fifth_of_the_time_on() -> None:
    """With what the workers had ready; one long wait is not called a lack of workers."""
    data, forward = ((catalog.STEP_PHASE_TIME, phase) for phase in ("data", "forward"))
    starved: dict[Any, float] = {data: 40.0, forward: 60.0, catalog.DATA_BATCHES_READY: 0.0}
    text = told(facts(steps(100), values=starved))["data"]
    assert text.startswith("Training waited for its data: 40 % of the time of its steps. Its workers had no batch ready")
    assert "data" not in told(facts(steps(100), values={**starved, data: 10.0}))
    stalled = step(101, duration_s=40.0, phase_s={**PHASES, "data": 39.5})
    text = told(facts([*steps(100), stalled], values=starved))["data"]
    assert text.endswith(" Most of it was one wait of 39.5 s, in step 101: something stalled there.")


def stuck(cause: str, step: int, *layers: str) -> Event:
    """The event of layers that learn nothing; of none of them, if that is taken back."""
    at = layers[-1] if layers else ""
    counts = {"layers_affected": len(layers), "layers_total": 9}
    return fact(catalog.EVENT_UNMOVED_LAYERS, 5.0, step, cause=cause, layers=list(layers), at=at, **counts)


def test_layers_that_learn_nothing_are_named_for_each_cause() -> None:
    """Of the last step that has them; an optimizer without gradients beside, until some come; unused ones as information."""

    def found(*events: Event) -> dict[str, str]:
        return {kind: text for kind, text in told(facts(steps(300), events=events)).items() if "layers" in kind}

    early, tiny, cut = stuck("vanishing", 150, "z"), stuck("dead_units", 200, "b"), stuck("cut_off", 200, "a", "b", "c", "d")
    assert found(early, tiny, cut).keys() == {"unmoved_layers_dead_units", "unmoved_layers_cut_off"}
    assert found(cut)["unmoved_layers_cut_off"].startswith("4 of 9 layers (a, b, c and 1 more) were not learning in step 200")
    without = stuck("no_gradient", 34, "a", "b")
    assert found(without, tiny).keys() == {"unmoved_layers_no_gradient", "unmoved_layers_dead_units"}
    assert found(without, tiny, stuck("no_gradient", 250)).keys() == {"unmoved_layers_dead_units"}
    unused = facts(steps(300), events=[stuck("unused", 101, "pooler")])
    (finding,) = (finding for finding in diagnose(unused) if finding.kind == "unused_layers")
    assert (finding.severity, finding.long) == ("info", "1 layer of the optimizer has had no gradient by step 101 (pooler).")


def test_a_leak_leads_with_what_grew_how_much_and_where() -> None:
    """The tensors, else the line, else that it is not Python's."""
    attributes = {"space": "host", "grown": 195 << 20, "steps": 40}
    tensors, lines = ["244 tensors float32[200000] on cpu, 186 MiB"], ["train.py:23 2,000 more, 95 MiB"]

    def words(**rows: list[str]) -> str:
        return told(facts(steps(90), events=[fact(catalog.EVENT_MEMORY_LEAK, 6.0, 60, **attributes, **rows)]))["memory_leak"]

    leaks, grew = "Host memory leaks", "It grew by 195 MiB in 40 steps."
    assert words(tensors=tensors, lines=lines) == f"{leaks}: {tensors[0]}, made at train.py:23, are never freed. {grew}"
    assert words(lines=lines) == f"{leaks}: what train.py:23 makes is never freed (2,000 more, 95 MiB). {grew}"
    assert words() == f"{leaks}, but no object of Python's became more: look at native code. {grew}"


def test_steps_without_a_loss_are_not_steps_that_are_gone() -> None:
    """An earlier loss is unknown only where the file begins later."""
    for first, said in ((1, "The loss turned NaN in step 5. "), (9, "The loss has been NaN since step 13 or before: older")):
        history = [step(number, NAN if number == first + 4 else None) for number in range(first, first + 6)]
        assert any(line.startswith(said) for line in told(facts(history)).values())
