"""A NaN that is born inside a compiled part of a model is traced to its operator, by running that part without the compiler."""

from __future__ import annotations

import gc
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.output_graph import OutputGraph
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import torchobs
from tests import support
from tests.training import Recording, recording
from torchobs import catalog
from torchobs.probes.nonfinite.eager_replay import NOTE
from torchobs.probes.nonfinite.graph_run import GraphRun

if TYPE_CHECKING:
    from collections.abc import Iterator

AT, WIDTH = 3, 8
LINES = {"log": "torch.log(", "div": "h / (", "acos": "torch.acos("}
BACKWARD_LINES = {"sqrt": "torch.sqrt(", "pow": "torch.pow("}
WAYS = ("whole", "in_place", "blocks", "blocks_in_place")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's, of a graph that begins within a graph
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]


class Block(nn.Module):
    """A residual block with dropout, that can be ill; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop, self.ill = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), ""
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, WIDTH)`` to the same."""
        h = self.drop(self.linear(self.norm(x)))
        if self.ill == "log":
            h = h + torch.log(-1 - h.abs())
        if self.ill == "div":
            h = h / (h - h.detach())
        if self.ill == "acos":
            h = h + torch.acos(2 + h.abs())
        if self.ill == "sqrt":
            h = h + torch.sqrt(h.relu() * 0)
        if self.ill == "pow":
            h = h + torch.pow(h.relu() * 0, 0.5)
        return torch.as_tensor(x + h)


class Net(nn.Module):
    """Blocks between two layers, with batch normalisation."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if way == "in_place":
            self.compile(backend="aot_eager")
        for index, block in enumerate(list(self.blocks)):
            if way == "blocks":
                self.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
            elif way == "blocks_in_place":
                block.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 3)``."""
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return torch.as_tensor(self.last(self.norm(h)))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing of another test's is compiled, or counted."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording."""
    yield from recording(flight_dir, log_level="ERROR")


def made(way: str) -> tuple[Net, Any]:
    """The model, and what is called."""
    model = Net(way)
    return model, torch.compile(model, backend="aot_eager") if way == "whole" else model


def train(model: nn.Module, called: Any, sickness: str = "", *, steps: int = 4) -> None:
    """Train; ``sickness``: of the second block, or of a sample of the batch, or of a weight, in the third step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number in range(1, steps + 1):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        ill = sickness if number == AT else ""
        blocks[1].ill = ill if ill in LINES else ""
        if ill == "input":
            x[3, 1] = float("nan")
        loss = functional.cross_entropy(called(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if number != AT:
            optimizer.step()


def told(run: Recording) -> dict[str, Any]:
    """What was said, once."""
    run.look()
    assert run.frames(catalog.EVENT_PROBE_DISABLED.name) == []
    (frame,) = run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)
    return {"step": frame["step"], **frame["attrs"]}


def source_line(words: str) -> str:
    """``file:line`` of this file's line of code with these words."""
    with Path(__file__).open(encoding="utf-8") as file:
        number = next(place for place, line in enumerate(file, 1) if f"h = {words}" in line or f"h + {words}" in line)
    return f"{__file__}:{number}"


@pytest.mark.parametrize(("way", "sickness"), [*zip(WAYS, ("log", "div", "acos", "log"), strict=True)])
def test_the_operator_within_is_named_with_its_line(run: Recording, way: str, sickness: str) -> None:
    """Promise: in the step of its birth, for a model compiled as a whole, in place, or by blocks; and it is said how."""
    train(*made(way), sickness)
    found = told(run)
    assert (found["step"], found["origin"], found["operator"], found["module"]) == (AT, "operator", sickness, "blocks.1")
    assert (found["location"], found["note"]) == (source_line(LINES[sickness]), NOTE)
    assert found["inputs"]


def test_what_the_inductor_has_compiled_is_run_again(run: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own code for the operators, and its own random numbers for dropout."""
    if shutil.which("g++") is None:
        pytest.skip(support.NEEDS_COMPILER)
    block, x = Block(), torch.randn(6, WIDTH)
    block.ill = "log"
    called = torch.compile(block)
    with support.quick_inductor(tmp_path, monkeypatch):
        called(x).square().mean().backward()
    found = told(run)
    assert (found["operator"], found["module"], found["note"]) == ("log", "Block", NOTE)


def train_to_bad_gradients(model: nn.Module, called: Any, sickness: str, *, clips: bool = False) -> None:
    """Train in a function of its own; of the third step the loss is finite, and gradients are not. ``sickness``: as above."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number in range(1, AT + 1):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        blocks[1].ill = sickness if number == AT else ""
        optimizer.zero_grad()
        functional.cross_entropy(called(x), y).backward()  # type: ignore[no-untyped-call]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize(("way", "sickness"), [*zip(WAYS, BACKWARD_LINES, strict=False)])
def test_the_operator_whose_derivative_is_infinite_is_named(
    flight_dir: Path,
    way: str,
    sickness: str,
    clips: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """The loss is finite; no variable holds it any more as the optimizer steps."""
    recorder = recording(flight_dir, log_level="ERROR", grad_interval=1)
    run = next(recorder)
    train_to_bad_gradients(*made(way), sickness, clips=clips)
    found = told(run)
    assert (found["step"], found["origin"], found["operator"], found["module"]) == (AT, "backward", sickness, "blocks.1")
    assert (found["location"], found["note"]) == (source_line(BACKWARD_LINES[sickness]), NOTE)
    next(recorder, None)


def test_gradients_that_an_eager_part_spoils_are_not_blamed_on_a_compiled_one(flight_dir: Path) -> None:
    """Its own backward pass, run again, is finite."""
    recorder = recording(flight_dir, log_level="ERROR", grad_interval=1)
    run = next(recorder)
    model, called = made("whole")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(1, AT + 1):
        out = called(torch.randn(6, 4))
        optimizer.zero_grad()
        loss = out.square().mean()
        if number == AT:
            loss = loss + (out * 0).square().sum().sqrt()
        loss.backward()
        optimizer.step()
    found = told(run)
    assert (found["step"], found["origin"], found["operator"]) == (AT, "backward", "sqrt")
    next(recorder, None)


def test_a_bad_sample_of_a_compiled_model_is_named(run: Recording) -> None:
    """Its batch goes into nothing but the compiled graph."""
    train(*made("whole"), "input")
    found = told(run)
    assert (found["origin"], found["parameter"], found["sample"], found["step"]) == ("input", "x", 3, AT)


def test_a_bad_parameter_of_a_compiled_model_is_named(run: Recording) -> None:
    """As in an eager one."""
    model, called = made("whole")
    model.get_parameter("blocks.2.linear.weight").data[0, 0] = float("nan")
    train(model, called, steps=1)
    found = told(run)
    assert (found["origin"], found["parameter"]) == ("parameter", "blocks.2.linear.weight")


class Half(nn.Module):
    """Overflows in float16, and only there."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(4, 4), nn.Linear(4, 1)
        nn.init.constant_(self.wide.weight, 3e4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 1)``."""
        return torch.as_tensor(self.out(torch.tanh(self.wide(x) * 1e-6) + self.wide(x) * 0))


def test_the_autocast_of_the_call_is_that_of_the_run(run: Recording) -> None:
    """What is not finite in float16 would be in float32; the backward pass begins outside of autocast."""
    called, x = torch.compile(Half(), backend="aot_eager"), torch.ones(6, 4)
    with torch.autocast("cpu", torch.float16):
        out = called(x)
    out.float().mean().backward()
    found = told(run)
    assert found["note"].endswith(NOTE)
    assert "float16" in found["inputs"][0]
    assert found["operator"] != "compiled_function"


def test_of_two_calls_the_one_that_made_it_is_run_again(run: Recording) -> None:
    """One model is called twice in each step, and only the second call is given a bad sample."""
    _, called = made("whole")
    good, second = torch.randn(6, 4), torch.randn(6, 4)
    second[2, 0] = float("inf")
    (called(good).square().mean() + called(second).square().mean()).backward()
    found = told(run)
    assert (found["origin"], found["parameter"], found["sample"]) == ("input", "second", 2)


def refused(run: Recording) -> None:
    """The hint stays as it was."""
    found = told(run)
    assert (found["operator"], "trace_nan" in found["note"]) == ("compiled_function", True)


def ill_model() -> tuple[Net, Any]:
    """One whose next loss is NaN."""
    model, called = made("whole")
    model.blocks[1].ill = "log"  # type: ignore[assignment]
    return model, called


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


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs forget it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ill_block() -> Block:
    """A block that takes the logarithm of negative numbers."""
    block = Block()
    block.ill = "log"
    return block


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


def test_a_compiled_function_is_looked_into(run: Recording) -> None:
    """It is no module; the parameter is an argument."""
    x, weight = torch.randn(6, 4), nn.Parameter(torch.randn(4, 3))

    @torch.compile(backend="aot_eager")
    def loss_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = x @ weight
        h = h + torch.log(-1 - h.abs())
        return h.mean()

    loss_of(x, weight).backward()  # type: ignore[no-untyped-call]
    found = told(run)
    assert (found["operator"], found["note"]) == ("log", NOTE)
    assert found["location"].startswith(f"{__file__}:")


class Interrupted(Net):
    """Two graphs, as Dynamo cannot go on in between; the blocks are recomputed in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 3)``."""
        h = self.first(x)
        torch._dynamo.graph_break()
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return torch.as_tensor(self.last(self.norm(h)))


def test_the_second_of_two_graphs_is_run_again_and_what_it_recomputes(run: Recording) -> None:
    """From what the first one has handed it."""
    model = Interrupted()
    train(model, torch.compile(model, backend="aot_eager"), "log")
    found = told(run)
    assert (found["operator"], found["module"], found["step"]) == ("log", "blocks.1", AT)
    assert (found["location"], found["note"]) == (source_line(LINES["log"]), NOTE)


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


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", ["around", "within"])
def test_a_model_of_ddp_is_run_without_it(run: Recording, way: str) -> None:
    """No collective is called: of one rank the other one would know nothing."""
    model = Net()
    called: Any = DistributedDataParallel(torch.compile(model, backend="aot_eager") if way == "around" else model)
    train(model, called if way == "around" else torch.compile(called, backend="aot_eager"), "log")
    found = told(run)
    assert (found["operator"], found["module"], found["step"]) == ("log", "blocks.1", AT)


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
