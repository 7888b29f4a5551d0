"""A batch that is fetched between forward and backward is the next step's: the forward pass was before it."""

from __future__ import annotations

import pytest

from tests.flights import recorded
from tests.timelines import spent
from torchobs.detect.prefetch import is_forward_before
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


def prefetching_step(segments: PhaseTimeline, at: int) -> int:
    """The forward pass on the batch at hand, the fetch of the next one, then the backward."""
    at += FORWARD
    segments.fetch_begins(1, at)
    at += FETCHING
    segments.fetch_ends(at, exhausted=False, gradients=True)
    at += BETWEEN
    segments.backward_begins(at)
    at += BACKWARD
    segments.turn(OTHER, at)
    at += AFTER
    segments.turn(OPTIMIZER, at)
    return at + STEPPING


def test_the_time_before_the_fetch_is_the_forward_pass() -> None:
    """From the first step on, of which the batch was fetched before the loop."""
    segments, at = PhaseTimeline(), 1000
    segments.fetch_begins(1, at)
    segments.fetch_ends(at + FETCHING, exhausted=False, gradients=True)
    at = prefetching_step(segments, at + FETCHING)
    whole = {"forward": FORWARD + BETWEEN, "backward": BACKWARD, "other": AFTER, "optimizer": STEPPING}
    assert spent(segments, at) == {**whole, "data": 2 * FETCHING}
    for _ in range(3):
        at = prefetching_step(segments, at)
        assert spent(segments, at) == {**whole, "data": FETCHING}


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


def plain_records(steps: int) -> tuple[list[StepRecord], list[bytes]]:
    """Steps whose boundaries the record holds."""
    writer, memory = recorded()
    cycle, optimizer, at = StepRecorder(writer), Optimizer(), 10**12
    cycle.record_phases(enabled=True)
    for _ in range(steps):
        lengths = ((FETCH, FORWARD), (FETCHED, FETCHING), (BACKWARD_BEGINS, BETWEEN), (BACKWARD_ENDS, BACKWARD))
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


def test_plain_records_say_the_same_to_every_reader() -> None:
    """Phases and spans."""
    records, raw = plain_records(5)
    assert records[-1].phase_s[:5] == pytest.approx(
        [FETCHING / 1e9, (FORWARD + BETWEEN) / 1e9, BACKWARD / 1e9, STEPPING / 1e9, AFTER / 1e9]
    )
    found = parts(raw[-1])
    assert found is not None
    begun_ns, spans = found
    forward = next(part for part in spans if part.phase == "forward")
    assert (forward.begun_ns, forward.ended_ns) == (begun_ns, begun_ns + FORWARD)


@pytest.mark.parametrize(
    ("before", "after", "backward", "expected"),
    [
        (400, 10, 800, True),
        (400, 100, 800, False),  # behind the fetch is enough for a forward pass
        (10, 5, 800, False),  # neither is: the backward waited for other ranks
    ],
)
def test_which_of_the_two_can_be_a_forward_pass(*, before: int, after: int, backward: int, expected: bool) -> None:
    """By what the backward took."""
    assert is_forward_before(before, after, backward) is expected
