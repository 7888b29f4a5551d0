"""The timeline of a step, as literals: times in, times out."""

from __future__ import annotations

import pytest

from tests.timelines import ORDER, one_step, spent
from torchobs.probes.core.timeline import (
    BACKWARD,
    CHECKPOINT,
    COMPILE,
    DATA,
    EVALUATION,
    FORWARD,
    NOTHING,
    OPTIMIZER,
    OTHER,
    PhaseTimeline,
)


def test_a_plain_step() -> None:
    """Each phase is the interval between its boundaries, and they add up to the step."""
    timeline = PhaseTimeline()
    end = one_step(timeline, 1000)
    assert spent(timeline, end) == {"data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15}


def test_what_follows_a_step_belongs_to_the_next() -> None:
    """Logging after a step is the next one's other."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    end = one_step(timeline, 107)
    assert spent(timeline, end)["other"] == 12


def test_without_a_loader_the_time_before_backward_is_forward() -> None:
    """An environment's steps and batches by a plain function cannot be told from the forward pass."""
    timeline = PhaseTimeline()
    timeline.close(10)
    timeline.backward_begins(50)
    timeline.turn(OTHER, 70)
    assert spent(timeline, 75) == {"forward": 40, "backward": 20, "other": 5}


@pytest.mark.parametrize("named", [DATA, OTHER])
def test_what_was_named_data_or_a_rollout_has_its_forward_passes_behind_it(named: int) -> None:
    """From its end to the backward, and before every further backward on the same data."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.pin(named, 0)
    timeline.unpin(500)
    timeline.backward_begins(530)
    timeline.turn(OTHER, 550)
    assert spent(timeline, 550) == {ORDER[named]: 500, "forward": 30, "backward": 20}
    timeline.backward_begins(580)
    assert spent(timeline, 590) == {"forward": 30, "backward": 10}


def test_several_steps_on_one_batch_have_a_forward_pass_each() -> None:
    """An inner loop over a fetched batch: there is no second fetch."""
    timeline = PhaseTimeline()
    timeline.close(one_step(timeline, 0))
    timeline.backward_begins(130)
    assert spent(timeline, 150) == {"forward": 30, "backward": 20}


def test_the_first_boundary_starts_the_clock() -> None:
    """Nothing before it is known."""
    timeline = PhaseTimeline()
    assert timeline.segment == NOTHING
    assert not timeline.started
    timeline.backward_begins(1_000_000)
    timeline.turn(OTHER, 1_000_020)
    assert spent(timeline, 1_000_020) == {"backward": 20}


def test_several_fetches_of_the_training_loader_are_a_prefetch() -> None:
    """All batches of an accumulation first: every fetch is data."""
    timeline = PhaseTimeline()
    timeline.close(0)
    for at in (0, 12, 24):
        timeline.fetch_begins(1, at)
        timeline.fetch_ends(at + 10, exhausted=False, gradients=True)
    for at in (50, 100, 150):
        timeline.backward_begins(at)
        timeline.turn(OTHER, at + 20)
    assert spent(timeline, 170) == {"data": 30, "forward": 16 + 30 + 30, "backward": 60, "other": 4}


def test_a_prefetch_that_exhausts_the_loader_is_data_too() -> None:
    """Accelerate's loader asks for one batch more than it gives: at an epoch's end there is none, and then comes a backward."""
    timeline = PhaseTimeline()
    timeline.close(0)
    for start in (0, 101, 202):
        timeline.fetch_begins(1, start)
        timeline.fetch_ends(start + 100, exhausted=False, gradients=True)
    timeline.fetch_begins(1, 303)
    timeline.fetch_ends(304, exhausted=True, gradients=True)
    timeline.backward_begins(344)
    assert spent(timeline, 360) == {"data": 301, "forward": 40, "backward": 16, "other": 3}


def test_what_the_user_names_is_that() -> None:
    """Inside a phase no hook changes anything; after data comes forward, after anything else other."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.pin(DATA, 10)
    timeline.fetch_begins(1, 15)
    timeline.fetch_ends(20, exhausted=False, gradients=True)
    timeline.backward_begins(25)
    timeline.unpin(60)
    timeline.turn(OPTIMIZER, 80)
    timeline.pin(CHECKPOINT, 90)
    timeline.unpin(190)
    assert spent(timeline, 200) == {"other": 20, "data": 50, "forward": 20, "optimizer": 10, "checkpoint": 100}


def test_phases_nest() -> None:
    """The inner one takes its time from the outer one."""
    timeline = PhaseTimeline()
    timeline.close(0)
    timeline.pin(EVALUATION, 0)
    timeline.pin(DATA, 10)
    timeline.unpin(30)
    timeline.unpin(100)
    assert spent(timeline, 100) == {"evaluation": 80, "data": 20}


def test_a_gan_has_forward_before_each_backward() -> None:
    """After the first optimizer there is no fetch: the time before the second backward is its forward."""
    timeline = PhaseTimeline()
    timeline.fetch_begins(1, 0)
    timeline.fetch_ends(10, exhausted=False, gradients=True)
    timeline.backward_begins(30)
    timeline.turn(OTHER, 50)
    timeline.turn(OPTIMIZER, 50)
    timeline.turn(OTHER, 60)
    timeline.backward_begins(90)
    timeline.turn(OTHER, 100)
    assert spent(timeline, 100) == {"data": 10, "forward": 50, "backward": 30, "optimizer": 10}
    assert BACKWARD == 2
    assert FORWARD == 1


def test_a_compilation_interrupts_the_forward_pass() -> None:
    """What lies before it and behind it is what it was, whether or not a loader has given the batch."""
    for loader in (True, False):
        timeline = PhaseTimeline()
        timeline.close(1000)
        if loader:
            timeline.fetch_begins(1, 1000)
            timeline.fetch_ends(1010, exhausted=False, gradients=True)
        timeline.pin(COMPILE, 1020)
        timeline.unpin(5020)
        timeline.backward_begins(5040)
        timeline.turn(OTHER, 5080)
        before = {"data": 10, "forward": 30} if loader else {"forward": 40}
        assert spent(timeline, 5085) == {**before, "backward": 40, "other": 5, "compile": 4000}


def test_a_compilation_interrupts_the_backward_pass() -> None:
    """A graph's backward is compiled when it is first run."""
    timeline = PhaseTimeline()
    timeline.close(1000)
    timeline.backward_begins(1010)
    timeline.pin(COMPILE, 1020)
    timeline.unpin(2020)
    timeline.turn(OTHER, 2050)
    assert spent(timeline, 2050) == {"forward": 10, "backward": 40, "compile": 1000}


def test_what_hooks_see_within_a_compilation_is_the_compilation() -> None:
    """Tracing may call what is hooked, and a backend may name a phase."""
    timeline = PhaseTimeline()
    timeline.close(1000)
    timeline.pin(COMPILE, 1010)
    timeline.backward_begins(1020)
    timeline.turn(OTHER, 1030)
    timeline.pin(CHECKPOINT, 1040)
    timeline.unpin(1050)
    timeline.unpin(1110)
    timeline.backward_begins(1130)
    assert spent(timeline, 1130) == {"forward": 30, "compile": 100}


def test_a_compilation_within_an_evaluation_is_no_evaluation() -> None:
    """Named, or between eval() and train()."""
    timeline = PhaseTimeline()
    timeline.close(1000)
    timeline.pin(EVALUATION, 1000)
    timeline.pin(COMPILE, 1010)
    timeline.unpin(1110)
    timeline.unpin(1150)
    assert spent(timeline, 1150) == {"evaluation": 50, "compile": 100}
    timeline.evaluation_begins(7, 2000)
    timeline.pin(COMPILE, 2010)
    timeline.unpin(2110)
    timeline.evaluation_ends(7, 2150)
    assert spent(timeline, 2150) == {"other": 850, "evaluation": 50, "compile": 100}


def test_a_step_that_ends_within_a_compilation_has_its_part_of_it() -> None:
    """torchobs.step() in a backend; the rest is the next step's."""
    timeline = PhaseTimeline()
    timeline.close(1000)
    timeline.pin(COMPILE, 1010)
    assert spent(timeline, 1050) == {"other": 10, "compile": 40}
    timeline.unpin(1080)
    assert spent(timeline, 1100) == {"other": 20, "compile": 30}


def test_a_compilation_in_a_phase_that_is_named_so_counts_once() -> None:
    """``torchobs.phase("compile")`` around a warm-up."""
    timeline = PhaseTimeline()
    timeline.close(1000)
    timeline.pin(COMPILE, 1010)
    timeline.pin(COMPILE, 1020)
    timeline.unpin(1080)
    timeline.unpin(1100)
    assert spent(timeline, 1110) == {"other": 20, "compile": 90}
