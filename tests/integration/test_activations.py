"""What level extreme adds to advanced: statistics of every layer's outputs, which disturb nothing."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import utils
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.training import Extreme, by_hand, hooks, loss_of, outputs_of, perceptron, recording, trainer
from torchobs import catalog
from torchobs.detect.learning import LASTING_STEPS
from torchobs.probes.activations import FiredUnits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Gpt(nn.Module):
    """A small language model of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        values = self.embedding(tokens)
        normed = self.norm(values)
        values = values + self.attention(normed, normed, normed, need_weights=False)[0]
        logits: torch.Tensor = self.head(values + self.feed(values))
        return logits


def convolutional() -> nn.Module:
    """Two convolutions and a head; the first activation in place."""
    body = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU())
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("make", "inputs", "names"),
    [
        (convolutional, torch.randn(4, 3, 10, 10), {*"0123457"}),
        (Gpt, torch.randint(0, 50, (2, 7)), {"embedding", "norm", "attention", "feed.0", "feed.1", "feed.2", "head"}),
    ],
    ids=["cnn", "gpt"],
)
def test_statistics_are_those_computed_by_hand(
    extreme: Extreme, make: Callable[[], nn.Module], inputs: torch.Tensor, names: set[str]
) -> None:
    """Of every layer that computes anything; an activation in place is looked at after it."""
    model = make()
    step = trainer(model, inputs)
    extreme.start(step)
    step(4)
    statistics = extreme.stats()
    assert statistics.keys() == names
    for name in names - ({"1"} if make is convolutional else set()):  # what ReLU has changed in place
        output: Any = outputs_of(model, inputs, model.get_submodule(name))
        expected = by_hand(output[0] if isinstance(output, tuple) else output)
        assert statistics[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert make is Gpt or any(0.1 < layer["zero"] < 0.9 for layer in statistics.values())


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
        values = checkpoint(lambda hidden: self.drop(self.act(self.second(hidden))), values, use_reentrant=False)
        output: torch.Tensor = self.last(values)
        return output


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


@pytest.mark.usefixtures("group")
def test_ddp_s_modules_are_those_within_it(extreme: Extreme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names of their gradients, and nothing is sent to other ranks for it."""
    model = DistributedDataParallel(perceptron())
    inputs = torch.randn(4, 8)
    step = trainer(model, inputs)
    extreme.start(step)
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object"):
        monkeypatch.delattr(dist, name)
    step(4)
    statistics = extreme.stats()
    gradients = {key[1] for key in extreme.run.values() if key[0] == catalog.GRAD_LAYER_NORM.name}
    assert gradients == {"0", "2"} <= statistics.keys() == {"0", "1", "2"}
    assert statistics["0"] == pytest.approx(by_hand(model.module[0](inputs)), rel=1e-4)
    monkeypatch.undo()


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
    assert b"torchobs" not in pickle.dumps(model) + kept.getvalue()
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


def test_an_operation_of_ours_is_in_no_graph(extreme: Extreme) -> None:
    """``torch.func`` has tensors that end with their level, and a trace would keep what is computed beside it."""
    model = perceptron()

    def call(values: torch.Tensor) -> Any:
        with pytest.warns((DeprecationWarning, FutureWarning), match="trace"):  # the latter since torch 2.14
            torch.jit.trace(model, (values,), check_trace=False)  # type: ignore[no-untyped-call]
        return torch.func.vmap(model)(values)

    step = trainer(model, torch.randn(4, 8), call)
    extreme.start(step)
    step(4)
    assert extreme.stats() == {}


def test_most_units_of_a_layer_are_dead(extreme: Extreme) -> None:
    """Reported once, with how many."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    weakened: Any = model[2]
    with torch.no_grad():
        weakened.bias[:12] -= 100.0
    step = trainer(model, torch.randn(64, 8))
    extreme.start(step)
    for number in range(2 * LASTING_STEPS + 10):
        step(number)
        if number % 30 == 0:
            extreme.run.look()
    (dead,) = extreme.run.attributes(catalog.EVENT_DEAD_UNITS.name)
    assert {name: dead[name] for name in ("layer", "units_dead", "units")} == {"layer": "3", "units_dead": 12, "units": 16}


def test_units_are_columns_and_channels_and_who_fires_seldom_is_alive() -> None:
    """Ten of an image's sixteen channels are dead; a unit that fires for one sample in thirty is not; a hinge is no unit."""

    def silent(make: Callable[[], torch.Tensor]) -> int | None:
        units, verdict = FiredUnits(), None
        for step in range(LASTING_STEPS + 1):
            verdict = units.add(make(), step)
        assert verdict is None or verdict[1].enough
        return None if verdict is None else int(verdict[0])

    torch.manual_seed(0)
    assert silent(lambda: torch.rand(32, 16, 4, 4) * (torch.arange(16) >= 10).view(16, 1, 1)) == 10
    assert silent(lambda: torch.rand(64, 16).sub(0.97).relu()) == 0
    assert silent(lambda: torch.zeros(64, 1)) is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own looking at it
@pytest.mark.parametrize(
    ("kind", "layers", "reported", "compilations"),
    [
        ("none", ["0", "1", "2.0", "2.1", "3"], (5, 0, 0), range(1)),
        ("whole", [], (0, 5, 0), range(1)),
        ("function", [], (0, 0, 5), range(1)),
        ("submodule", ["0", "1", "3"], (3, 2, 0), range(1)),
        # a hook is nothing in a graph; when it is gone, the graph is made again, and hooks do not come back
        ("late", None, (0, 0, 5), range(1, 3)),
    ],
)
def test_nothing_is_compiled_anew_and_what_is_not_looked_at_is_reported(
    extreme: Extreme, kind: str, layers: list[str] | None, reported: tuple[int, ...], compilations: range
) -> None:
    """No compilation and no graph break after the first steps; what is not compiled is looked at though other code is."""
    torch._dynamo.reset()
    utils.counters.clear()
    counter = CompileCounter()
    compiled: Any = partial(torch.compile, backend=counter, fullgraph=True)
    torch.compile(lambda value: value + 1, backend="eager")(torch.ones(2))  # something else
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "submodule":
        model[2] = compiled(model[2])
    call, before = compiled(model) if kind == "whole" else model, 0

    def function(values: torch.Tensor) -> Any:
        return model(values)

    if kind == "function":
        call = compiled(function)
    for index in range(28):
        if index == 4:
            extreme.look_at_every_step()
            before = counter.frame_count
        if kind == "late" and index == 7:  # while a window is open
            call = compiled(function)
        optimizer.zero_grad()
        call(torch.full((4, 8), float(index))).square().mean().backward()
        optimizer.step()
    looked_at = extreme.stats().keys()
    event = extreme.run.attributes(catalog.EVENT_ACTIVATIONS.name)[-1]
    torch._dynamo.reset()
    assert counter.frame_count - before in compilations
    assert sum(utils.counters["graph_break"].values()) == 0
    assert tuple(event[name] for name in ("layers", "compiled", "silent")) == reported
    assert layers is None or sorted(looked_at) == layers
