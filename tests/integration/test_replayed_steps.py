"""Steps that a CUDA graph replays, on a graph of our own that records nothing and replays what it is told to."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

import torchobs
from tests.training import Recording, loss_of, mlp, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Graph:
    """As ``torch.cuda.CUDAGraph`` looks to its user: between begin and end Python runs, at a replay it does not."""

    def __init__(self, kernels: Callable[[], None]) -> None:
        self.kernels = kernels

    def capture_begin(self, pool: object = None) -> None:
        del pool

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.kernels()


@pytest.fixture
def run(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """A recording on a machine that has graphs."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    yield from recording(flight_dir)


def test_the_sampler_rests_while_a_graph_is_captured(run: Recording) -> None:
    """It keeps the heartbeat, without a garbage collection, which might destroy a graph of the user's; then it goes on."""
    rounds = list[bool]()
    run.session._samples.append(("counting", lambda: rounds.append(True)))
    graph = Graph(lambda: None)
    graph.capture_begin()
    captured = len(rounds)
    run.whole_round()  # two heartbeats
    assert len(rounds) == captured
    assert gc.isenabled()
    graph.capture_end()
    run.whole_round()
    assert len(rounds) > captured


def test_each_replay_of_a_captured_step_is_a_step_with_its_loss(run: Recording) -> None:
    """Warm-up, capture, replays: the capture itself computes nothing, and is none."""
    model = mlp()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), list[float]()

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        return loss

    for number in range(3):
        losses.append(step(number).item())
    graph = Graph(lambda: None)
    graph.capture_begin()
    static = step(0)
    graph.capture_end()

    def kernels() -> None:
        static.data.fill_(losses[-1])

    graph.kernels = kernels
    for number in range(20):
        losses.append(float(number))
        graph.replay()
    losses.append(step(1).item())  # the rest of an epoch, of another size
    steps = run.steps()
    assert [record.loss for record in steps] == losses
    assert all(record.learning_rate == 0.01 for record in steps[1:])


def test_a_graph_without_the_optimizer_leaves_the_steps_to_it(run: Recording) -> None:
    """Forward and backward are replayed, the optimizer steps as ever: each of its steps is one."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of(model).backward()
    optimizer.step()
    graph = Graph(lambda: None)
    graph.capture_begin()
    static = loss_of(model)
    static.backward()
    graph.capture_end()
    for _ in range(10):
        graph.replay()
        optimizer.step()
    assert len(run.steps()) == 11


def test_a_graph_of_something_else_is_nothing(run: Recording) -> None:
    """Inference, or what a compiler captures."""
    graph = Graph(lambda: None)
    graph.capture_begin()
    mlp()(torch.zeros(1, 8))
    graph.capture_end()
    for _ in range(5):
        graph.replay()
    assert run.steps() == []


def test_the_graphs_are_left_as_they_were(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind shutdown nothing of ours is there."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    before = dict(vars(Graph))
    torchobs.init(flight_dir=flight_dir)
    assert vars(Graph)["replay"] is not before["replay"]
    torchobs.shutdown()
    assert dict(vars(Graph)) == before
