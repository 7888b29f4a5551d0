"""What a cycle writes: plain steps as their boundaries, any other by its timeline, and both the same."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.flights import recorded
from torchobs.flight import reader
from torchobs.flight.layout import RECORD_SIZE
from torchobs.flight.place import open_place
from torchobs.flight.record import Flag, Kind, StepRecord, unpack
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.probes.cycle import Cycle
from torchobs.probes.trace import (
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    EVAL,
    FETCH,
    FETCHED,
    FETCHED_NO_GRAD,
    PHASE_OF,
    STEP_BEGINS,
    TRAIN,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Optimizer:
    """Anything that can be weakly referenced, and has groups of parameters."""

    param_groups: tuple[dict[str, list[object]], ...] = ()


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A real flight file."""
    opened = open_writer(open_place(str(flight_dir), None), {"rank": 0})
    yield opened
    opened.close()


def records(writer: FlightWriter) -> list[StepRecord]:
    """What is in the file."""
    file = reader.open_path(writer.path)
    try:
        return file.steps()
    finally:
        file.close()


def step(cycle: Cycle, optimizer: object, at: int, lengths: tuple[int, int, int, int, int, int], *, loader: bool) -> int:
    """One step from ``at``: lengths of other, fetch, forward, backward, other, optimizer. Return its end."""
    other, fetch, forward, backward, more, optimizing = lengths
    at += other
    if loader:
        cycle.mark(FETCH, at, 1)
        at += fetch
        cycle.mark(FETCHED, at)
    at += forward
    cycle.mark(BACKWARD_BEGINS, at)
    at += backward
    cycle.mark(BACKWARD_ENDS, at)
    at += more
    cycle.optimizer_begins(optimizer)
    cycle.mark(STEP_BEGINS, at)
    at += optimizing
    cycle.optimizer_ends(optimizer, at)
    return at


LENGTHS = st.tuples(*[st.integers(0, 10**10)] * 6)


@given(st.lists(st.tuples(LENGTHS, st.booleans()), min_size=3, max_size=6))
def test_a_plain_record_tells_the_same_times_as_the_timeline(steps: list[tuple[tuple[int, ...], bool]]) -> None:
    """The boundaries in the record, worked out by the reader, are what the replayed timeline would have said."""
    plain, replayed = _run(steps, timed_plainly=True), _run(steps, timed_plainly=False)
    assert [record.kind for record in plain] == [Kind.STEP] * len(steps)
    for one, other in zip(plain, replayed, strict=True):
        assert one.phase_s == pytest.approx(other.phase_s, rel=1e-6, abs=1e-9)
        assert one.duration_s == pytest.approx(other.duration_s, rel=1e-9, abs=1e-9)
        assert (one.step, one.end_ns, one.flags) == (other.step, other.end_ns, other.flags)


def _run(steps: list[tuple[tuple[int, ...], bool]], *, timed_plainly: bool) -> list[StepRecord]:
    writer, memory = recorded()
    cycle, optimizer, at = Cycle(writer), Optimizer(), 10**12
    cycle.timed = True
    for lengths, loader in steps:
        if not timed_plainly and cycle._clean:
            cycle.segments.restart(at)
            cycle._clean = False
        at = step(cycle, optimizer, at, lengths, loader=loader)  # type: ignore[arg-type]
    cycle.flush()
    found = [unpack(data, writer.header.seed) for _, data in memory.stores if len(data) == RECORD_SIZE]
    return [record for record in found if record is not None]


def test_what_is_not_plain_is_replayed(writer: FlightWriter) -> None:
    """The same number of boundaries with other meanings: nothing of them passes for a plain step."""
    cycle, optimizer = Cycle(writer), Optimizer()
    cycle.timed = True
    at = 10**12
    for _ in range(3):
        at = step(cycle, optimizer, at, (0, 10, 10, 10, 10, 10), loader=True)
    cycle.mark(EVAL, at, 7)
    cycle.mark(TRAIN, at + 1000, 7)
    at = step(cycle, optimizer, at + 1000, (0, 0, 50, 50, 0, 50), loader=False)
    cycle.mark(FETCH, at, 1)
    cycle.mark(FETCHED_NO_GRAD, at + 500)
    at = step(cycle, optimizer, at + 500, (0, 0, 50, 50, 0, 50), loader=False)
    evaluation, odd = records(writer)[3:]
    assert evaluation.phase_s[5] == pytest.approx(1000e-9)
    assert evaluation.duration_s == pytest.approx(150e-9)
    assert odd.duration_s == pytest.approx(650e-9)


def test_an_end_is_provisional_until_the_cycle_is_known(writer: FlightWriter) -> None:
    """After the first step it might be one of a GAN's two optimizers; from the second on steps are written as they end."""
    cycle, optimizer = Cycle(writer), Optimizer()
    at = step(cycle, optimizer, 10**12, (0, 1, 1, 1, 1, 1), loader=True)
    assert records(writer) == []
    step(cycle, optimizer, at, (0, 1, 1, 1, 1, 1), loader=True)
    assert [record.step for record in records(writer)] == [1, 2]


def test_the_first_step_without_a_loader_has_no_duration(writer: FlightWriter) -> None:
    """Nothing before its backward was seen; the next one has."""
    cycle, optimizer, at = Cycle(writer), Optimizer(), 10**12
    for _ in range(3):
        at = step(cycle, optimizer, at, (0, 0, 5, 5, 5, 5), loader=False)
    assert [bool(record.flags & Flag.UNTIMED) for record in records(writer)] == [True, False, False]


def test_evaluation_without_end_keeps_the_trace_short(writer: FlightWriter) -> None:
    """A million fetches and no step: the trace is worked off on the way."""
    cycle = Cycle(writer)
    for index in range(20_000):
        cycle.mark(FETCH, 10**12 + 2 * index, 1)
        cycle.mark(FETCHED_NO_GRAD, 10**12 + 2 * index + 1)
    assert len(cycle.trace) <= 4097
    assert len(cycle.arguments) <= 4097


def test_the_sampler_sees_what_the_training_thread_does(writer: FlightWriter) -> None:
    """The last boundary names the phase, and since when."""
    cycle = Cycle(writer)
    assert cycle.phase() == (4, 0)
    cycle.mark(FETCH, 77, 1)
    assert cycle.phase() == (PHASE_OF[FETCH], 77)


def test_several_threads_may_write_late_values(writer: FlightWriter) -> None:
    """A late record belongs to its step, counts no step, and adds its tokens."""
    cycle = Cycle(writer)
    cycle.late(3, Flag.LOSS, 1.5, 0.0, tokens=4)
    (record,) = records(writer)
    assert (record.kind, record.step, record.loss, record.tokens) == (Kind.LATE, 3, 1.5, 4)
    assert abs(record.end_ns - time.monotonic_ns()) < 10**10
