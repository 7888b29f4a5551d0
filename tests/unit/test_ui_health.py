"""The live page's words about a run's health and its resources."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.diagnosis_files import Values, fact, row, run, step
from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.cli.top import screen
from torchobs.detect.growth import NEAR_S
from torchobs.detect.hangs import Standstill
from torchobs.detect.learning import ZeroRate
from torchobs.detect.speed import SLOW, Slowness
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.from_events import from_events
from torchobs.diagnosis.health import health
from torchobs.document.live import health_beside
from torchobs.document.text import TerminalStyle
from torchobs.flight import events as flight_events
from torchobs.ranks.events import Events
from torchobs.ranks.live import METRICS
from torchobs.ranks.rank_view import RankView
from torchobs.ranks.snapshot import Readings

EIGHT = [row(rank) for rank in range(8)]
TWIN = replace(EIGHT[0], rank=f"0-{EIGHT[0].incarnation[:8]}")


def training(alive: int) -> str:
    """How it begins for a run that is under way."""
    return f"Training: {alive} of 8 ranks alive, step 12,400, loss 2.313, 1.90 steps/s. "


def but(*others: RankView) -> list[RankView]:
    """Eight ranks; some of them are otherwise."""
    changed = {other.rank: other for other in others}
    return [changed.get(rank.rank, rank) for rank in EIGHT]


def saves(failed: int, last: int) -> Values:
    """Saves that raised, and those of them since the last that succeeded."""
    return {catalog.CHECKPOINTS.name: {("failed",): failed}, catalog.CHECKPOINT_FAILURE_STREAK.name: {(): last}}


def anomalies(**counts: int) -> Values:
    """The values of a rank that has had so many of each kind."""
    return {"torchobs.anomalies": {(kind,): float(number) for kind, number in counts.items()}}


def finished(rank: int = 0, **changes: Any) -> RankView:
    """A rank that has ended in order."""
    return row(rank, "finished", reason="finished", **changes)


def waited(data_s: float, rest_s: float) -> Values:
    """The values of a rank with steps that took so long in all."""
    return {"torchobs.step.phase.time": {("data",): data_s, ("forward",): rest_s}}


def skips(streak: float, scale: float) -> Values:
    """The values of a rank with a scaler that has skipped so many steps in a row."""
    return {catalog.AMP_SKIP_STREAK.name: {(): streak}, catalog.AMP_SCALE.name: {("0",): scale}}


def grows(left_s: float) -> Values:
    """The values of a rank with memory that is full after so long."""
    return {catalog.MEMORY_TIME_TO_LIMIT.name: {("host",): left_s}}


def gpu(state: str) -> Values:
    """The values of a rank with a GPU in that state."""
    return {catalog.HW_STATUS.name: {("GPU-1", "gpu", status): float(status == state) for status in catalog.HW_STATE.values}}


SCALED = {**anomalies(nonfinite_gradient=4), "torchobs.amp.steps_skipped": {(): 4.0}}
RATE = {"zero_rate": ZeroRate(12_361, 40, is_begun_before=False)}
SPIKES = {"loss_spike": 5, "gradient_explosion": 2}
LATELY = {catalog.EVENT_WORKER_DIED.name: 1}
DIED: Values = {catalog.DATA_WORKERS_DIED.name: {(): 2.0}}
WELL = "1.90 steps/s."
"""Nothing more is said."""
INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR


def told(event: catalog.Event, **attributes: Any) -> flight_events.Event:
    """An event."""
    return flight_events.Event(event.name, 10**9, 3, attributes)


def kinds(*events: flight_events.Event) -> set[str]:
    """The kinds of findings that they make."""
    return set(from_events(Events(events)))


def test_a_mistake_that_is_taken_back_is_none() -> None:
    """By a later event about no parameter; of the kinds that there are, whatever a file holds."""
    stopped, again = (told(catalog.EVENT_LOOP_MISTAKE, kind="same_order", parameters_affected=n) for n in (4, 0))
    kept = told(catalog.EVENT_LOOP_MISTAKE, kind="gradients_kept")
    assert kinds(kept, stopped) == {"gradients_kept", "same_order"}
    assert kinds(kept, stopped, again) == {"gradients_kept"}
    odd = [
        told(event, kind=kind)
        for event in (catalog.EVENT_LOOP_MISTAKE, catalog.EVENT_SCHEDULER_MISUSED)
        for kind in ("x", ["y"])
    ]
    assert kinds(*odd) == set()
    left, back = (told(catalog.EVENT_LEFT_OUT_PARAMETERS, parameters=["a"], parameters_affected=n) for n in (2, 0))
    assert kinds(left, left) == {"left_out"}
    assert kinds(left, back) == set()


def test_what_is_said_of_a_run() -> None:
    """Of ranks as they are, the most serious first; what is ordinary, or past, is no reason to worry."""
    cases: list[tuple[list[RankView], str, Severity]] = [
        (EIGHT, "Training: 8 of 8 ranks alive, step 12,400, loss 2.313, 1.90 steps/s.", INFO),
        ([row(0, steps=0, loss=None)], "Running: 1 of 1 rank alive, no step yet.", INFO),
        ([row(0, phase="backward", age_s=900)], "Training: 1 of 1 rank alive, step 12,400, loss 2.313.", INFO),
        ([row(0, phase="evaluation")], "Evaluating: 1 of 1 rank alive, step 12,400, loss 2.313, 1.90 steps/s.", INFO),
        ([row(0, phase="idle")], "After its training loop: 1 of 1 rank alive, step 12,400, loss 2.313.", INFO),
        ([finished(0), finished(1)], "Finished: 2 ranks, 12,400 steps, last loss 2.313.", INFO),
        (but(row(2, "lost", reason="out_of_memory", age_s=40)), training(7) + "Rank 2 vanished with memory full.", ERROR),
        (
            [row(rank, "lost", reason="lost", age_s=100 + rank) for rank in range(6)],
            "last loss 2.313. Ranks 0, 1, 2, 3 and 2 more vanished without a word.", ERROR,
        ),
        (but(row(5, "failed", reason="exception", age_s=7_300)), training(7) + "Rank 5 failed.", ERROR),
        (but(row(3, "hung", age_s=320), row(4, "hung", age_s=300)), training(8) + "Ranks 3 and 4 hang.", ERROR),
        (
            [row(rank, "hung", age_s=300, still=Standstill(300, 0.057)) for rank in (0, 1)],
            "Hanging, no step for 5 min: 2 of 2 ranks alive, step 12,400, loss 2.313. Ranks 0 and 1 hang.", ERROR,
        ),
        (but(row(6, "unresponsive", age_s=12)), training(7) + "Rank 6 does not respond.", ERROR),
        (
            [row(0, age_s=45), row(1, age_s=46, still=Standstill(46, 0.057))],
            "No step for 46 s (usual: 57 ms): 2 of 2 ranks alive, step 12,400, loss 2.313.", WARNING,
        ),
        (
            but(row(3, age_s=45, still=Standstill(45, 0.057))),
            "No step on rank 3 for 45 s (usual: 57 ms): 8 of 8 ranks alive, step 12,400, loss 2.313.", WARNING,
        ),
        (
            [row(0, age_s=45, still=Standstill(45, 0.057, habitual=True))],
            "No step for 45 s (usual: 57 ms; it paused as long before): 1 of 1 rank alive, step 12,400, loss 2.313.", INFO,
        ),
        (
            [row(0, phase="evaluation"), *(row(rank, age_s=45, still=Standstill(45, 0.057)) for rank in range(1, 4))],
            "Evaluating: 4 of 4 ranks alive, step 12,400, loss 2.313, 1.90 steps/s.", INFO,
        ),
        ([row(0, recorded=False)], "loss 2.313. Rank 0 does not record steps: recording is switched off.", WARNING),
        (
            but(row(3, slow=Slowness(1.42, 0)), row(5, slow=Slowness(1.3, 1)), row(6, slow=Slowness(1.4, 1))),
            "Rank 3 is 1.4 times as slow as the others, in the phase data.", WARNING,
        ),
        ([row(0), row(1, slow=Slowness(SLOW - 0.01, 0))], WELL, INFO),  # somebody is always the slowest
        ([row(0, values=saves(failed=3, last=2))], "Checkpoints cannot be saved.", ERROR),
        ([row(0, values=saves(failed=3, last=0))], "Checkpoints could not be saved for a time.", INFO),
        ([row(0, values={catalog.GRAD_UNMOVED_LAYERS.name: {(): 12.0}})], "12 layers learn nothing.", WARNING),
        ([row(0, anomalies=("gradient_explosion",))], f"{WELL} Gradients explode.", WARNING),
        # one of a run without a step is none after one
        (
            [row(rank, mistakes=("gradients_kept", "never_stepped")) for rank in range(8)],
            "before it. Call optimizer.zero_grad() in each step.", WARNING,
        ),
        ([row(0, mistakes=("never_stepped",), steps=0, loss=None)], "no step of the optimizer.", WARNING),
        ([row(derived=RATE), row(1, derived=RATE)], "The learning rate is 0 from step 12,361 on.", WARNING),
        # anomalies: of a run that ended, lately as long as the alert fires, and past
        ([finished(values=anomalies(loss_spike=4, gradient_explosion=3))], " and 4 loss spikes.", WARNING),
        ([finished(values=anomalies(loss_spike=4))], "There have been 4 loss spikes.", INFO),
        ([row(0, values=anomalies(loss_spike=7))], "Earlier: 7 loss spikes.", INFO),
        (
            [row(0, values=anomalies(**SPIKES), derived={"lately": SPIKES})],
            "Lately: 2 gradient explosions and 5 loss spikes.", WARNING,
        ),
        ([row(0, values=anomalies(loss_spike=9), derived={"lately": {"loss_spike": 4}})], "Earlier: 9 loss spikes.", INFO),
        ([row(0, anomalies=("loss_spike",), values=anomalies(loss_spike=7))], "steps/s. The loss has jumped.", WARNING),
        # a loss scaler raises its scale until gradients are not finite
        ([finished(values=SCALED)], "last loss 2.313.", INFO),
        # the loss that is shown is that of the first rank that has any
        ([row(0, anomalies=("nonfinite_loss",))], f"loss NaN, {WELL} The loss is not finite.", ERROR),
        ([row(0), row(1, anomalies=("nonfinite_loss",))], f"loss 2.313, {WELL} The loss is not finite on rank 1.", ERROR),
        ([finished(derived={"steps": (step(12_400, math.inf),)})], "last loss Inf. The loss is not finite.", ERROR),
        # waiting for data: by the rank's verdict of a minute; a short run, and one that is over, by their totals
        ([row(0, values={"torchobs.data.starved": {(): 1.0}}), row(1)], "Training waits for its data on rank 0.", WARNING),
        ([finished(values=waited(83.0, 17.0))], "Training waited for its data: 83 % of the time of its steps.", WARNING),
        ([row(0, values={**waited(83.0, 17.0), "torchobs.data.starved": {(): 0.0}})], WELL, INFO),
        ([finished(values=waited(4.0, 4.0))], "last loss 2.313.", INFO),  # a single step that starts the workers
        ([row(0, values={"torchobs.probe.disabled": {("loss",): 1.0}})], "These probes failed and are off: loss.", WARNING),
        # ends by a person, or a scheduler; one rank's is a failure of a run that goes on
        *(
            (
                [row(0, "failed", reason="interrupted", ran_s=192), row(1, state, reason=other, ran_s=190)],
                "Interrupted by Ctrl-C after 3 min 12 s: 2 ranks, 12,400 steps, last loss 2.313.", INFO,
            )
            for state, other in (("failed", "interrupted"), ("failed", "terminated"), ("finished", "finished"))
        ),
        ([row(rank, "failed", reason="terminated", age_s=3) for rank in (0, 1)], "Ranks 0 and 1 were terminated.", WARNING),
        *(([row(0, "failed", reason=reason, age_s=3), row(1)], "", ERROR) for reason in ("terminated", "interrupted")),
        # what an alert is about, and its healthy twins
        ([row(0, values=skips(40, 0.5))], "it is lowered, and the step skipped, whenever gradients are not finite.", ERROR),
        ([row(0, values=skips(20, 1.0))], "The loss scaler skips every step: nothing is learned.", WARNING),
        ([row(0, values=skips(19, 0.5))], WELL, INFO),
        ([row(0, values=skips(30, 4.0))], WELL, INFO),
        ([row(0), row(1, values=grows(3600.0))], "Host memory grows on rank 1, and is full in about 1 h.", WARNING),
        ([row(0, values=grows(NEAR_S + 1))], WELL, INFO),
        ([EIGHT[0], TWIN], "Several trainings are rank 0 of this run.", WARNING),
        ([finished(values=grows(3600.0))], "last loss 2.313. Host memory grew.", WARNING),
        ([row(0, values=gpu("failed"))], "1 GPU has failed: GPU-1.", ERROR),
        ([row(0, values=gpu("degraded"))], WELL, INFO),
        ([row(0, values=DIED)], "Earlier: 2 workers of a data loader died.", INFO),
        ([row(0), row(1, values=DIED, derived={"lately": LATELY})], "2 workers of a data loader died on rank 1.", WARNING),
        ([finished(values=DIED, derived={"lately": LATELY})], " 2 workers of a data loader died.", INFO),
    ]  # fmt: skip
    for rows, said, level in cases:
        verdict = health(run(*rows))
        assert (verdict.text[-len(said) :] if said else "", verdict.level) == (said, level)


def test_it_is_all_well_only_of_a_run_that_trains_or_has_finished() -> None:
    """Never of one that stands still, for whatever reason, or does not record."""
    cases: list[tuple[list[RankView], str]] = [
        (EIGHT, "All well"),
        ([row(0, steps=0, loss=None)], "No steps now"),
        ([row(0, phase="evaluation")], "No steps now"),
        ([row(0, age_s=45, still=Standstill(45, 0.057, habitual=True))], "No steps now"),
        ([row(0, age_s=45, still=Standstill(45, 0.057))], "Worth a look"),
        ([row(0, recorded=False)], "Worth a look"),
        ([row(0, "unresponsive", age_s=12)], "Trouble"),
        ([row(0, "failed", reason="interrupted", ran_s=192)], "Ended"),
    ]
    for rows, badge in cases:
        assert health(run(*rows)).badge == badge


def test_ranks_that_have_not_appeared_are_missed() -> None:
    """On a node of a larger run only its own are."""
    verdict = health(run(*EIGHT[:6], expected=8, world_size=64))
    assert verdict.text.startswith("Training: 6 of 8 ranks alive on this node, 64 in all, step 12,400")
    assert verdict.text.endswith("2 ranks have not appeared.")
    assert verdict.level is Severity.WARNING


def test_the_most_serious_comes_first() -> None:
    """A dead rank before a slow one."""
    verdict = health(run(*but(row(1, slow=Slowness(3.0, 1)), row(7, "lost", reason="lost", age_s=3))))
    assert verdict.text.index("Rank 7 vanished") < verdict.text.index("Rank 1 is 3 times as slow")


def test_what_is_read_aloud_does_not_change_with_every_step() -> None:
    """A screen reader would never come to an end."""
    before, after = (health(run(row(0, steps=steps, loss=loss))).gist for steps, loss in ((10, 3.0), (11, 2.9)))
    assert before == after == "Training, 1 of 1 rank alive."
    lost = (health(run(row(0), row(1, "lost", reason="lost", age_s=age))).gist for age in (4, 5))
    assert set(lost) == {"Training, 1 of 2 ranks alive. Rank 1 vanished without a word."}


def test_what_is_not_finite_now_is_said_to_be_so_since_its_first_step() -> None:
    """Of many such steps in a row only the first have an event, so that the newest event is neither end of them."""
    kinds = "nonfinite_loss", "nonfinite_gradient"
    events = [fact(catalog.EVENT_ANOMALY, 9, 91, kind=kind) for kind in kinds]
    history = tuple(step(number, *(math.nan if number >= 60 else 2.0,) * 2) for number in range(1, 804))
    later = row(anomalies=kinds, events=events, derived={"steps": history})
    text = health(run(later)).text
    assert "The loss has not been finite since step 60." in text
    assert "Gradients have not been finite since step 60." in text
    gone = row(1, anomalies=kinds, events=events, derived={"steps": history[100:]})
    text = health(run(gone)).text
    assert "The loss is not finite." in text  # how it began is gone
    assert " since " not in health(run(later, gone)).text  # on one of two ranks, which may have been the first
    rarely = tuple(one._replace(grad_norm=one.grad_norm if one.step % 50 == 1 else None) for one in history)
    text = health(run(row(anomalies=kinds, events=events, derived={"steps": rarely}))).text
    assert "Gradients have not been finite since step 60." in text  # a lost loss has no other
    sqrt = fact(catalog.EVENT_NONFINITE_ORIGIN, 6, 59, origin="backward", operator="sqrt")
    text = health(run(row(anomalies=kinds, events=[*events, sqrt], derived={"steps": rarely}))).text
    assert "Gradients have not been finite since step 59." in text  # the loss was lost by their derivative


def test_gradients_of_a_step_that_did_not_end_are_one() -> None:
    """They have an event, and no step to be counted with."""
    seen = fact(catalog.EVENT_NONFINITE_GRADIENT, 9, 12_401, kinds=["inf"], layers=["out"], layers_affected=1, measured=False)
    ended = row(0, "failed", reason="exception", events=[seen])
    assert health(run(ended)).text.endswith(" There has been 1 gradient found not finite.")


def test_what_follows_spikes_on_a_higher_level_is_no_recovery() -> None:
    """Each spike has raised the baseline that the next one is compared with."""
    events = [fact(catalog.EVENT_ANOMALY, 5, 50 + at, kind="loss_spike", baseline=1.0 + at) for at in range(0, 40, 5)]
    for loss, said in ((1.1, "Past: 8 loss spikes"), (20.0, "Earlier: 8 loss spikes")):
        derived = {"steps": tuple(step(number, loss) for number in range(1, 200)), "lately": {}}
        assert said in health(run(row(events=events, values=anomalies(loss_spike=8), derived=derived))).text


def test_what_a_run_has_recovered_from_is_past_while_it_runs_and_after() -> None:
    """On all ranks, with the least number of healthy steps; also of what the alert still fires for."""
    values, lately = anomalies(nonfinite_loss=1, loss_spike=20), {"nonfinite_loss": 1, "loss_spike": 20}
    both = {"nonfinite_loss": 60, "loss_spike": 75}
    for state, reason in (("alive", ""), ("finished", "finished")):

        def of(number: int, past: dict[str, int], state: str = state, reason: str = reason) -> RankView:
            return row(number, state, reason=reason, values=values, derived={"lately": lately, "past": past})

        verdict = health(run(of(0, both), of(1, both)))
        said = "Past: 1 loss that was not finite and 20 loss spikes; the last 60 steps were healthy."
        assert (verdict.text.endswith(said), verdict.level) == (True, Severity.INFO)
        partly = health(run(of(0, {"loss_spike": 75}), of(1, both)))
        assert "1 loss that was not finite. Past: 20 loss spikes; the last 75 steps were healthy." in partly.text
        assert partly.level is Severity.WARNING


def slowed(number: int) -> dict[str, Any]:
    """A step; the last ones are slow."""
    took_s = 0.1 if number < 600 else 0.5
    return {"duration_s": took_s, "phase_s": {"forward": took_s}}


SLOWED = tuple(step(number, **slowed(number)) for number in range(1, 640))
AMP: Values = {**anomalies(nonfinite_gradient=1), catalog.AMP_SCALE.name: {("0",): 4096.0}}


@pytest.mark.parametrize(
    ("rank", "level", "badge"),
    [
        (row(derived={"steps": SLOWED}, steps=639), WARNING, "Worth a look"),
        (row(values=anomalies(loss_spike=9), events=[fact(catalog.EVENT_ANOMALY, 9, 91, kind="loss_spike")]), INFO, "All well"),
        (row(values=AMP, anomalies=("nonfinite_gradient",)), INFO, "All well"),
        (row(values={catalog.AMP_STEPS_SKIPPED.name: {(): 2.0}, catalog.STEPS.name: {(): 20.0}}), INFO, "All well"),
        (row(values={catalog.AMP_STEPS_SKIPPED.name: {(): 26.0}, catalog.STEPS.name: {(): 500.0}}), WARNING, "Worth a look"),
    ],
    ids=["slow", "spikes of long ago", "a scaler that searches", "a scaler at its start", "a scaler that skips"],
)
def test_page_and_report_judge_a_rank_alike(rank: RankView, level: Severity, badge: str) -> None:
    """Of the same findings: what is worth a look in one is in the other."""
    diagnosis = diagnose_run([rank])
    assert (diagnosis.health.level, diagnosis.health.badge) == (level, badge)
    assert (diagnosis.verdict.severity, diagnosis.verdict.values["badge"]) == (level.name.lower(), badge)
    assert all(finding.severity == "info" for finding in diagnosis.by_rank[0]) == (level is INFO)


def test_the_page_reads_all_that_a_status_is_made_of() -> None:
    """A value that it did not read would be missing on the page alone, without a word."""
    asked: set[str] = set()

    class Asking(Readings):
        __slots__ = ()

        def values(self, metric: catalog.Metric) -> dict[tuple[str, ...], float]:
            asked.add(metric.name)
            return super().values(metric)

        def get(self, metric: catalog.Metric, *key: str) -> float | None:
            return self.values(metric).get(key)

    values: Values = {catalog.STEPS.name: {(): 3.0}, catalog.AMP_SKIP_STREAK.name: {(): 40.0}}
    for rank in (row(0), finished(0)):
        view = run(replace(rank, readings=Asking(values)))
        health(view)
        screen([view], TerminalStyle(200), 40)
    assert asked <= {metric.name for metric in METRICS}


def test_a_run_that_failed_beside_this_one_is_worth_a_look() -> None:
    """The headline is what a tab in the background shows."""
    well = run(row(0))
    failed = run(row(0, "failed", reason="exception", run_id="run-2"))
    verdict = health_beside(well, [well, failed])
    assert verdict.text.endswith("Another run here is in trouble: gpt run-2.")
    assert verdict.level is Severity.WARNING
    assert health_beside(well, [well]).level is Severity.INFO


def test_when_a_worker_died_is_known_from_its_event() -> None:
    """For ten minutes."""
    died = fact(catalog.EVENT_WORKER_DIED, 9.0, 90, pid=77)
    assert Events((died,)).lately(died.time_s + 60.0) == LATELY
    assert not Events((died,)).lately(died.time_s + 700.0)
