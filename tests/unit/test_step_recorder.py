"""What a cycle writes: plain steps as their boundaries, any other by its timeline, and both the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.flights import RecordingMemory, recorded
from torchobs.flight.layout import RECORD_SIZE
from torchobs.flight.step_record import RecordKind, StepRecord, unpack
from torchobs.probes.step_recorder import StepRecorder
from torchobs.probes.timeline import BACKWARD_BEGINS, BACKWARD_ENDS, FETCH, FETCHED, STEP_BEGINS

if TYPE_CHECKING:
    from torchobs.flight.writer import FlightWriter


class Optimizer:
    """Anything that can be weakly referenced, and has groups of parameters."""

    param_groups: tuple[dict[str, list[object]], ...] = ()


def step(recorder: StepRecorder, optimizer: object, at: int, lengths: tuple[int, ...], *, loader: bool) -> int:
    """One step from ``at``: lengths of other, fetch, forward, backward, other, optimizer. Return its end."""
    other, fetch, forward, backward, more, optimizing = lengths
    at += other
    if loader:
        recorder.mark(FETCH, at, 1)
        at += fetch
        recorder.mark(FETCHED, at)
    at += forward
    recorder.mark(BACKWARD_BEGINS, at)
    at += backward
    recorder.mark(BACKWARD_ENDS, at)
    at += more
    recorder.optimizer_begins(optimizer)
    recorder.mark(STEP_BEGINS, at)
    at += optimizing
    recorder.optimizer_ends(optimizer, at)
    return at


LENGTHS = st.tuples(*[st.integers(0, 10**10)] * 6)


@given(st.lists(st.tuples(LENGTHS, st.booleans()), min_size=3, max_size=6))
def test_a_plain_record_tells_the_same_times_as_the_timeline(steps: list[tuple[tuple[int, ...], bool]]) -> None:
    """The boundaries in the record, worked out by the reader, are what the replayed timeline would have said."""
    plain, replayed = _run(steps, timed_plainly=True), _run(steps, timed_plainly=False)
    assert [record.kind for record in plain] == [RecordKind.STEP] * len(steps)
    for record, other in zip(plain, replayed, strict=True):
        assert record.phase_s == pytest.approx(other.phase_s, rel=1e-6, abs=1e-9)
        assert record.duration_s == pytest.approx(other.duration_s, rel=1e-9, abs=1e-9)
        assert (record.step, record.end_ns, record.flags) == (other.step, other.end_ns, other.flags)


def _run(steps: list[tuple[tuple[int, ...], bool]], *, timed_plainly: bool) -> list[StepRecord]:
    writer, memory = recorded()
    recorder, optimizer, at = StepRecorder(writer), Optimizer(), 10**12
    recorder.plain.timed = True
    for lengths, loader in steps:
        recorder.plain.clean = recorder.plain.clean and timed_plainly
        at = step(recorder, optimizer, at, lengths, loader=loader)
    recorder.flush()
    return _records(writer, memory)


def _records(writer: FlightWriter, memory: RecordingMemory) -> list[StepRecord]:
    unpacked = [unpack(data, writer.header.seed) for _, data in memory.stores if len(data) == RECORD_SIZE]
    return [record for record in unpacked if record is not None]


@pytest.mark.parametrize("kept_seed", [0, 1, 20])
def test_fresh_models_of_one_step_each_are_a_step_each(kept_seed: int) -> None:
    """Once the optimizers before are deleted, for which one that another thread keeps delays them; but the last step."""

    def fresh() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    writer, memory = recorded()
    recorder, at, holds, optimizer = StepRecorder(writer), 10**12, list[object](), fresh()
    for seed, count in ((0, 10), *((seed, 1) for seed in range(1, 31))):
        for _ in range(count):
            at = step(recorder, optimizer, at, (0, 0, 1, 1, 1, 1), loader=False)
        if seed == kept_seed:
            holds.append(optimizer)
        elif seed == kept_seed + 5:
            holds.clear()
        optimizer = fresh()
    recorder.flush()
    numbers = [record.step for record in _records(writer, memory) if record.kind == RecordKind.STEP]
    assert numbers == list(range(1, 40))


@given(st.permutations("ABC"), st.integers(1, 3), st.lists(st.integers(0, 2), min_size=3, max_size=3), st.integers(1, 5))
def test_a_round_of_optimizers_is_a_step(order: list[str], players: int, passes: list[int], rounds: int) -> None:
    """In whichever order they step, after one backward pass or several each, or two of them after one."""
    writer, memory = recorded()
    recorder, optimizers, at = StepRecorder(writer), {name: Optimizer() for name in order}, 10**12
    for _ in range(rounds):
        for player, name in enumerate(order[:players]):
            for _ in range(max(passes[player], player == 0)):
                recorder.mark(BACKWARD_BEGINS, at := at + 1)
                recorder.mark(BACKWARD_ENDS, at := at + 1)
            recorder.optimizer_begins(optimizers[name])
            recorder.mark(STEP_BEGINS, at := at + 1)
            recorder.optimizer_ends(optimizers[name], at := at + 1)
    recorder.flush()
    assert [record.step for record in _records(writer, memory)] == list(range(1, rounds + 1))
