"""The phases of a step, from its boundaries, and with an evaluation in between."""

from __future__ import annotations

import pytest

from tests.timelines import ORDER, Timeline, evaluate, one_step, spent
from torchobs.probes import timeline as codes


@pytest.fixture(autouse=True, params=[False, True], ids=["whole", "squeezed"])
def _squeezes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is the same of a step that is so long that its trace is gone through early."""
    monkeypatch.setattr(Timeline, "squeezes", request.param)


def test_without_a_loader_the_time_before_backward_is_between() -> None:
    """An environment's steps and batches by a plain function cannot be told from the forward pass."""
    timeline = Timeline()
    timeline.close(10)
    timeline.mark(codes.BACKWARD_BEGINS, 50)
    timeline.mark(codes.BACKWARD_ENDS, 70)
    assert spent(timeline, 75) == {"between": 40, "backward": 20, "other": 5}


@pytest.mark.parametrize("named", [codes.DATA, codes.OTHER])
def test_what_was_named_data_or_a_rollout_has_its_forward_passes_behind_it(named: int) -> None:
    """From its end to the backward, and before every further backward on the same data."""
    timeline = Timeline()
    timeline.close(0)
    timeline.mark(codes.PIN, 0, named)
    timeline.mark(codes.UNPIN, 500)
    timeline.mark(codes.BACKWARD_BEGINS, 530)
    timeline.mark(codes.BACKWARD_ENDS, 550)
    assert spent(timeline, 550) == {ORDER[named]: 500, "forward": 30, "backward": 20}
    timeline.mark(codes.BACKWARD_BEGINS, 580)
    assert spent(timeline, 590) == {"forward": 30, "backward": 10}


def test_several_fetches_of_the_training_loader_are_a_prefetch() -> None:
    """All batches of an accumulation first: every fetch is data."""
    timeline = Timeline()
    timeline.close(0)
    for at in (0, 12, 24):
        timeline.fetch(1, at, at + 10)
    for at in (50, 100, 150):
        timeline.mark(codes.BACKWARD_BEGINS, at)
        timeline.mark(codes.BACKWARD_ENDS, at + 20)
    assert spent(timeline, 170) == {"data": 30, "forward": 16 + 30 + 30, "backward": 60, "other": 4}


def test_a_prefetch_that_exhausts_the_loader_is_data_too() -> None:
    """Accelerate's loader asks for one batch more than it gives: at an epoch's end there is none, and then comes a backward."""
    timeline = Timeline()
    timeline.close(0)
    for start in (0, 101, 202):
        timeline.fetch(1, start, start + 100)
    timeline.fetch(1, 303, 304, exhausted=True)
    timeline.mark(codes.BACKWARD_BEGINS, 344)
    assert spent(timeline, 360) == {"data": 301, "forward": 40, "backward": 16, "other": 3}


def test_what_the_user_names_is_that() -> None:
    """Inside a phase no hook changes anything; after data comes forward, after anything else other."""
    timeline = Timeline()
    timeline.close(0)
    timeline.mark(codes.PIN, 10, codes.DATA)
    timeline.fetch(1, 15, 20)
    timeline.mark(codes.BACKWARD_BEGINS, 25)
    timeline.mark(codes.UNPIN, 60)
    timeline.mark(codes.STEP_BEGINS, 80)
    timeline.mark(codes.PIN, 90, codes.CHECKPOINT)
    timeline.mark(codes.UNPIN, 190)
    assert spent(timeline, 200) == {"other": 20, "data": 50, "forward": 20, "optimizer": 10, "checkpoint": 100}


def test_a_gan_has_forward_before_each_backward() -> None:
    """After the first optimizer there is no fetch: the time before the second backward is its forward."""
    timeline = Timeline()
    timeline.fetch(1, 0, 10)
    timeline.mark(codes.BACKWARD_BEGINS, 30)
    timeline.mark(codes.BACKWARD_ENDS, 50)
    timeline.mark(codes.STEP_BEGINS, 50)
    timeline.mark(codes.BACKWARD_ENDS, 60)
    timeline.mark(codes.BACKWARD_BEGINS, 90)
    timeline.mark(codes.BACKWARD_ENDS, 100)
    assert spent(timeline, 100) == {"data": 10, "forward": 50, "backward": 30, "optimizer": 10}


def test_a_compilation_interrupts_the_forward_pass() -> None:
    """What lies before it and behind it is what it was, whether or not a loader has given the batch."""
    for loader in (True, False):
        timeline = Timeline()
        timeline.close(1000)
        if loader:
            timeline.fetch(1, 1000, 1010)
        timeline.mark(codes.PIN, 1020, codes.COMPILE)
        timeline.mark(codes.UNPIN, 5020)
        timeline.mark(codes.BACKWARD_BEGINS, 5040)
        timeline.mark(codes.BACKWARD_ENDS, 5080)
        before = {"data": 10, "forward": 30} if loader else {"between": 40}
        assert spent(timeline, 5085) == {**before, "backward": 40, "other": 5, "compile": 4000}


def test_what_hooks_see_within_a_compilation_is_the_compilation() -> None:
    """Tracing may call what is hooked, and a backend may name a phase."""
    timeline = Timeline()
    timeline.close(1000)
    timeline.mark(codes.PIN, 1010, codes.COMPILE)
    timeline.mark(codes.BACKWARD_BEGINS, 1020)
    timeline.mark(codes.BACKWARD_ENDS, 1030)
    timeline.mark(codes.PIN, 1040, codes.CHECKPOINT)
    timeline.mark(codes.UNPIN, 1050)
    timeline.mark(codes.UNPIN, 1110)
    timeline.mark(codes.BACKWARD_BEGINS, 1130)
    assert spent(timeline, 1130) == {"between": 30, "compile": 100}


def test_a_rollout_in_eval_mode_is_no_evaluation() -> None:
    """Many agents act in eval() mode: the name counts, and so it does for what is around it there."""
    timeline = Timeline()
    timeline.close(0)
    timeline.mark(codes.EVAL, 10, 7)
    timeline.mark(codes.PIN, 20, codes.OTHER)
    timeline.mark(codes.UNPIN, 500)
    timeline.mark(codes.TRAIN, 510, 7)
    timeline.mark(codes.BACKWARD_BEGINS, 530)
    assert spent(timeline, 540) == {"other": 500, "forward": 30, "backward": 10}
    assert not timeline.evaluations


def test_a_loader_with_several_batches_of_each_step_is_trained_on() -> None:
    """Unlabelled batches beside a labelled one; in the first step it may be an evaluation, which is not known yet."""
    timeline, at = Timeline(), 0
    timeline.close(at)
    for expected in (
        {"data": 10, "forward": 10, "backward": 20, "evaluation": 20},
        {"data": 30, "forward": 10, "backward": 20},
    ):
        for loader in (11, 11, 22):
            timeline.fetch(loader, at, at + 10)
            at += 10
        timeline.mark(codes.BACKWARD_BEGINS, at + 10)
        at += 30
        assert spent(timeline, at) == expected


def test_a_validation_loader_is_evaluation() -> None:
    """Fetches of another loader with no backward behind them, the exhausted one too."""
    timeline = Timeline()
    timeline.close(0)
    for at in (0, 100, 200):
        timeline.fetch(2, at, at + 10)
    timeline.fetch(2, 300, 305, exhausted=True)
    end = one_step(timeline, 310)
    assert spent(timeline, end) == {"data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15, "evaluation": 310}


def test_fetches_without_gradients_are_evaluation_at_once() -> None:
    """Under no_grad nothing has to be waited for, the loader may be the training one."""
    timeline = Timeline()
    timeline.close(0)
    timeline.fetch(1, 0, 10, gradients=False)
    timeline.fetch(1, 100, 105, exhausted=True, gradients=False)
    assert spent(timeline, 105) == {"evaluation": 105}


def test_a_teacher_in_eval_mode_is_no_evaluation() -> None:
    """A backward before train(), or train() of another module: what lay between counts as what it was."""
    timeline = Timeline()
    timeline.close(0)
    timeline.mark(codes.EVAL, 0, 7)
    end = one_step(timeline, 0)
    timeline.mark(codes.TRAIN, end, 7)
    assert spent(timeline, end) == {"data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15}
    timeline.mark(codes.EVAL, end, 8)
    timeline.mark(codes.TRAIN, end + 50, 9)
    assert "evaluation" not in spent(timeline, end + 50)


@pytest.mark.parametrize("use", [0, 50])
@pytest.mark.parametrize("times", [1, 2])
def test_loaders_fetched_side_by_side_are_one_step_s_data(times: int, use: int) -> None:
    """``zip(labelled, unlabelled)``, from the first step on, however long the one's batch is used before the other's fetch."""
    timeline, at = Timeline(), 0
    for _ in range(times):
        for loader in (2, 1):
            timeline.fetch(loader, at, at + 10)
            at += 10 + use
    timeline.mark(codes.BACKWARD_BEGINS, at + 30)
    found = spent(timeline, at + 30)
    assert (found["data"], sum(found.values()), "evaluation" in found) == (20 * times, at + 30, False)


def test_a_checkpoint_within_an_evaluation_is_a_checkpoint() -> None:
    """Saving the best model before ``train()`` is called again is not evaluation."""
    timeline = Timeline()
    timeline.close(one_step(timeline, 0))
    timeline.mark(codes.EVAL, 100, 7)
    timeline.mark(codes.PIN, 150, codes.CHECKPOINT)
    timeline.mark(codes.UNPIN, 180)
    timeline.mark(codes.TRAIN, 200, 7)
    assert spent(timeline, one_step(timeline, 200)) == {
        "data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15, "evaluation": 70, "checkpoint": 30,
    }  # fmt: skip


def test_an_evaluation_has_ended_where_training_fetches_before_it_calls_train() -> None:
    """As in trainers whose training step calls ``train()``, with the batch in hand: the fetch is the step's data."""
    timeline = Timeline()
    timeline.close(one_step(timeline, 0))
    timeline.mark(codes.EVAL, 100, 7)
    end = evaluate(timeline, 2, 110)
    timeline.fetch(1, end + 5, end + 15)
    timeline.mark(codes.TRAIN, end + 20, 7)
    timeline.mark(codes.BACKWARD_BEGINS, end + 45)
    assert spent(timeline, end + 65) == {"evaluation": end + 5 - 100, "data": 10, "forward": 30, "backward": 20}
    assert list(timeline.evaluations) == [(100, end + 5)]


def test_an_evaluation_has_ended_where_training_goes_on_without_train() -> None:
    """A model that is trained in ``eval()``, its normalisation frozen."""
    timeline = Timeline()
    timeline.close(one_step(timeline, 0))
    timeline.mark(codes.EVAL, 100, 7)
    end = one_step(timeline, evaluate(timeline, 2, 110) + 5)
    assert spent(timeline, end) == {
        "evaluation": 140, "data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15,
    }  # fmt: skip
    assert list(timeline.evaluations) == [(100, 240)]


def test_a_look_at_a_long_evaluation_changes_nothing() -> None:
    """What is known of it so far, by a snapshot; the timeline goes on as if nobody had looked."""
    timeline = Timeline()
    timeline.close(one_step(timeline, 0))
    timeline.mark(codes.EVAL, 100, 7)
    timeline.fetch(2, 110, 120)
    times, idle = timeline.state().close_early(1100, 50)
    assert (times[codes.EVALUATION], sum(times), idle) == (1000, 1000, 0)
    timeline.mark(codes.TRAIN, 1200, 7)
    assert spent(timeline, 1200) == {"evaluation": 1100}


def test_nothing_seen_for_long_is_idle() -> None:
    """After the last step, and behind the end of an evaluation's loader; not while a batch is waited for."""
    timeline = Timeline()
    timeline.close(one_step(timeline, 0))
    assert timeline.state().close_early(149, 50)[1] == 0
    assert timeline.state().close_early(200, 50)[1] == 100
    timeline.mark(codes.EVAL, 200, 7)
    end = evaluate(timeline, 2, 200)
    times, idle = timeline.state().close_early(end + 75, 50)
    assert (times[codes.EVALUATION], times[codes.OTHER], idle) == (end - 200, 175, 75)
    timeline.mark(codes.FETCH, end + 80, 1)
    assert timeline.state().close_early(end + 1000, 50)[1] == 0


@pytest.mark.parametrize(("loader", "rest", "data"), [(1, 2, 2), (1, 300, 2), (2, 2, 0)])
def test_a_batch_before_the_loader_s_end_is_trained_on_however_long_that_took(loader: int, rest: int, data: int) -> None:
    """As many as the last step took from that pass are no evaluation: the process was held up. Another loader's may be one."""
    timeline = Timeline()
    timeline.close(one_step(timeline, 0))
    timeline.mark(codes.EVAL, 100, 7)
    end = evaluate(timeline, 3, 110)
    over = _one_batch_and_the_end(timeline, loader, end, rest) + 8
    timeline.mark(codes.TRAIN, over, 7)
    timeline.mark(codes.BACKWARD_BEGINS, over + 30)
    times = spent(timeline, over + 50)
    assert (times.get("data", 0), sum(times.values())) == (data, over + 50 - 100)
    assert times["evaluation"] == (end if data else over) - 100


def _one_batch_and_the_end(timeline: Timeline, loader: int, start: int, rest: int) -> int:
    timeline.fetch(loader, start, start + 1)
    timeline.fetch(loader, start + 1 + rest, start + 2 + rest, exhausted=True)
    return start + 2 + rest


def test_an_evaluation_is_told_while_it_lasts() -> None:
    """By eval(), until its loader has come to its end; or by a fetch without gradients, with what follows it."""
    timeline = Timeline()
    timeline.close(0)
    assert timeline.state().evaluating_since() == 0
    timeline.mark(codes.EVAL, 10, 7)
    assert timeline.state().evaluating_since() == 10
    timeline.fetch(2, 20, 30)
    assert timeline.state().evaluating_since() == 10
    timeline.fetch(2, 60, 70, exhausted=True)
    assert timeline.state().evaluating_since() == 0
    timeline.mark(codes.TRAIN, 200, 7)
    assert timeline.state().evaluating_since() == 0
    timeline.fetch(2, 300, 310, gradients=False)
    assert timeline.state().evaluating_since() == 300
    timeline.fetch(2, 400, 410, exhausted=True, gradients=False)
    assert timeline.state().evaluating_since() == 0


def test_a_teacher_in_eval_mode_is_learned() -> None:
    """Whoever was in eval() when a backward came is no evaluation the next time, unless it turns out to be one."""
    timeline = Timeline()
    timeline.close(0)
    timeline.mark(codes.EVAL, 10, 7)
    timeline.mark(codes.BACKWARD_BEGINS, 100)
    timeline.close(150)
    timeline.mark(codes.EVAL, 160, 7)
    assert timeline.state().evaluating_since() == 0
    assert timeline.state().close_early(1_000, 10_000)[0][codes.EVALUATION] == 0
    timeline.mark(codes.TRAIN, 300, 7)
    timeline.mark(codes.EVAL, 400, 7)
    assert timeline.state().evaluating_since() == 400
    assert timeline.state().close_early(1_000, 10_000)[0][codes.EVALUATION] == 140 + 600


@pytest.mark.parametrize("ended", [False, True])
def test_before_anything_was_trained_an_evaluation_begins_with_a_fetch(*, ended: bool) -> None:
    """A model that was loaded, and a teacher, are in eval() while data is prepared; a sanity check fetches."""
    timeline = Timeline()
    timeline.mark(codes.EVAL, 10, 7)
    assert timeline.state().evaluating_since() == 0
    assert timeline.state().close_early(1_000, 10_000)[0][codes.EVALUATION] == 0
    if ended:
        timeline.mark(codes.TRAIN, 1_000, 7)
        timeline.mark(codes.EVAL, 1_000, 7)
    assert evaluate(timeline, 2, 2_000) == 2_125
    timeline.mark(codes.TRAIN, 2_200, 7)
    assert spent(timeline, 2_300) == {"evaluation": 200, "other": 100}
