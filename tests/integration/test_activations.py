"""What level extreme adds to advanced: statistics of every layer's outputs, which disturb nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.activations import Extreme, by_hand, outputs_of, perceptron, trainer
from torchobs import catalog
from torchobs.probes.activations.statistics import MOST_ELEMENTS


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


def test_layers_have_the_names_of_their_gradients(extreme: Extreme) -> None:
    """One name for one layer, whatever wraps the model."""
    model: Any = nn.DataParallel(perceptron())
    step = trainer(model, torch.randn(4, 8))
    extreme.start(step)
    step(4)
    values = extreme.run.look()
    gradients = {key[1] for key in values if key[0] == catalog.GRAD_LAYER_NORM.name}
    assert gradients == {"0", "2"} <= extreme.stats().keys() == {"0", "1", "2"}


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


def test_of_a_large_output_the_first_part_is_looked_at(extreme: Extreme) -> None:
    """The memory that it takes is bounded: of a batch the first samples."""
    model = nn.Sequential(nn.Linear(1, 1000))
    inputs = torch.linspace(-1.0, 1.0, 400)[:, None]
    step = trainer(model, inputs)
    extreme.start(step)
    step(4)
    (found,) = extreme.stats().values()
    output = model(inputs)[: MOST_ELEMENTS // 1000]
    assert found["std"] == pytest.approx(by_hand(output)["std"], rel=1e-3)
    assert found["std"] != pytest.approx(by_hand(model(inputs))["std"], rel=1e-3)


@dataclass
class Answer:
    """As transformers have it."""

    loss: None
    logits: torch.Tensor


class Nested(nn.Module):
    """Puts out what ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(4))

    def forward(self, values: torch.Tensor) -> Any:
        """Return the values times a weight."""
        found = values * self.weight
        whole = torch.arange(4)
        kinds = {
            "tuple": (whole, (None, found)),
            "dict": {"ids": whole, "logits": found},
            "dataclass": Answer(None, found),
            "half": found.bfloat16(),
            "double": found.double(),
            "strided": found.t(),
        }
        return kinds[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "half", "double", "strided"])
def test_outputs_of_any_kind(extreme: Extreme, kind: str) -> None:
    """The first floating-point tensor is looked at, whatever it is in."""
    model: Any = Nested(kind)
    inputs = torch.randn(6, 4)

    def call(values: torch.Tensor) -> torch.Tensor:
        found = model(values)
        parts = {"tuple": lambda: found[1][1], "dict": lambda: found["logits"], "dataclass": lambda: found.logits}
        taken: torch.Tensor = parts.get(kind, lambda: found)()
        return taken

    step = trainer(model, inputs, call)
    extreme.start(step)
    step(4)
    assert extreme.stats()["Nested"] == pytest.approx(by_hand(call(inputs)), rel=1e-4)


def test_whole_numbers_are_not_looked_at(extreme: Extreme) -> None:
    """Neither are modules that compute nothing."""

    class Ranks(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values.argsort()

    model: Any = nn.Sequential(nn.Linear(8, 4), nn.Dropout(), nn.Identity(), nn.Flatten())
    model.ranks = nn.Module()
    model.ranks.of = Ranks()
    step = trainer(model, torch.randn(4, 8), lambda values: (model.ranks.of(values), model[:4](values))[1])
    extreme.start(step)
    step(4)
    assert extreme.stats().keys() == {"0"}


def test_a_module_that_is_called_twice_is_one_layer(extreme: Extreme) -> None:
    """Its calls are taken together."""
    model = nn.Sequential(nn.Linear(4, 4))
    inputs = torch.randn(8, 4)
    step = trainer(model, inputs, lambda values: model(model(values)))
    extreme.start(step)
    step(4)
    once = model(inputs)
    assert extreme.stats()["0"] == pytest.approx(by_hand(torch.cat([once, model(once)])), rel=1e-4)


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
    rows = extreme.probe._around._rows
    taken = {name: stats.elements for name, (stats, _) in rows[-1].layers.items()}
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


def test_autocast_and_accumulation(extreme: Extreme) -> None:
    """Half precision is summed up in single precision; of an accumulated step the first part is looked at."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = [torch.randn(64, 8), torch.randn(64, 8) * 9]

    def step(_index: int) -> None:
        optimizer.zero_grad()
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16):
                model(part).float().square().mean().backward()
        optimizer.step()

    extreme.start(step)
    for index in range(3):
        step(index)
    found = extreme.stats()["0"]
    with torch.autocast("cpu", torch.bfloat16):
        expected = [by_hand(model[0](part)) for part in parts]
    assert any(found == pytest.approx(each, rel=1e-4) for each in expected)
