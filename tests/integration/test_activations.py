"""What level extreme adds to advanced: statistics of every layer's outputs, which disturb nothing."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests import fork_server
from tests.training import Extreme, by_hand, hooks, loss_of, outputs_of, perceptron, recording, trainer
from torchobs import catalog
from torchobs.detect.learning import LASTING_STEPS
from torchobs.tensors.statistics import ActivationStats, combine, numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.training import Recording


class Convolutional(nn.Module):
    """Two convolutions and a head; the activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        found: torch.Tensor = self.head(self.body(images).mean((2, 3)))
        return found


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the next block."""
        normed = self.norm(values)
        values = values + self.attention(normed, normed, normed, need_weights=False)[0]
        found: torch.Tensor = values + self.feed(values)
        return found


class Gpt(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(50, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        found: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return found


def model_and_inputs(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch."""
    torch.manual_seed(0)
    if kind == "mlp":
        return perceptron(), torch.randn(32, 8)
    if kind == "cnn":
        return Convolutional(), torch.randn(4, 3, 10, 10)
    return Gpt(), torch.randint(0, 50, (2, 7))


@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_statistics_are_those_computed_by_hand(extreme: Extreme, kind: str) -> None:
    """Of every layer that computes anything; an activation in place is looked at after it."""
    model, inputs = model_and_inputs(kind)
    step = trainer(model, inputs)
    extreme.start(step)
    step(4)
    found = extreme.stats()
    names = {
        "mlp": {"0", "1", "2"},
        "cnn": {"body.0", "body.1", "body.2", "body.3", "body.4", "head"},
        "gpt": {
            *("embedding", "head"),
            *(f"blocks.{n}.{name}" for n in (0, 1) for name in ("norm", "attention", "feed.0", "feed.1", "feed.2")),
        },
    }[kind]
    assert found.keys() == names
    for name in names - {"body.1"}:  # what ReLU has changed in place
        output: Any = outputs_of(model, inputs, model.get_submodule(name))
        expected = by_hand(output[0] if isinstance(output, tuple) else output)
        assert found[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert kind == "gpt" or any(0.1 < each["zero"] < 0.9 for each in found.values())


def test_values_that_are_not_finite_do_not_hide_the_others(extreme: Extreme) -> None:
    """They are a share of their own."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    inputs = torch.randn(32, 8)
    inputs[3, 0], inputs[5, 0] = float("nan"), float("inf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(_index: int) -> None:
        model(inputs).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)  # even a learning rate of 0 times NaN is NaN
        optimizer.step()

    extreme.start(step)
    step(4)
    output = outputs_of(model, inputs, model[0])
    assert extreme.stats()["0"] == pytest.approx(by_hand(output), rel=1e-4)
    assert by_hand(output)["nonfinite"] == 2 / 32


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_not_counted(extreme: Extreme, reentrant: bool) -> None:  # noqa: FBT001
    """The first forward pass alone is looked at, which runs without grad in one of both kinds."""
    model = perceptron()
    inputs = torch.randn(32, 8, requires_grad=True)

    def call(values: torch.Tensor) -> Any:
        return checkpoint(model, values, use_reentrant=reentrant)

    step = trainer(model, inputs, call)
    extreme.start(step)
    step(4)
    extreme.stats()
    taken = {name: stats.elements for name, stats in extreme.probe._latest[1].items()}
    assert taken == {"0": 32 * 16, "1": 32 * 16, "2": 32}


def test_evaluation_is_not_counted(extreme: Extreme) -> None:
    """Neither one in evaluation mode, nor one that has forgotten it."""
    model = perceptron()
    inputs = torch.randn(32, 8)
    step = trainer(model, inputs)
    extreme.start(step)
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            for _ in range(9):
                model(torch.full((4, 8), 1e3))
    model(torch.full((4, 8), 1e3))  # in evaluation mode, with grad
    model.train()
    step(4)
    assert extreme.stats()["0"] == pytest.approx(by_hand(model[0](inputs)), rel=1e-4)


class Wild(nn.Module):
    """Draws random numbers, checkpoints, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.drop, self.act = nn.Dropout(0.3), nn.ReLU(inplace=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return one number for each row."""
        values = self.act(self.first(values))
        values = checkpoint(lambda one: self.drop(self.act(self.second(one))), values, use_reentrant=False)
        found: torch.Tensor = self.last(values)
        return found


def trained(look: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
    """Weights and random state after some steps of everything that might be disturbed."""
    torch.manual_seed(5)
    model = Wild()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(30):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if index == 4:
            look()
    return [*model.parameters(), torch.get_rng_state()]


def test_training_is_the_same_to_the_last_bit(flight_dir: Path) -> None:
    """Weights and the state of the random numbers, with looks at many steps and without torchobs."""
    expected = trained()
    for run in recording(flight_dir, level="extreme", overhead_budget=0.2):
        extreme = Extreme(run)

        assert all(map(torch.equal, trained(extreme.look_at_every_step), expected))
        run.look()
        assert extreme.probe._latest[0] >= 10


def test_ddp_s_modules_are_those_within_it(extreme: Extreme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names of their gradients, and nothing is sent to other ranks for it."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs forget it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(perceptron())
        inputs = torch.randn(4, 8)
        step = trainer(model, inputs)
        extreme.start(step)
        for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object"):
            monkeypatch.delattr(dist, name)
        step(4)
        found = extreme.stats()
        gradients = {key[1] for key in extreme.run.values() if key[0] == catalog.GRAD_LAYER_NORM.name}
        assert gradients == {"0", "2"} <= found.keys() == {"0", "1", "2"}
        assert found["0"] == pytest.approx(by_hand(model.module[0](inputs)), rel=1e-4)
    finally:
        dist.destroy_process_group()


def test_hooks_go_with_the_window_the_level_and_the_session(flight_dir: Path) -> None:
    """They are there in a window, and gone when the level is lowered; shutdown in the midst of one leaves none."""
    model = perceptron()
    step = trainer(model, torch.randn(4, 8))
    for run in recording(flight_dir, level="extreme"):
        extreme = Extreme(run)
        extreme.start(step)
        assert hooks(model) == 3
        assert run.session.context is not None
        run.session.context.hooks.level.value = 2
        run.look()
        step(4)
        assert hooks(model) == 0
        run.session.context.hooks.level.value = 3
        run.look()
        for index in range(3):
            step(index)
            run.look()
        assert hooks(model) == 3
    assert hooks(model) == 0


def test_a_copy_of_a_model_with_hooks_can_be_loaded_without_torchobs(extreme: Extreme) -> None:
    """Saved as a whole in the midst of a window, and copied: both have no part in it."""
    model = perceptron()
    inputs = torch.randn(4, 8)
    step = trainer(model, inputs)
    extreme.start(step)
    assert hooks(model) == 3
    kept = io.BytesIO()
    torch.save(model, kept)
    names = {str(name) for name in pickle.dumps(model).split(b"\n") if b"torchobs" in name}
    assert not names
    assert b"torchobs" not in kept.getvalue()
    twin = copy.deepcopy(model)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=False)
    for other in (twin, loaded):
        other(inputs * 100).sum()
    step(4)
    assert extreme.stats()["0"] == pytest.approx(by_hand(model[0](inputs)), rel=1e-4)


def test_an_evaluation_of_torch_s_own_transformer_is_as_fast_and_as_exact(extreme: Extreme) -> None:
    """Its layers have no hooks, for with one they would take another way; the encoder as a whole is looked at."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    inputs = torch.randn(2, 5, 8)
    step = trainer(model, inputs)
    extreme.start(step)
    assert hooks(model[1].layers) == 0  # type: ignore[arg-type]  # a module
    step(4)
    assert extreme.stats().keys() == {"0", "1"}


def test_an_operation_of_ours_is_in_no_graph_and_no_cache(extreme: Extreme) -> None:
    """Selective checkpointing caches operators in their order, and ``torch.func`` has tensors that end with their level."""
    model = perceptron()
    inputs = torch.randn(4, 8)
    seen: list[str] = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def call(values: torch.Tensor) -> Any:
        with Watching():  # type: ignore[no-untyped-call]
            found = model(values)
        torch.func.vmap(model)(values)
        with pytest.warns((DeprecationWarning, FutureWarning), match="trace"):  # the latter since torch 2.14
            torch.jit.trace(model, (values,), check_trace=False)  # type: ignore[no-untyped-call]
        return found

    with Watching():  # type: ignore[no-untyped-call]
        model(inputs)
    expected, seen[:] = list(seen), []
    step = trainer(model, inputs, call)
    extreme.start(step)
    step(4)
    assert seen == expected * 6
    assert extreme.stats() == {}


def stats(*outputs: torch.Tensor) -> ActivationStats:
    """The statistics of some calls."""
    rows = [numbers(output) for output in outputs]
    return combine([(row.double().tolist(), count) for row, count in rows])


@pytest.fixture
def wide(flight_dir: Path) -> Iterator[Recording]:
    """A recording at level extreme that may look often."""
    torch.manual_seed(0)
    yield from recording(flight_dir, level="extreme", overhead_budget=0.2)


def told(run: Recording, model: nn.Module, inputs: torch.Tensor) -> list[dict[str, Any]]:
    """Train on new inputs of that shape; what is told."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for number in range(4 * LASTING_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn_like(inputs)).square().mean())
        optimizer.step()
        if number % 10 == 0:
            run.look()
    run.look()
    return run.attributes(catalog.EVENT_DEAD_UNITS.name)


def weaken(layer: Any, count: int) -> None:
    """Kill the first units behind a layer."""
    with torch.no_grad():
        layer.bias[:count] -= 100.0


def test_most_units_of_a_layer_are_dead(wide: Recording) -> None:
    """Told once, with how many."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    weaken(model[2], 12)
    (found,) = told(wide, model, torch.empty(64, 8))
    assert {name: found[name] for name in ("layer", "units_dead", "units")} == {"layer": "3", "units_dead": 12, "units": 16}


def test_channels_of_an_image(wide: Recording) -> None:
    """Ten of sixteen; of the other layer all fire, in some places."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    weaken(model[0], 10)
    (found,) = told(wide, model, torch.empty(32, 1, 6, 6))
    assert (found["layer"], found["units_dead"]) == ("1", 10)


def test_units_that_fire_seldom_are_alive(wide: Recording) -> None:
    """Each for one sample in forty; and a hinge is no unit."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.ReLU())
    first: Any = model[0]
    with torch.no_grad():
        first.weight.copy_(torch.eye(16, 8) + torch.eye(16, 8).roll(8, 0))
        first.bias.fill_(-2.0)
    assert told(wide, model, torch.empty(64, 8)) == []


COMPILED = """
import sys, torch, tempfile, json
from torch import nn
import torch._dynamo.utils as utils
import torchobs
kind, level = sys.argv[1:]
torch.compile(lambda value: value + 1, backend="eager")(torch.ones(2))  # something else was compiled in this process
session = torchobs.init(flight_dir=tempfile.mkdtemp(), level=level)
sampler = session._sampler
sampler.stop()
sampler._thread.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
call = model
if kind == "whole":
    call = torch.compile(model, backend="eager", fullgraph=True)
elif kind == "function":
    call = torch.compile(lambda values: model(values), backend="eager", fullgraph=True)
elif kind == "submodule":
    model[2] = torch.compile(model[2], backend="eager", fullgraph=True)
def step(index):
    optimizer.zero_grad()
    call(torch.full((4, 8), float(index))).square().mean().backward()
    optimizer.step()
for index in range(4):
    step(index)
sampler.round(last=True)
warm = len(utils.get_compilation_metrics())
probe = session._probe_manager._probes["activations"]
probe._pace.fixed = probe._pace.interval = 1
for index in range(24):
    if kind == "late" and index == 3:  # while a window is open
        call = torch.compile(lambda values: model(values), backend="eager", fullgraph=True)
    step(index)
sampler.round(last=True)
errors = [str(one.failures) for one in session.context.breakers.values() if one.errors]
told = dict(zip(("layers", "left_out", "compiled", "silent"), getattr(probe, "_reported", ()) or ()))
layers = sorted(probe._latest[1]) if probe._latest else []
more = len(utils.get_compilation_metrics()) - warm
print(json.dumps([more, sum(utils.counters["graph_break"].values()), layers, told, errors]))
"""


def run_compiled(kind: str) -> Any:
    """What a training of that kind says at its end."""
    found = fork_server.run(
        [sys.executable, "-c", COMPILED, kind, "extreme"], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("kind", "layers", "told"),
    [
        ("none", ["0", "1", "2.0", "2.1", "3"], {"layers": 5, "compiled": 0, "silent": 0}),
        ("whole", [], {"layers": 0, "compiled": 5, "silent": 0}),
        ("function", [], {"layers": 0, "compiled": 0, "silent": 5}),
        ("submodule", ["0", "1", "3"], {"layers": 3, "compiled": 2, "silent": 0}),
    ],
)
def test_nothing_is_compiled_anew_and_what_is_not_looked_at_is_told(kind: str, layers: list[str], told: dict[str, int]) -> None:
    """No compilation and no graph break after the first steps; what is not compiled is looked at though other code is."""
    more, breaks, looked_at, said, errors = run_compiled(kind)
    assert (more, breaks, errors) == (0, 0, [])
    assert looked_at == layers
    assert {name: said[name] for name in told} == told


def test_what_is_compiled_under_our_hooks_is_whole_and_compiled_once_more_at_most() -> None:
    """A hook is nothing in a graph; when it is gone, the graph is made again, and hooks do not come back."""
    more, breaks, _, said, errors = run_compiled("late")
    assert (breaks, errors) == (0, [])
    assert 1 <= more <= 2
    assert said["silent"] == 5
