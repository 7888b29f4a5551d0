"""Every way to train is counted right: steps, replays, threads, several models, and what is no step at all."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.diagnosis import test_healthy_zoo as zoo
from tests.diagnosis.observing import Enough
from tests.training import Recording, StepFlag, loss_of, mlp, recording
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train plainly."""
    for index in range(steps):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Steps:
    """Ends a training of the zoo after so many steps."""

    def __init__(self, most: int) -> None:
        self.left = most

    def stepped(self) -> None:
        self.left -= 1
        if not self.left:
            raise Enough


def recomputed(look: Any) -> None:
    """Activation checkpointing of both kinds: the reentrant one runs a backward pass within the backward pass."""
    first, second = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Tanh()) for _ in range(2))
    head = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    while True:
        hidden = checkpoint(first, torch.randn(4, 8), use_reentrant=False)
        loss = head(checkpoint(second, hidden, use_reentrant=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look.stepped()


def under_no_sync(look: Any) -> None:
    """DDP that averages gradients in every third backward pass."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    while True:
        for micro in range(3):
            with nullcontext() if micro == 2 else model.no_sync():
                loss_of(model, micro).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        look.stepped()


UNUSUAL: dict[str, tuple[Callable[[Any], None], int]] = {
    "LBFGS with a closure": (zoo.line_search, 40),
    "two players, and a penalty on a gradient": (zoo.wasserstein_gan, 40),
    "a frozen base with low-rank updates": (zoo.low_rank_adapters, 220),
    "double backward": (zoo.meta_learning, 10),
    "recomputed": (recomputed, 40),
    "accumulated under no_sync": (under_no_sync, 20),
}


def losses_of(train: Callable[[Any], None], steps: int) -> list[float]:
    """The loss of each backward pass of so many steps."""
    torch.manual_seed(0)
    random.seed(0)
    losses, backward = list[float](), torch.autograd.backward

    def keep(loss: Any, *more: Any, **options: Any) -> None:
        if isinstance(loss, torch.Tensor):  # and not what a checkpoint goes backward from
            losses.append(loss.item())
        backward(loss, *more, **options)

    with pytest.MonkeyPatch.context() as patch, suppress(Enough):
        patch.setattr(torch.autograd, "backward", keep)
        train(Steps(steps))
    return losses


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_loops_are_left_alone(flight_dir: Path, name: str) -> None:
    """To the last bit the same losses as without torchobs. What is recorded of such steps, `test_golden_steps` compares."""
    expected = losses_of(*UNUSUAL[name])
    for run in recording(flight_dir):
        assert losses_of(*UNUSUAL[name]) == expected
        assert len(run.steps()) >= 10
    assert len(set(expected)) >= 10


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
    pairs = [(record.loss, loss) for record, loss in zip(steps, expected, strict=True) if record.flags & StepFlag.LOSS]
    assert len(pairs) >= 57  # a thread's first backward comes before it is known as the one that trains
    assert all(recorded == loss for recorded, loss in pairs)
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
