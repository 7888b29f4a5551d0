"""Every way to train is counted right: steps, replays, threads, several models, and what is no step at all."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests import support
from tests.training import Recording, StepFlag, has, loss_of, mlp, norm_of, recording
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train plainly."""
    for index in range(steps):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_a_step_that_raised_does_not_hide_the_next(run: Recording) -> None:
    """An exception inside a step leaves no post hook behind; the following steps count."""

    class Fragile(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise RuntimeError("out of memory, say")
            return super().step(closure)

    model = mlp()
    optimizer = Fragile(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    optimizer.broken = True
    with pytest.raises(RuntimeError):
        train(model, optimizer, 1)
    optimizer.broken = False
    train(model, optimizer, 3)
    assert len(run.steps()) == 5


def test_a_closure_that_skips_a_batch_remains_one(run: Recording) -> None:
    """Lightning's automatic optimization, where ``training_step`` may return nothing, be it in the very first step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for index in range(10):

        def closure(index: int = index) -> torch.Tensor | None:
            if index % 4 == 0:
                return None
            optimizer.zero_grad()
            loss = loss_of(model, index)
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(norm_of(model))
            return loss

        optimizer.step(closure)
    measured = [record for record in run.steps() if has(record, StepFlag.CLOSURE) and has(record, StepFlag.GRAD_NORM)]
    assert [record.step for record in measured] == [3, 4, 6, 7, 8, 10]
    assert [record.grad_norm for record in measured] == pytest.approx(norms[1:], rel=1e-4)


def test_a_scaled_loss_divided_for_accumulation_is_unscaled(run: Recording) -> None:
    """``(scaler.scale(loss) / n).backward()`` is no longer the tensor that scale() returned."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    expected = []
    for index in range(3):
        total = 0.0
        for micro in range(2):
            loss = loss_of(model, index + micro)
            (scaler.scale(loss) / 2).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / 2
        expected.append(total)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [record.loss for record in run.steps()] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", ["eval and a loader", "eval", "no_grad"])
def test_an_evaluation_is_what_the_rank_is_said_to_do(run: Recording, how: str) -> None:
    """While it lasts: the exporter is patient in it, however long that is. Training says what it is at, again, after it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    validation = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 1)), batch_size=8)
    seen = []
    for index in range(2):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.train(how == "no_grad")
    with torch.no_grad():
        for inputs, _ in validation if how != "eval" else [(torch.ones(1, 8), None)]:
            model(inputs)
            seen.append(support.wait_until(lambda: run.view().live.phase == "evaluation"))
    model.train()
    optimizer.zero_grad()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    support.wait_until(lambda: run.view().live.phase == "other")
    assert seen == [True]


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
def with_graphs(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """A recording on a machine that has graphs, behind which nothing of ours is in them."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    before = dict(vars(Graph))
    yield from recording(flight_dir)
    assert dict(vars(Graph)) == before


def test_the_sampler_rests_while_a_graph_is_captured(with_graphs: Recording) -> None:
    """It keeps the heartbeat, without a garbage collection, which might destroy a graph of the user's; then it goes on."""
    rounds = list[bool]()
    with_graphs.session._samples.append(("counting", lambda: rounds.append(True)))
    graph = Graph(lambda: None)
    graph.capture_begin()
    captured = len(rounds)
    with_graphs.whole_round()  # two heartbeats
    assert len(rounds) == captured
    assert gc.isenabled()
    graph.capture_end()
    with_graphs.whole_round()
    assert len(rounds) > captured


def test_each_replay_of_a_captured_step_is_a_step_with_its_loss(with_graphs: Recording) -> None:
    """Warm-up, capture, replays: the capture itself computes nothing, and is none."""
    model = mlp()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), list[float]()

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()  # type: ignore[no-untyped-call]
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
    steps = with_graphs.steps()
    assert [record.loss for record in steps] == losses
    assert all(record.learning_rate == 0.01 for record in steps[1:])


def test_a_graph_without_the_optimizer_leaves_the_steps_to_it(with_graphs: Recording) -> None:
    """Forward and backward are replayed, the optimizer steps as ever: each of its steps is one."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    graph = Graph(lambda: None)
    graph.capture_begin()
    static = loss_of(model)
    static.backward()  # type: ignore[no-untyped-call]
    graph.capture_end()
    for _ in range(10):
        graph.replay()
        optimizer.step()
    assert len(with_graphs.steps()) == 11


def train_alone(seed: int, steps: int) -> list[float]:
    """A training of its own; return the losses."""
    model, losses = mlp(seed), list[float]()
    optimizer = torch.optim.Adam(model.parameters())
    for index in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
    return losses


def test_of_two_threads_that_train_at_once_one_is_recorded(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """All of its steps and none of the other's, which is said once."""
    losses, beside, model = list[float](), threading.Event(), mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def other() -> None:
        for seed in range(3):
            train_alone(seed, 40)
        beside.set()

    thread = threading.Thread(target=other, name="second")
    index = 0
    while not beside.is_set() or index < 50:
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        index += 1
        if index == 3:
            thread.start()
    thread.join()
    assert [record.loss for record in run.steps()] == losses
    run.look()
    assert run.attributes(catalog.EVENT_OTHER_THREAD.name) == [{"thread": "second"}]
    assert "second" in caplog.text


def test_threads_that_train_one_after_the_other_are_all_recorded(run: Recording) -> None:
    """Each has ended when the next one begins."""
    expected = list[float]()
    for seed in range(3):
        thread = threading.Thread(target=lambda seed=seed: expected.extend(train_alone(seed, 20)))
        thread.start()
        thread.join()
    steps = run.steps()
    assert len(steps) == 60
    seen = [(record.loss, loss) for record, loss in zip(steps, expected, strict=True) if record.flags & StepFlag.LOSS]
    assert len(seen) >= 57  # a thread's first backward comes before it is known as the one that trains
    assert all(found == loss for found, loss in seen)
    assert run.frames(catalog.EVENT_OTHER_THREAD.name) == []


@pytest.mark.parametrize("stepping", ["backward", "step"])
def test_a_backward_pass_in_another_thread_than_the_step_is_the_steps(run: Recording, stepping: str) -> None:
    """Promise: each is a step, whichever of the two a pool's thread does."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ThreadPoolExecutor(1) as pool:
        for index in range(40):
            optimizer.zero_grad()
            loss = loss_of(model, index)
            if stepping == "backward":
                pool.submit(loss.backward).result()
                optimizer.step()
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                pool.submit(optimizer.step).result()
    assert len(run.steps()) >= 39, "the first may have been in a thread that had not trained yet"


ALL, FIRST, LAST = range(12), range(7), range(5, 12)


@pytest.mark.parametrize(
    "passes",
    [
        [ALL, ALL, ALL, FIRST],
        [ALL, ALL, ALL, LAST, LAST, LAST, ALL],
        [ALL, ALL, ALL, FIRST, FIRST, LAST, ALL, FIRST],
        [ALL, ALL, ALL, range(6), range(6, 12), ALL],
    ],
)
def test_of_optimizers_in_backward_some_may_be_left_out(run: Recording, passes: list[range]) -> None:
    """Layers frozen or unused in a step: it has its own loss, and ends before the next backward."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in ALL)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1e-3) for parameter in model.parameters()}

    def update(parameter: torch.nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    losses = []
    for index, layers in enumerate(passes):
        values = torch.full((2, 4), 0.1 * (index + 1))
        for layer in layers:
            values = torch.tanh(model[layer](values))
        loss = values.square().mean() + index
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    steps = run.steps()
    assert [step.losses for step in steps] == [1] * len(passes)
    assert [step.loss for step in steps] == pytest.approx(losses)


def test_gradients_that_are_dropped_between_backward_passes_add_up_as_before(run: Recording) -> None:
    """Parameters stay as they are between the passes, as with an adversary: all losses are the step's."""
    model, losses = mlp(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(24):
        total = 0.0
        for micro in range(4):
            if index > 12:
                model.zero_grad()
            loss = loss_of(model, micro)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert [step.loss for step in run.steps()] == losses
