"""The timeline of a step, as literals: times in, times out."""

from __future__ import annotations

import pytest

from tests.timelines import ORDER, one_step, spent
from torchobs.probes.segments import (
    BACKWARD,
    CHECKPOINT,
    COMPILE,
    DATA,
    EVALUATION,
    FORWARD,
    NOTHING,
    OPTIMIZER,
    OTHER,
    Segments,
)


def test_a_plain_step() -> None:
    """Each phase is the interval between its boundaries, and they add up to the step."""
    segments = Segments()
    end = one_step(segments, 1000)
    assert spent(segments, end) == {"data": 10, "forward": 30, "backward": 40, "other": 5, "optimizer": 15}


def test_what_follows_a_step_belongs_to_the_next() -> None:
    """Logging after a step is the next one's other."""
    segments = Segments()
    segments.close(one_step(segments, 0))
    end = one_step(segments, 107)
    assert spent(segments, end)["other"] == 12


def test_without_a_loader_the_time_before_backward_is_forward() -> None:
    """An environment's steps and batches by a plain function cannot be told from the forward pass."""
    segments = Segments()
    segments.close(10)
    segments.backward_begins(50)
    segments.turn(OTHER, 70)
    assert spent(segments, 75) == {"forward": 40, "backward": 20, "other": 5}


@pytest.mark.parametrize("named", [DATA, OTHER])
def test_what_was_named_data_or_a_rollout_has_its_forward_passes_behind_it(named: int) -> None:
    """From its end to the backward, and before every further backward on the same data."""
    segments = Segments()
    segments.close(0)
    segments.pin(named, 0)
    segments.unpin(500)
    segments.backward_begins(530)
    segments.turn(OTHER, 550)
    assert spent(segments, 550) == {ORDER[named]: 500, "forward": 30, "backward": 20}
    segments.backward_begins(580)
    assert spent(segments, 590) == {"forward": 30, "backward": 10}


def test_several_steps_on_one_batch_have_a_forward_pass_each() -> None:
    """An inner loop over a fetched batch: there is no second fetch."""
    segments = Segments()
    segments.close(one_step(segments, 0))
    segments.backward_begins(130)
    assert spent(segments, 150) == {"forward": 30, "backward": 20}


def test_the_first_boundary_starts_the_clock() -> None:
    """Nothing before it is known."""
    segments = Segments()
    assert segments.segment == NOTHING
    assert not segments.started
    segments.backward_begins(1_000_000)
    segments.turn(OTHER, 1_000_020)
    assert spent(segments, 1_000_020) == {"backward": 20}


def test_several_fetches_of_the_training_loader_are_a_prefetch() -> None:
    """All batches of an accumulation first: every fetch is data."""
    segments = Segments()
    segments.close(0)
    for at in (0, 12, 24):
        segments.fetch_begins(1, at)
        segments.fetch_ends(at + 10, exhausted=False, gradients=True)
    for at in (50, 100, 150):
        segments.backward_begins(at)
        segments.turn(OTHER, at + 20)
    assert spent(segments, 170) == {"data": 30, "forward": 16 + 30 + 30, "backward": 60, "other": 4}


def test_a_prefetch_that_exhausts_the_loader_is_data_too() -> None:
    """Accelerate's loader asks for one batch more than it gives: at an epoch's end there is none, and then comes a backward."""
    segments = Segments()
    segments.close(0)
    for start in (0, 101, 202):
        segments.fetch_begins(1, start)
        segments.fetch_ends(start + 100, exhausted=False, gradients=True)
    segments.fetch_begins(1, 303)
    segments.fetch_ends(304, exhausted=True, gradients=True)
    segments.backward_begins(344)
    assert spent(segments, 360) == {"data": 301, "forward": 40, "backward": 16, "other": 3}


def test_what_the_user_names_is_that() -> None:
    """Inside a phase no hook changes anything; after data comes forward, after anything else other."""
    segments = Segments()
    segments.close(0)
    segments.pin(DATA, 10)
    segments.fetch_begins(1, 15)
    segments.fetch_ends(20, exhausted=False, gradients=True)
    segments.backward_begins(25)
    segments.unpin(60)
    segments.turn(OPTIMIZER, 80)
    segments.pin(CHECKPOINT, 90)
    segments.unpin(190)
    assert spent(segments, 200) == {"other": 20, "data": 50, "forward": 20, "optimizer": 10, "checkpoint": 100}


def test_phases_nest() -> None:
    """The inner one takes its time from the outer one."""
    segments = Segments()
    segments.close(0)
    segments.pin(EVALUATION, 0)
    segments.pin(DATA, 10)
    segments.unpin(30)
    segments.unpin(100)
    assert spent(segments, 100) == {"evaluation": 80, "data": 20}


def test_a_gan_has_forward_before_each_backward() -> None:
    """After the first optimizer there is no fetch: the time before the second backward is its forward."""
    segments = Segments()
    segments.fetch_begins(1, 0)
    segments.fetch_ends(10, exhausted=False, gradients=True)
    segments.backward_begins(30)
    segments.turn(OTHER, 50)
    segments.turn(OPTIMIZER, 50)
    segments.turn(OTHER, 60)
    segments.backward_begins(90)
    segments.turn(OTHER, 100)
    assert spent(segments, 100) == {"data": 10, "forward": 50, "backward": 30, "optimizer": 10}
    assert BACKWARD == 2
    assert FORWARD == 1


def test_a_compilation_interrupts_the_forward_pass() -> None:
    """What lies before it and behind it is what it was, whether or not a loader has given the batch."""
    for loader in (True, False):
        segments = Segments()
        segments.close(1000)
        if loader:
            segments.fetch_begins(1, 1000)
            segments.fetch_ends(1010, exhausted=False, gradients=True)
        segments.pin(COMPILE, 1020)
        segments.unpin(5020)
        segments.backward_begins(5040)
        segments.turn(OTHER, 5080)
        before = {"data": 10, "forward": 30} if loader else {"forward": 40}
        assert spent(segments, 5085) == {**before, "backward": 40, "other": 5, "compile": 4000}


def test_a_compilation_interrupts_the_backward_pass() -> None:
    """A graph's backward is compiled when it is first run."""
    segments = Segments()
    segments.close(1000)
    segments.backward_begins(1010)
    segments.pin(COMPILE, 1020)
    segments.unpin(2020)
    segments.turn(OTHER, 2050)
    assert spent(segments, 2050) == {"forward": 10, "backward": 40, "compile": 1000}


def test_what_hooks_see_within_a_compilation_is_the_compilation() -> None:
    """Tracing may call what is hooked, and a backend may name a phase."""
    segments = Segments()
    segments.close(1000)
    segments.pin(COMPILE, 1010)
    segments.backward_begins(1020)
    segments.turn(OTHER, 1030)
    segments.pin(CHECKPOINT, 1040)
    segments.unpin(1050)
    segments.unpin(1110)
    segments.backward_begins(1130)
    assert spent(segments, 1130) == {"forward": 30, "compile": 100}


def test_a_compilation_within_an_evaluation_is_no_evaluation() -> None:
    """Named, or between eval() and train()."""
    segments = Segments()
    segments.close(1000)
    segments.pin(EVALUATION, 1000)
    segments.pin(COMPILE, 1010)
    segments.unpin(1110)
    segments.unpin(1150)
    assert spent(segments, 1150) == {"evaluation": 50, "compile": 100}
    segments.evaluation_begins(7, 2000)
    segments.pin(COMPILE, 2010)
    segments.unpin(2110)
    segments.evaluation_ends(7, 2150)
    assert spent(segments, 2150) == {"other": 850, "evaluation": 50, "compile": 100}


def test_a_step_that_ends_within_a_compilation_has_its_part_of_it() -> None:
    """torchobs.step() in a backend; the rest is the next step's."""
    segments = Segments()
    segments.close(1000)
    segments.pin(COMPILE, 1010)
    assert spent(segments, 1050) == {"other": 10, "compile": 40}
    segments.unpin(1080)
    assert spent(segments, 1100) == {"other": 20, "compile": 30}


def test_a_compilation_in_a_phase_that_is_named_so_counts_once() -> None:
    """``torchobs.phase("compile")`` around a warm-up."""
    segments = Segments()
    segments.close(1000)
    segments.pin(COMPILE, 1010)
    segments.pin(COMPILE, 1020)
    segments.unpin(1080)
    segments.unpin(1100)
    assert spent(segments, 1110) == {"other": 20, "compile": 90}
