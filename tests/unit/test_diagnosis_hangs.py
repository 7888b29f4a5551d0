"""A time without a step at the end: when it is told, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.diagnosis_files import PACE, START_S, fact, facts, steps
from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.detect.hangs import Standstill
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.hangs import stall
from torchobs.diagnosis.health import ERROR, INFO, WARNING, diagnose
from torchobs.document.run import Options, document
from torchobs.flight.artifacts import PROFILE, STACKS, STUCK, ArtifactName, named
from torchobs.flight.reader import Distribution
from torchobs.ranks.rank_view import RankView

FLIGHT = f"r0-{0:032x}.flight"
ALIVE: dict[str, Any] = {"state": "alive", "reason": "", "up": True}


def left(kind: str, seconds: float = -START_S) -> ArtifactName:
    """A file written so many seconds after the start."""
    return named(FLIGHT, kind, round(1e3 * (START_S + seconds)))


def quiet(seconds: float, **given: Any) -> RankView:
    """A rank whose 201 steps took 0.1 s each, and that ended so many seconds after the last."""
    last_s, durations = START_S + 20.1, Distribution((0,) * 4 + (201,), 20.1, 0.1, 0.1)
    ended = {"phase": "other", "phase_begun_s": last_s, "last_s": last_s + seconds}
    return facts(steps(201), **{**ended, "values": {catalog.STEP_DURATION: durations}, **given})


def told(of: RankView) -> Finding:
    """What is said of it."""
    return next(one for one in diagnose(of) if one.kind in {"stalled", "left_loop", "lock_held"})


def test_a_rank_that_was_killed_while_it_stood_still_is_said_to_have() -> None:
    """How long, what is usual, the phase, and where the stacks are: those of before the last step are of something else."""
    hung = quiet(69.0, left=(left(STACKS, 5.0), left(STACKS, 85.0), left(PROFILE, 86.0)))
    found = told(hung)
    assert found.severity == ERROR
    assert found.long == (
        "No step ended in the last 1 min 9 s, where one usually took 100 ms: 1 min 9 s of it in the phase other. The stacks of "
        f"all its threads are in {left(STACKS, 85.0).name}, beside the flight file."
    )
    (made,) = document([hung], [], [], Options())["ranks"]
    assert made["stall"] == {
        "seconds": pytest.approx(69.0), "usual_step": 0.1, "phase": "other", "phase_seconds": pytest.approx(69.0), "hung": True,
        "lock_held": False, "stacks": [left(STACKS, 85.0).name], "frames": [], "long": True,
    }  # fmt: skip
    event = fact(catalog.EVENT_STACKS, 80.0, evidence="0123456789abcdef")
    assert "are in evidence 0123456789abcdef" in told(quiet(69.0, events=[event])).long, "a copy of the flight file alone"


@pytest.mark.parametrize(
    ("seconds", "given", "severity"),
    [
        (9.0, {}, None),
        (30.0, {}, WARNING),
        (30.0, {"state": "failed", "reason": "interrupted"}, WARNING),
        (600.0, {"state": "failed", "reason": "exception"}, ERROR),
        (600.0, {"phase": "evaluation"}, INFO),
        (600.0, {"state": "finished", "reason": "finished"}, None),
        (30.0, {**ALIVE, "standstill": Standstill(30.0, 0.1)}, WARNING),
        (30.0, {**ALIVE, "standstill": Standstill(30.0, 0.1, habitual=True)}, INFO),
        (30.0, ALIVE, None),
        (600.0, {**ALIVE, "phase": "evaluation"}, INFO),
        (69.0, {**ALIVE, "state": "hung"}, ERROR),
    ],
)
def test_what_is_long_and_how_bad_it_is(seconds: float, given: dict[str, Any], severity: str | None) -> None:
    """A slow batch is nothing, a time that nobody would call a hang yet is worth a look, an evaluation takes what it takes."""
    found = [one.severity for one in diagnose(quiet(seconds, **given)) if one.kind == "stalled"]
    assert found == ([severity] if severity else [])


def test_a_rank_that_held_the_lock_is_told_however_short_its_silence_seems() -> None:
    """Its heartbeat stopped with the lock."""
    found = told(quiet(0.5, left=(left(STUCK),)))
    assert (found.kind, found.severity) == ("lock_held", ERROR)
    assert left(STUCK).name in found.long


def test_a_wait_for_a_batch_names_the_worker_that_it_was_to_come_from() -> None:
    """With its state; in another phase the loader is not what was waited for."""
    state = "worker 1 (pid 20): sleeping in futex_do_wait"
    dumped = fact(catalog.EVENT_STACKS, 40.0, 201, cause="stalled", workers=[state], awaited="worker 1 (pid 20)")
    waiting = quiet(69.0, phase="data", events=[dumped], left=(left(STACKS, 40.0),))
    words = "The next batch was to come from the loader's worker 1 (pid 20), then sleeping in futex_do_wait"
    assert told(waiting).long.endswith(f"beside the flight file. {words}.")
    assert "worker" not in told(replace(waiting, phase="backward")).long


def test_before_the_first_step_only_half_an_hour_is_long() -> None:
    """Data are loaded, models compiled."""
    assert stall(facts(last_s=START_S + 1700, phase="data")) is None
    found = told(facts(last_s=START_S + 1900, phase="data", phase_begun_s=START_S))
    assert "No step ended in the last 31 min 40 s: 31 min 40 s of it in the phase data." in found.long


FRAMES = ("/usr/lib/python3.11/threading.py:320 in wait", "/home/me/train.py:33 in load", "/home/me/train.py:50 in <module>")


def test_stacks_that_a_rank_wrote_early_are_shown_if_it_ended_there() -> None:
    """However short that was: its steps take a second, so that twelve are no hang; the user's own line is named."""
    event = fact(catalog.EVENT_STACKS, 31.0, cause="stalled", evidence="0123456789abcdef")
    usual = [step._replace(duration_s=1.0) for step in steps(201)]
    for seconds, severity in ((12.0, INFO), (30.0, WARNING)):
        killed = replace(quiet(seconds, events=[event], left=(left(STACKS, 31.0),), frames=FRAMES), steps=tuple(usual))
        assert told(killed).severity == severity
        assert f"Its main thread was at {FRAMES[0]}, called at {FRAMES[1]}." in told(killed).long
    went_on = quiet(1.0, events=[fact(catalog.EVENT_STACKS, 10.0, cause="stalled")], left=(left(STACKS, 10.0),))
    assert stall(went_on) is None


def living(seconds: float, **given: Any) -> RankView:
    """A living rank that stands still."""
    return quiet(seconds, **{**ALIVE, "standstill": Standstill(seconds, 0.1), "pace": PACE, **given})


def test_a_run_that_stands_still_is_not_all_well_and_has_no_speed() -> None:
    """In the report and its JSON, as on the page; ranks that wait for one that evaluates are not reported."""
    made = document([living(45.0)], [], [], Options())
    assert made["health"]["level"] == "warning"
    assert made["health"]["text"].startswith("No step for 45 s (usual: 100 ms): 1 of 2 ranks alive, step 201")
    assert made["ranks"][0]["speed"] is None
    assert document([quiet(0.1, **ALIVE, pace=PACE)], [], [], Options())["ranks"][0]["speed"]
    evaluates = living(45.0, phase="evaluation", standstill=None, resource={"rank": 1})
    known = diagnose_run([living(45.0), evaluates])
    assert known.health.headline.startswith("Evaluating: 2 of 2 ranks alive")
    assert "stalled" not in [finding.kind for finding in known.by_rank[0]]
    assert (known.verdict.severity, known.verdict.values["badge"]) == (INFO, "No steps now")
