"""What of a timeline is an evaluation, as literals: times in, times out."""

from __future__ import annotations

import pytest

from tests.timelines import evaluate, one_step, spent
from torchobs.probes.core.timeline import CHECKPOINT, DATA, EVALUATION, OTHER, PhaseTimeline


def test_a_fetch_for_an_evaluation_is_not_the_training_s() -> None:
    """A validation loader beside a training without one."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.fetch_begins(2, 0)
    timeline.fetch_ends(10, exhausted=False, gradients=False)
    timeline.fetch_begins(2, 20)
    timeline.fetch_ends(25, exhausted=True, gradients=False)
    timeline.backward_begins(65)
    assert spent(timeline, 80) == {"evaluation": 25, "forward": 40, "backward": 15}


def test_a_rollout_in_eval_mode_is_no_evaluation() -> None:
    """Many agents act in eval() mode: the name counts, and so it does for what is around it there."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.evaluation_begins(7, 10)
    timeline.pin(OTHER, 20)
    timeline.unpin(500)
    timeline.evaluation_ends(7, 510)
    timeline.backward_begins(530)
    assert spent(timeline, 540) == {"other": 500, "forward": 30, "backward": 10}
    assert not timeline.evaluations


def test_a_validation_loader_is_evaluation() -> None:
    """Fetches of another loader with no backward behind them, the exhausted one too."""
    timeline = PhaseTimeline()
    timeline.close(0)
    for at in (0, 100, 200):
        timeline.fetch_begins(2, at)
        timeline.fetch_ends(at + 10, exhausted=False, gradients=True)
    timeline.fetch_begins(2, 300)
    timeline.fetch_ends(305, exhausted=True, gradients=True)
    end = one_step(timeline, 310)
    assert spent(timeline, end) == {"data": 10, "forward": 30, "backward": 40, "other": 10, "optimizer": 15, "evaluation": 305}


def test_fetches_without_gradients_are_evaluation_at_once() -> None:
    """Under no_grad nothing has to be waited for, the loader may be the training one."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.fetch_begins(1, 0)
    timeline.fetch_ends(10, exhausted=False, gradients=False)
    timeline.fetch_begins(1, 100)
    timeline.fetch_ends(105, exhausted=True, gradients=False)
    assert timeline.spent_ns[EVALUATION] == 105
    assert timeline.spent_ns[DATA] == 0


def test_between_eval_and_train_is_evaluation() -> None:
    """Whatever happens there, and the time before and after stays what it was."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.evaluation_begins(7, 20)
    timeline.fetch_begins(2, 30)
    timeline.fetch_ends(40, exhausted=False, gradients=True)
    timeline.evaluation_ends(7, 120)
    end = one_step(timeline, 125)
    assert spent(timeline, end) == {
        "data": 10, "forward": 30, "backward": 40, "other": 30, "optimizer": 15, "evaluation": 100,
    }  # fmt: skip


def test_a_teacher_in_eval_mode_is_no_evaluation() -> None:
    """A backward before train(), or train() of another module: what lay between counts as what it was."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.evaluation_begins(7, 0)
    end = one_step(timeline, 0)
    timeline.evaluation_ends(7, end)
    assert spent(timeline, end) == {"data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15}
    timeline.evaluation_begins(8, end)
    timeline.evaluation_ends(9, end + 50)
    assert "evaluation" not in spent(timeline, end + 50)


def beside(timeline: PhaseTimeline, start: int, use: int) -> int:
    """A step of two loaders: 10 each to fetch, the first one's batch used for so long before the second one's fetch."""
    timeline.fetch_begins(2, start)
    timeline.fetch_ends(start + 10, exhausted=False, gradients=True)
    return one_step(timeline, start + 10 + use)


def test_loaders_fetched_side_by_side_are_one_step_s_data() -> None:
    """``zip(labelled, unlabelled)``: nothing was done with the first one's batch before the second one's fetch."""
    timeline = PhaseTimeline()
    assert spent(timeline, beside(timeline, 0, use=0))["data"] == 20


def test_loaders_used_one_after_the_other_are_data_from_the_second_step_on() -> None:
    """What is fetched and used in one step after another was no evaluation."""
    timeline = PhaseTimeline()
    end = beside(timeline, 0, use=50)
    assert spent(timeline, end)["evaluation"] == 60
    end = beside(timeline, end, use=50)
    assert spent(timeline, end) == {"data": 20, "forward": 80, "backward": 40, "other": 5, "optimizer": 15}


def test_an_evaluation_of_one_batch_now_and_then_is_one() -> None:
    """With steps in between that fetch from one loader only, each evaluation stands for itself."""
    timeline = PhaseTimeline()
    end = beside(timeline, 0, use=50)
    assert spent(timeline, end)["evaluation"] == 60
    timeline.restart(end + 100)  # a plain step was written without the timeline
    end = beside(timeline, end + 100, use=50)
    assert spent(timeline, end)["evaluation"] == 60
    end = one_step(timeline, end)
    timeline.close(end)
    assert spent(timeline, beside(timeline, end, use=50))["evaluation"] == 60


def test_a_checkpoint_within_an_evaluation_is_a_checkpoint() -> None:
    """Saving the best model before ``train()`` is called again is not evaluation."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.evaluation_begins(7, 100)
    timeline.pin(CHECKPOINT, 150)
    timeline.unpin(180)
    timeline.evaluation_ends(7, 200)
    assert spent(timeline, one_step(timeline, 200)) == {
        "data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15, "evaluation": 70, "checkpoint": 30,
    }  # fmt: skip


def test_an_evaluation_has_ended_where_training_fetches_before_it_calls_train() -> None:
    """As in trainers whose training step calls ``train()``, with the batch in hand: the fetch is the step's data."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.evaluation_begins(7, 100)
    end = evaluate(timeline, 2, 110)
    timeline.fetch_begins(1, end + 5)
    timeline.fetch_ends(end + 15, exhausted=False, gradients=True)
    timeline.evaluation_ends(7, end + 20)
    timeline.backward_begins(end + 45)
    assert spent(timeline, end + 65) == {"evaluation": end + 5 - 100, "data": 10, "forward": 30, "backward": 20}
    assert list(timeline.evaluations) == [(100, end + 5)]


def test_an_evaluation_has_ended_where_training_goes_on_without_train() -> None:
    """A model that is trained in ``eval()``, its normalisation frozen."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.evaluation_begins(7, 100)
    end = one_step(timeline, evaluate(timeline, 2, 110) + 5)
    assert spent(timeline, end) == {
        "evaluation": 140, "data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15,
    }  # fmt: skip
    assert list(timeline.evaluations) == [(100, 240)]


def test_several_validation_loaders_are_one_evaluation() -> None:
    """Up to ``train()``, with the checkpoint that is saved meanwhile taken out."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.evaluation_begins(7, 100)
    end = evaluate(timeline, 3, evaluate(timeline, 2, 110) + 5)
    timeline.pin(CHECKPOINT, end + 5)
    timeline.unpin(end + 25)
    timeline.evaluation_ends(7, end + 30)
    after = one_step(timeline, end + 30)
    times = spent(timeline, after)
    assert times["evaluation"] == end + 30 - 100 - 20
    assert times["checkpoint"] == 20
    assert sum(times.values()) == after - 100
    assert list(timeline.evaluations) == [(100, end + 30)]


def test_a_look_at_a_long_evaluation_changes_nothing() -> None:
    """What is known of it so far, by a snapshot; the timeline goes on as if nobody had looked."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.evaluation_begins(7, 100)
    timeline.fetch_begins(2, 110)
    timeline.fetch_ends(120, exhausted=False, gradients=True)
    times, idle = timeline.snapshot().so_far(1100, 50)
    assert (times[EVALUATION], sum(times), idle) == (1000, 1000, 0)
    timeline.evaluation_ends(7, 1200)
    assert spent(timeline, 1200) == {"evaluation": 1100}


def test_nothing_seen_for_long_is_idle() -> None:
    """After the last step, and behind the end of an evaluation's loader; not while a batch is waited for."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    assert timeline.snapshot().so_far(149, 50)[1] == 0
    assert timeline.snapshot().so_far(200, 50)[1] == 100
    timeline.evaluation_begins(7, 200)
    end = evaluate(timeline, 2, 200)
    times, idle = timeline.snapshot().so_far(end + 75, 50)
    assert (times[EVALUATION], times[OTHER], idle) == (end - 200, 175, 75)
    timeline.fetch_begins(1, end + 80)
    assert timeline.snapshot().so_far(end + 1000, 50)[1] == 0


def test_a_batch_fetched_ahead_of_the_loader_s_end_is_trained_on() -> None:
    """A prefetcher asks for one more than it hands out: the fetch behind an evaluation may be the last of the epoch."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.evaluation_begins(7, 100)
    end = evaluate(timeline, 2, 110) + 5
    timeline.fetch_begins(1, end)
    timeline.fetch_ends(end + 20, exhausted=False, gradients=True)
    timeline.fetch_begins(1, end + 21)
    timeline.fetch_ends(end + 26, exhausted=True, gradients=True)
    timeline.evaluation_ends(7, end + 30)
    timeline.backward_begins(end + 50)
    times = spent(timeline, end + 60)
    assert (times["data"], times["evaluation"], sum(times.values())) == (25, 140, 200)


@pytest.mark.parametrize(("loader", "rest", "data"), [(1, 2, 2), (1, 300, 2), (2, 2, 0)])
def test_a_batch_before_the_loader_s_end_is_trained_on_however_long_that_took(loader: int, rest: int, data: int) -> None:
    """As many as the last step took from that pass are no evaluation: the process was held up. Another loader's may be one."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.evaluation_begins(7, 100)
    end = evaluate(timeline, 3, 110)
    over = _one_batch_and_the_end(timeline, loader, end, rest) + 8
    timeline.evaluation_ends(7, over)
    timeline.backward_begins(over + 30)
    times = spent(timeline, over + 50)
    assert (times.get("data", 0), sum(times.values())) == (data, over + 50 - 100)
    assert times["evaluation"] == (end if data else over) - 100


@pytest.mark.parametrize(("rest", "evaluation"), [(2, 0), (3, 5), (30, 32)])
def test_a_whole_pass_without_a_backward_is_an_evaluation_if_its_batches_were_used(rest: int, evaluation: int) -> None:
    """Over the loader that is trained on, by a tenth of a forward pass of 30. It is one batch: fetched, used, and the end."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.fetch_begins(1, 100)
    timeline.fetch_ends(101, exhausted=True, gradients=True)
    over = _one_batch_and_the_end(timeline, 1, 101, rest)
    timeline.backward_begins(over + 30)
    assert spent(timeline, over + 60).get("evaluation", 0) == evaluation


def _one_batch_and_the_end(timeline: PhaseTimeline, loader: int, start: int, rest: int) -> int:
    timeline.fetch_begins(loader, start)
    timeline.fetch_ends(start + 1, exhausted=False, gradients=True)
    timeline.fetch_begins(loader, start + 1 + rest)
    timeline.fetch_ends(start + 2 + rest, exhausted=True, gradients=True)
    return start + 2 + rest


def test_an_evaluation_is_told_while_it_lasts() -> None:
    """By eval(), until its loader has come to its end; or by a fetch without gradients, with what follows it."""
    timeline = PhaseTimeline()
    timeline.close(0)
    assert timeline.evaluating_since() == 0
    timeline.evaluation_begins(7, 10)
    assert timeline.evaluating_since() == 10
    timeline.fetch_begins(2, 20)
    timeline.fetch_ends(30, exhausted=False, gradients=True)
    assert timeline.evaluating_since() == 10
    timeline.fetch_begins(2, 60)
    timeline.fetch_ends(70, exhausted=True, gradients=True)
    assert timeline.evaluating_since() == 0
    timeline.evaluation_ends(7, 200)
    assert timeline.evaluating_since() == 0
    timeline.fetch_begins(2, 300)
    timeline.fetch_ends(310, exhausted=False, gradients=False)
    assert timeline.evaluating_since() == 300
    timeline.fetch_begins(2, 400)
    timeline.fetch_ends(410, exhausted=True, gradients=False)
    assert timeline.evaluating_since() == 0


def test_a_teacher_in_eval_mode_is_learned() -> None:
    """Whoever was in eval() when a backward came is no evaluation the next time, unless it turns out to be one."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.evaluation_begins(7, 10)
    timeline.backward_begins(100)
    timeline.close(150)
    timeline.evaluation_begins(7, 160)
    assert timeline.evaluating_since() == 0
    assert timeline.snapshot().so_far(1_000, 10_000)[0][EVALUATION] == 0
    timeline.evaluation_ends(7, 300)
    timeline.evaluation_begins(7, 400)
    assert timeline.evaluating_since() == 400
    assert timeline.snapshot().so_far(1_000, 10_000)[0][EVALUATION] == 140 + 600


@pytest.mark.parametrize("ended", [False, True])
def test_before_anything_was_trained_an_evaluation_begins_with_a_fetch(*, ended: bool) -> None:
    """A model that was loaded, and a teacher, are in eval() while data is prepared; a sanity check fetches."""
    timeline = PhaseTimeline()
    timeline.evaluation_begins(7, 10)
    assert timeline.evaluating_since() == 0
    assert timeline.snapshot().so_far(1_000, 10_000)[0][EVALUATION] == 0
    if ended:
        timeline.evaluation_ends(7, 1_000)
        timeline.evaluation_begins(7, 1_000)
    assert evaluate(timeline, 2, 2_000) == 2_125
    timeline.evaluation_ends(7, 2_200)
    assert spent(timeline, 2_300) == {"evaluation": 200, "other": 100}
