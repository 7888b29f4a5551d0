"""Running a compiled part of a model once more changes nothing of the training, and is left out where it might."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.output_graph import OutputGraph
from torch.overrides import TorchFunctionMode

import torchobs
from tests.diagnosis.compiled_nets import (
    FILTERS,
    LINES,
    WIDTH,
    Block,
    Net,
    ill_block,
    ill_model,
    made,
    refused,
    told,
    train,
    train_to_bad_gradients,
)
from tests.training import Recording, recording
from torchobs.probes.nonfinite.graph_run import GraphRun

pytestmark = [*FILTERS, pytest.mark.usefixtures("fresh_compiler")]


def test_without_its_argument_nothing_is_run_again(run: Recording) -> None:
    """Nobody keeps it: neither the script nor the graph."""
    model, called = ill_model()
    model.first.requires_grad_(False)  # noqa: FBT003  # the graph would keep its input
    called(torch.randn(6, 4)).square().mean().backward()
    refused(run)


def test_with_a_changed_argument_nothing_is_run_again(run: Recording) -> None:
    """What the values came from is not what is there now."""
    _, called = ill_model()
    x = torch.randn(6, 4)
    loss = called(x).square().mean()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
    refused(run)


def test_hooks_on_all_modules_are_not_called(run: Recording) -> None:
    """They are the user's, and no part of a graph."""
    fired = list[int]()
    _, called = ill_model()
    x = torch.randn(6, 4)
    loss = called(x).square().mean()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: fired.append(1))
    loss.backward()
    handle.remove()
    assert told(run)["operator"] == "log"
    assert fired == []


@torch.library.custom_op("torchobs_test::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    """An operator of a library, of which nobody knows what it does: this one waits for the other ranks."""
    REACHED.append("operator")
    result = x.clone()
    dist.all_reduce(result)
    return result


summed.register_fake(torch.empty_like)


summed.register_autograd(lambda _, gradient: gradient)


REACHED: list[str] = []


class Effects(Net):
    """Does more than to compute."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.others = what, torch.zeros(1)
        self.blocks[1] = ill_block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 3)``."""
        if self.what == "operator":
            x = summed(x)
        if self.what == "collective":
            x = dist._functional_collectives.all_reduce(x, "sum", dist.distributed_c10d._get_default_group())
        if self.what == "writing":
            self.others.add_(1)
        return super().forward(x)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("what", ["operator", "collective", "writing"])
def test_a_run_does_not_begin_that_others_would_notice(run: Recording, what: str) -> None:
    """What another rank would have to call, too, and what writes to a tensor that was there before."""
    REACHED.clear()
    model = Effects(what)
    x = torch.randn(6, 4)
    torch.compile(model, backend="aot_eager")(x).square().mean().backward()
    refused(run)
    assert (len(REACHED), float(model.others)) == (what == "operator", what == "writing")


CALLS: list[int] = []


counted = 0


class Counting(Net):
    """Leaves traces wherever Python can."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.note = CALLS.append
        self.blocks[1] = ill_block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 3)``."""
        global counted  # noqa: PLW0603  # that is what it is about
        counted += 1
        Counting.calls += 1
        self.note(1)
        return super().forward(x)


def test_effects_of_the_code_are_not_repeated(run: Recording) -> None:
    """A global variable, an attribute of a class and a list elsewhere are as without torchobs."""
    x, model = torch.randn(6, 4), Counting()
    torch.compile(model, backend="aot_eager")(x).square().mean().backward()
    assert told(run)["operator"] == "log"
    assert (counted, Counting.calls, CALLS) == (1, 1, [1])


def state(model: nn.Module) -> list[Any]:
    """Everything that a run could have changed."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    bits = [each.detach().reshape(-1).view(torch.uint8).tolist() for each in tensors]
    return [bits, torch.get_rng_state().tolist(), random.getstate()]


class Logs(Net):
    """Says something in its forward pass, and remembers its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its base."""
        self.calls += 1
        torchobs.event("called")
        return super().forward(x)


@pytest.mark.parametrize(("way", "sickness"), [("whole", "log"), ("blocks", "log"), ("whole", "sqrt")])
def test_training_is_as_without_torchobs(flight_dir: Path, way: str, sickness: str) -> None:
    """Weights, gradients, statistics, random states and the models' own counts are those of a run without torchobs.

    Users' hooks are not called, and nothing is compiled again.
    """

    def once() -> tuple[list[Any], int, int, int]:
        torch.manual_seed(0)
        random.seed(0)
        torch._dynamo.reset()
        model = Logs(way)
        called: Any = torch.compile(model, backend="aot_eager") if way == "whole" else model
        hooked: list[int] = []
        model.last.register_forward_hook(lambda *_: hooked.append(1))
        torch._dynamo.utils.counters.clear()
        if sickness in LINES:
            train(model, called, sickness, steps=6)
        else:
            train_to_bad_gradients(model, called, sickness)
        return state(model), model.calls, len(hooked), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    plain = once()
    recorder = recording(flight_dir, log_level="ERROR", grad_interval=1)
    run = next(recorder)
    assert once() == plain
    assert told(run)["operator"] == sickness
    assert len(run.frames("called")) == (0 if way == "whole" else plain[1])  # nothing is recorded within compiled code
    next(recorder, None)


class Annealed(nn.Module):
    """Counts its calls in a buffer, which the loss of the script uses."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to the same; NaN for large numbers."""
        self.weight.add_(0.01)
        h = self.linear(x)
        return torch.as_tensor(torch.log(h.abs() * (1 - (x.abs().max() > 1e9).float() * 2)))


def test_a_buffer_that_the_loss_has_used_keeps_its_version(run: Recording) -> None:
    """Else the backward pass of the user's, which follows, would raise."""
    model = Annealed()
    called: Any = torch.compile(model, backend="aot_eager")
    x = torch.full((6, 4), 1e10)
    (model.weight * called(x).mean(0)).sum().backward()
    assert told(run)["operator"] == "log"
    assert float(model.weight) == pytest.approx(0.01)


class Features(NamedTuple):
    """What an encoder makes."""

    h: torch.Tensor


class Head(nn.Module):
    """Takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), [0]

    def forward(self, given: Features) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 1)``; the derivative is infinite."""
        return torch.as_tensor(torch.sqrt(self.linear(given.h).relu() * 0))


def test_the_graph_that_an_argument_comes_from_is_left_alone(flight_dir: Path) -> None:
    """Neither hooks of the user's run, nor is it freed: another backward pass goes through it."""
    recorder = recording(flight_dir, log_level="ERROR", grad_interval=1)
    run = next(recorder)
    encoder, head, fired = nn.Linear(4, 4), Head(), list[int]()
    called: Any = torch.compile(head, backend="aot_eager")
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    features = Features(encoder(torch.randn(6, 4)).tanh())
    features.h.register_hook(lambda _: fired.append(1))  # type: ignore[no-untyped-call]
    called(features).sum().backward(retain_graph=True, inputs=list(head.parameters()))
    optimizer.step()
    assert fired == []
    assert told(run)["operator"] == "sqrt"
    features.h.sum().backward()  # type: ignore[no-untyped-call]
    next(recorder, None)


def test_few_calls_are_repeated_where_none_is_the_cause(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch in each step; the derivative that is infinite lies outside."""
    runs, recorder = list[int](), recording(flight_dir, log_level="ERROR", grad_interval=1)
    run, plain, x = next(recorder), GraphRun.run, torch.randn(6, 4)
    model, called = made("whole")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def again(self: GraphRun, *args: Any) -> Any:
        runs.append(1)
        return plain(self, *args)

    monkeypatch.setattr(GraphRun, "run", again)
    for number in range(20):
        out = called(x)
        optimizer.zero_grad()
        loss = out.square().mean()
        if number == 19:
            loss = loss + (out * 0).square().sum().sqrt()
        loss.backward()
        optimizer.step()
    assert told(run)["operator"] == "sqrt"
    assert 1 <= len(runs) <= 3
    next(recorder, None)


def test_dynamo_traces_through_what_is_watched(run: Recording) -> None:
    """A function that calls compiled modules is one graph with torchobs, as it is without."""
    block, other = Block(), Block()
    block.compile(backend="aot_eager")
    wrapped = torch.compile(other, backend="aot_eager")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(wrapped(block(x)).square().mean())

    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        loss_of(torch.randn(6, WIDTH)).backward()  # type: ignore[no-untyped-call]
    assert not torch._dynamo.utils.counters["graph_break"]
    run.look()


def test_nothing_is_kept_alive_and_nothing_stays(flight_dir: Path) -> None:
    """Neither batch nor output; after the session Dynamo is its own again, and a graph that it has compiled notes nothing."""
    own = OutputGraph.call_user_compiler
    recorder = recording(flight_dir, log_level="ERROR")
    run = next(recorder)
    assert OutputGraph.call_user_compiler is not own
    block = Block()
    block.compile(backend="aot_eager")
    for called in (block, torch.compile(Block(), backend="aot_eager")):
        x = torch.randn(6, WIDTH)
        called(x).mean().backward()
        del x
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (6, WIDTH)]
    run.look()
    next(recorder, None)
    assert OutputGraph.call_user_compiler is own
    block(torch.randn(6, WIDTH)).mean().backward()
    died = ref(block)
    del block, called
    torch._dynamo.reset()
    gc.collect()
    assert died() is None


def test_what_the_user_has_put_around_a_call_is_not_called(run: Recording) -> None:
    """A mode that refuses what it does not know, by an exception of its own; hooks on what a backward pass keeps."""

    class Strict(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if function == torch.Tensor._version.__get__:  # type: ignore[attr-defined]  # a property in C
                raise AssertionError
            return function(*args, **(kwargs or {}))

    x, packed = torch.randn(6, 4), list[int]()
    model, called = ill_model()
    with Strict():
        loss = called(x)
    loss = loss.square().mean()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss.backward()
    del model
    refused(run)
    assert packed == []


def test_an_index_that_the_call_has_moved_is_not_used(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pointer into a queue: on a device it would be out of range, and end the program."""
    runs = list[Any]()
    monkeypatch.setattr(GraphRun, "run", lambda *given: runs.append(given))

    class Queue(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("place", torch.zeros((), dtype=torch.long))
            self.blocks[1] = ill_block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            place: Any = self.place
            h = super().forward(x) + torch.ones(2).index_select(0, place.view(1))
            place.add_(2)
            return h

    model, x = Queue(), torch.randn(6, 4)
    torch.compile(model, backend="aot_eager")(x).square().mean().backward()
    refused(run)
    assert runs == []
