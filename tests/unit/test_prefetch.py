"""A batch that is fetched between forward and backward: its boundaries do not show where the forward pass was."""

from __future__ import annotations

import pytest

from tests.flights import recorded
from tests.timelines import spent
from torchobs.flight.format.layout import RECORD_SIZE
from torchobs.flight.format.span_ids import parts
from torchobs.flight.format.step_record import StepRecord, unpack
from torchobs.probes.core.boundaries import BACKWARD_BEGINS, BACKWARD_ENDS, FETCH, FETCHED, STEP_BEGINS
from torchobs.probes.core.step_recorder import StepRecorder
from torchobs.probes.core.timeline import OPTIMIZER, OTHER, PhaseTimeline

FORWARD, FETCHING, BETWEEN, BACKWARD, AFTER, STEPPING = 400, 30, 10, 800, 5, 55


class Optimizer:
    """Anything that can be weakly referenced, and has groups of parameters."""

    param_groups: tuple[dict[str, list[object]], ...] = ()


def prefetching_step(segments: PhaseTimeline, at: int, waited: int) -> int:
    """The forward pass on the batch at hand, the fetch of the next one, then the backward."""
    at += FORWARD
    segments.fetch_begins(1, at)
    at += FETCHING
    segments.fetch_ends(at, exhausted=False, gradients=True)
    at += BETWEEN
    segments.backward_begins(at)
    at += BACKWARD + waited
    segments.turn(OTHER, at)
    at += AFTER
    segments.turn(OPTIMIZER, at)
    return at + STEPPING


@pytest.mark.parametrize("waited", [0, 100 * BACKWARD])
def test_the_time_before_a_fetch_is_other_however_long_the_backward_pass_takes(waited: int) -> None:
    """A backward pass that waits for a peer says nothing of the time before the fetch, which may have been logging."""
    segments, at = PhaseTimeline(), 1000
    segments.fetch_begins(1, at)
    segments.fetch_ends(at + FETCHING, exhausted=False, gradients=True)
    at = prefetching_step(segments, at + FETCHING, waited)
    whole = {"forward": BETWEEN, "backward": BACKWARD + waited, "optimizer": STEPPING}
    assert spent(segments, at) == {**whole, "data": 2 * FETCHING, "other": FORWARD + AFTER}
    for _ in range(3):
        at = prefetching_step(segments, at, waited)
        assert spent(segments, at) == {**whole, "data": FETCHING, "other": FORWARD + AFTER}


def test_batches_of_an_accumulation_that_are_fetched_first_stay_as_they_are() -> None:
    """The forward pass is behind the last fetch."""
    segments, at = PhaseTimeline(), 1000
    for _ in range(4):
        segments.fetch_begins(1, at)
        segments.fetch_ends(at + 30, exhausted=False, gradients=True)
        at += 32
    segments.backward_begins(at + 400)
    segments.turn(OTHER, at + 1200)
    assert spent(segments, at + 1200)["forward"] == 402


def plain_records(steps: int, waited: int) -> tuple[list[StepRecord], list[bytes]]:
    """Steps whose boundaries the record holds."""
    writer, memory = recorded()
    cycle, optimizer, at = StepRecorder(writer), Optimizer(), 10**12
    cycle.record_phases(enabled=True)
    for _ in range(steps):
        lengths = ((FETCH, FORWARD), (FETCHED, FETCHING), (BACKWARD_BEGINS, BETWEEN), (BACKWARD_ENDS, BACKWARD + waited))
        for code, length in lengths:
            at += length
            cycle.mark(code, at, 1 if code == FETCH else None)
        at += AFTER
        cycle.optimizer_begins(optimizer)
        cycle.mark(STEP_BEGINS, at)
        at += STEPPING
        cycle.optimizer_ends(optimizer, at)
    found = [(unpack(data, writer.header.seed), data) for _, data in memory.stores if len(data) == RECORD_SIZE]
    return [record for record, _ in found if record is not None], [data for record, data in found if record is not None]


@pytest.mark.parametrize("waited", [0, 100 * BACKWARD])
def test_plain_records_say_the_same_to_every_reader(waited: int) -> None:
    """Phases and spans."""
    records, raw = plain_records(5, waited)
    assert records[-1].phase_s[:5] == pytest.approx(
        [FETCHING / 1e9, BETWEEN / 1e9, (BACKWARD + waited) / 1e9, STEPPING / 1e9, (FORWARD + AFTER) / 1e9]
    )
    found = parts(raw[-1])
    assert found is not None
    begun_ns, spans = found
    forward = next(part for part in spans if part.phase == "forward")
    assert (forward.begun_ns - begun_ns, forward.ended_ns - forward.begun_ns) == (FORWARD + FETCHING, BETWEEN)
