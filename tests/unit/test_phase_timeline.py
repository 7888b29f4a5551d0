"""The phases of a step, from its boundaries, and with an evaluation in between."""

from __future__ import annotations

import pytest

from tests.support import for_each
from tests.timelines import Timeline, evaluate, one_step, spent, times
from torchobs.probes import timeline as codes


@pytest.fixture(autouse=True, params=[False, True], ids=["whole", "squeezed"])
def _squeezes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is the same of a step that is so long that its trace is gone through early."""
    monkeypatch.setattr(Timeline, "squeezes", request.param)


WHOLE = "data 10, forward 30, backward 40, other 5, optimizer 15"
"""What `one_step` takes"""
STEPS: dict[str, tuple[tuple[str, int, str], ...]] = {
    # an environment's steps and batches by a plain function cannot be told from the forward pass
    "without a loader the time before the backward is between": (
        ("", 10, "other 10"),
        ("B@50 b@70", 75, "between 40, backward 20, other 5"),
    ),
    "a phase that was named data has its forward passes behind it": (
        ("Pdata@0 U@500 B@530 b@550", 550, "data 500, forward 30, backward 20"),
        ("B@580", 590, "forward 30, backward 10"),
    ),
    "and so has a rollout": (
        ("Pother@0 U@500 B@530 b@550", 550, "other 500, forward 30, backward 20"),
        ("B@580", 590, "forward 30, backward 10"),
    ),
    "several fetches of the training loader are a prefetch": (
        ("F1@0-10 F1@12-22 F1@24-34 B@50 b@70 B@100 b@120 B@150 b@170", 170, "data 30, forward 76, backward 60, other 4"),
    ),
    # Accelerate's loader asks for one batch more than it gives: at an epoch's end there is none, and then comes a backward
    "a prefetch that exhausts the loader is data too": (
        ("F1@0-100 F1@101-201 F1@202-302 F1@303-304x B@344", 360, "data 301, forward 40, backward 16, other 3"),
    ),
    # inside a phase no hook changes anything; after data comes forward, after anything else other
    "what the user names is that": (
        (
            "Pdata@10 F1@15-20 B@25 U@60 O@80 Pcheckpoint@90 U@190",
            200,
            "other 20, data 50, forward 20, optimizer 10, checkpoint 100",
        ),
    ),
    # after the first optimizer there is no fetch: the time before the second backward is its forward
    "a GAN has a forward before each backward": (
        ("F1@0-10 B@30 b@50 O@50 b@60 B@90 b@100", 100, "data 10, forward 50, backward 30, optimizer 10"),
    ),
    "a compilation interrupts the forward pass": (
        ("F1@0-10 Pcompile@20 U@4020 B@4040 b@4080", 4085, "data 10, forward 30, backward 40, other 5, compile 4000"),
    ),
    "also without a loader": (("Pcompile@20 U@4020 B@4040 b@4080", 4085, "between 40, backward 40, other 5, compile 4000"),),
    # tracing may call what is hooked, and a backend may name a phase
    "what hooks see within a compilation is the compilation": (
        ("Pcompile@10 B@20 b@30 Pcheckpoint@40 U@50 U@110 B@130", 130, "between 30, compile 100"),
    ),
    # unlabelled batches beside a labelled one; in the first step it may be an evaluation, which is not known yet
    "a loader with several batches of each step is trained on": (
        ("F11@0-10 F11@10-20 F22@20-30 B@40", 60, "data 10, forward 10, backward 20, evaluation 20"),
        ("F11@60-70 F11@70-80 F22@80-90 B@100", 120, "data 30, forward 10, backward 20"),
    ),
    "another loader's fetches with no backward behind them are an evaluation, the exhausted one too": (
        ("F2@0-10 F2@100-110 F2@200-210 F2@300-305x F1@310-320 B@350 b@390 O@395", 410, f"{WHOLE}, evaluation 310"),
    ),
    "fetches without gradients are evaluation at once, the loader may be the training one": (
        ("F1@0-10n F1@100-105xn", 105, "evaluation 105"),
    ),
    "a backward before train() was no evaluation, nor what another module's train() ends": (
        ("E7@0 F1@0-10 B@40 b@80 O@85 T7@100", 100, WHOLE),
        ("E8@100 T9@150", 150, "other 50"),
    ),
    # saving the best model before train() is called again is not evaluation
    "a checkpoint within an evaluation is a checkpoint": (
        ("E7@0 Pcheckpoint@50 U@80 T7@100 F1@100-110 B@140 b@180 O@185", 200, f"{WHOLE}, evaluation 70, checkpoint 30"),
    ),
}


@for_each({name: (rounds,) for name, rounds in STEPS.items()})
def test_where_the_time_of_a_step_went(rounds: tuple[tuple[str, int, str], ...]) -> None:
    """As the case says; see `Timeline.note` for how boundaries are written."""
    timeline = Timeline()
    timeline.close(0)
    for boundaries, end, expected in rounds:
        timeline.note(boundaries)
        assert spent(timeline, end) == times(expected)


def trained() -> Timeline:
    """A timeline after a first step, which ended at 100."""
    timeline = Timeline()
    timeline.close(one_step(timeline, 0))
    return timeline


def test_a_rollout_in_eval_mode_is_no_evaluation() -> None:
    """Many agents act in eval() mode: the name counts, and so it does for what is around it there."""
    timeline = Timeline()
    timeline.close(0)
    timeline.note("E7@10 Pother@20 U@500 T7@510 B@530")
    assert spent(timeline, 540) == times("other 500, forward 30, backward 10")
    assert not timeline.evaluations


@pytest.mark.parametrize("use", [0, 50])
@pytest.mark.parametrize("count", [1, 2])
def test_loaders_fetched_side_by_side_are_one_step_s_data(count: int, use: int) -> None:
    """``zip(labelled, unlabelled)``, from the first step on, however long the one's batch is used before the other's fetch."""
    timeline, at = Timeline(), 0
    for _ in range(count):
        for loader in (2, 1):
            timeline.fetch(loader, at, at + 10)
            at += 10 + use
    timeline.mark(codes.BACKWARD_BEGINS, at + 30)
    phases = spent(timeline, at + 30)
    assert (phases["data"], sum(phases.values()), "evaluation" in phases) == (20 * count, at + 30, False)


def test_an_evaluation_has_ended_where_training_fetches_before_it_calls_train() -> None:
    """As in trainers that call ``train()`` in the training step, with the batch in hand: the fetch is the step's data."""
    timeline = trained()
    timeline.note("E7@100")
    assert evaluate(timeline, 2, 110) == 235
    timeline.note("F1@240-250 T7@255 B@280")
    assert spent(timeline, 300) == times("evaluation 140, data 10, forward 30, backward 20")
    assert timeline.evaluations == [(100, 240)]


def test_an_evaluation_has_ended_where_training_goes_on_without_train() -> None:
    """A model that is trained in ``eval()``, its normalisation frozen."""
    timeline = trained()
    timeline.note("E7@100")
    end = one_step(timeline, evaluate(timeline, 2, 110) + 5)
    assert spent(timeline, end) == times(f"{WHOLE}, evaluation 140")
    assert timeline.evaluations == [(100, 240)]


def test_a_look_at_a_long_evaluation_changes_nothing() -> None:
    """What is known of it so far, by a snapshot; the timeline goes on as if nobody had looked."""
    timeline = trained()
    timeline.note("E7@100 F2@110-120")
    phases, idle = timeline.state().close_early(1100, 50)
    assert (phases[codes.EVALUATION], sum(phases), idle) == (1000, 1000, 0)
    timeline.note("T7@1200")
    assert spent(timeline, 1200) == times("evaluation 1100")


def test_nothing_seen_for_long_is_idle() -> None:
    """After the last step, and behind the end of an evaluation's loader; not while a batch is waited for."""
    timeline = trained()
    assert [timeline.state().close_early(at, 50)[1] for at in (149, 200)] == [0, 100]
    timeline.note("E7@200")
    end = evaluate(timeline, 2, 200)
    phases, idle = timeline.state().close_early(end + 75, 50)
    assert (phases[codes.EVALUATION], phases[codes.OTHER], idle) == (end - 200, 175, 75)
    timeline.mark(codes.FETCH, end + 80, 1)
    assert timeline.state().close_early(end + 1000, 50)[1] == 0


@pytest.mark.parametrize(("loader", "rest", "data"), [(1, 2, 2), (1, 300, 2), (2, 2, 0)])
def test_a_batch_before_the_loader_s_end_is_trained_on_however_long_that_took(loader: int, rest: int, data: int) -> None:
    """As many as the last step took from that pass are no evaluation: the process was held up. Another loader's may be one."""
    timeline = trained()
    timeline.note("E7@100")
    end = evaluate(timeline, 3, 110)
    over = end + rest + 10
    timeline.note(f"F{loader}@{end}-{end + 1} F{loader}@{end + 1 + rest}-{end + 2 + rest}x T7@{over} B@{over + 30}")
    phases = spent(timeline, over + 50)
    assert (phases.get("data", 0), sum(phases.values())) == (data, over + 50 - 100)
    assert phases["evaluation"] == (end if data else over) - 100


def test_an_evaluation_is_told_while_it_lasts() -> None:
    """By eval(), until its loader has come to its end; or by a fetch without gradients, with what follows it."""
    timeline = Timeline()
    timeline.close(0)
    for boundaries, since in (
        *(("", 0), ("E7@10", 10), ("F2@20-30", 10), ("F2@60-70x", 0)),
        *(("T7@200", 0), ("F2@300-310n", 300), ("F2@400-410xn", 0)),
    ):
        timeline.note(boundaries)
        assert timeline.state().evaluating_since() == since, boundaries


def test_a_teacher_in_eval_mode_is_learned() -> None:
    """Whoever was in eval() when a backward came is no evaluation the next time, unless it turns out to be one."""
    timeline = Timeline()
    timeline.close(0)
    timeline.note("E7@10 B@100")
    timeline.close(150)
    timeline.note("E7@160")
    assert timeline.state().evaluating_since() == 0
    assert timeline.state().close_early(1_000, 10_000)[0][codes.EVALUATION] == 0
    timeline.note("T7@300 E7@400")
    assert timeline.state().evaluating_since() == 400
    assert timeline.state().close_early(1_000, 10_000)[0][codes.EVALUATION] == 140 + 600


@pytest.mark.parametrize("modes", ["", "T7@1000 E7@1000"])
def test_before_anything_was_trained_an_evaluation_begins_with_a_fetch(modes: str) -> None:
    """A model that was loaded, and a teacher, are in eval() while data is prepared; a sanity check fetches."""
    timeline = Timeline()
    timeline.note("E7@10")
    assert timeline.state().evaluating_since() == 0
    assert timeline.state().close_early(1_000, 10_000)[0][codes.EVALUATION] == 0
    timeline.note(modes)
    assert evaluate(timeline, 2, 2_000) == 2_125
    timeline.note("T7@2200")
    assert spent(timeline, 2_300) == times("evaluation 200, other 100")
