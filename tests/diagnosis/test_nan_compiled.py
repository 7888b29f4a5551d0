"""A NaN that appears inside a compiled region names that region and the call that looks inside, and no region before it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchobs import catalog, debug

if TYPE_CHECKING:
    from tests.training import Recording

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's, of a graph that begins within a graph
]

AT, WIDTH = 3, 8
RUN_TRACE = "Run `debug.trace_nan(model, batch)`."


class Block(nn.Module):
    """A residual block with dropout, that can be ill."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop, self.ill = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, WIDTH)`` to the same."""
        h = self.drop(self.linear(self.norm(x)))
        if self.ill == "log":
            h = h + torch.log(-1 - h.abs())
        if self.ill == "sqrt":
            h = h + torch.sqrt(h.relu() * 0)
        return torch.as_tensor(x + h)


class Net(nn.Module):
    """Three blocks between two layers; the way in which it is compiled."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.way = way
        if way == "in place":
            self.compile(backend="aot_eager")
        for block in self.blocks if way == "blocks" else ():
            block.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 3)``."""
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True) if self.way == "checkpoints" else block(h)
        return torch.as_tensor(self.last(h))


def made(way: str) -> tuple[Net, Any]:
    """The model, and what is called."""
    model = Net(way)
    return model, torch.compile(model, backend="aot_eager") if way == "whole" else model


def train(model: Net, called: Any, sickness: str) -> None:
    """Train; ``sickness``: of the second block, or of a sample of the batch, in the third step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(1, AT + 2):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        model.get_submodule("blocks.1").ill = sickness if number == AT else ""  # type: ignore[assignment]
        if sickness == "input" and number == AT:
            x[3, 1] = float("nan")
        loss = functional.cross_entropy(called(x), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if number != AT:
            optimizer.step()


def told(run: Recording) -> tuple[dict[str, Any], str]:
    """What was said, once: its attributes with the step, and the sentence."""
    run.look()
    assert run.frames(catalog.EVENT_PROBE_DISABLED.name) == []
    (frame,) = run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)
    assert run.session.context is not None
    (origin,) = run.session.context.origins.values()
    return {"step": frame["step"], **frame["attrs"]}, origin.sentence()


def begins(function: Any) -> str:
    """``file:line`` of a function."""
    return f"{__file__}:{inspect.getsourcelines(function)[1]}"


@pytest.mark.parametrize("way", ["whole", "in place"])
def test_a_compiled_model_is_named_with_its_line(run: Recording, way: str) -> None:
    """Promise: where its ``forward`` begins, in the step of the NaN, and that ``trace_nan`` names the operator."""
    train(*made(way), "log")
    origin, sentence = told(run)
    assert (origin["step"], origin["origin"], origin["module"]) == (AT, "unknown", "Net")
    assert sentence == f"The NaN or infinity appeared inside compiled region Net ({begins(Net.forward)}). {RUN_TRACE}"


def test_of_several_regions_none_is_blamed_for_a_later_one(run: Recording) -> None:
    """Promise: what comes out of a region that another one is given is not known, and that is said."""
    train(*made("blocks"), "log")
    origin, sentence = told(run)
    assert (origin["step"], origin["origin"], origin["module"]) == (AT, "unknown", "blocks.0")
    assert "inside compiled region blocks.0 (" in sentence
    assert sentence.endswith(f") or a later one. {RUN_TRACE}")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpointed_region_is_named_as_that(run: Recording) -> None:
    """Promise: a reentrant checkpoint keeps nothing either."""
    train(*made("checkpoints"), "log")
    assert told(run)[1].startswith("The NaN or infinity appeared inside checkpointed region")


def test_a_bad_sample_of_a_compiled_model_is_named(run: Recording) -> None:
    """Promise: the variable whose bad samples are those of the result, which the graph does not have."""
    train(*made("whole"), "input")
    origin, _ = told(run)
    assert (origin["origin"], origin["parameter"], origin["sample"], origin["step"]) == ("input", "x", 3, AT)


def test_a_bad_parameter_of_a_compiled_model_is_named(run: Recording) -> None:
    """Promise: the graph has the parameters of a region."""
    model, called = made("whole")
    model.get_parameter("blocks.2.linear.weight").data[0, 0] = float("nan")
    torch.autograd.backward(called(torch.randn(6, 4)).square().mean())
    origin, _ = told(run)
    assert (origin["origin"], origin["parameter"]) == ("parameter", "blocks.2.linear.weight")


def test_a_derivative_inside_a_region_is_seen_in_the_next_backward_pass(run: Recording) -> None:
    """Promise: of a finite loss; under a guard the weights stay finite, and the region is seen at work."""
    model, called = made("whole")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.get_submodule("blocks.1").ill = "sqrt"  # type: ignore[assignment]
    with debug.nan_guard(optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(called(torch.randn(6, 4)).square().mean())
            optimizer.step()
    origin, sentence = told(run)
    assert (origin["step"], origin["origin"], origin["module"]) == (2, "backward", "Net")
    assert sentence.startswith("The NaN or infinity appeared inside the backward pass of compiled region Net (")


@pytest.mark.parametrize(("way", "sickness"), [("whole", "log"), ("in place", "sqrt"), ("blocks", "log"), ("blocks", "sqrt")])
def test_trace_nan_looks_into_a_compiled_model(way: str, sickness: str) -> None:
    """Promise: it runs the model once without the compiler, forward and backward, and names the operator with its line."""
    model, called = made(way)
    called(torch.randn(6, 4))  # it is compiled by then
    model.get_submodule("blocks.1").ill = sickness  # type: ignore[assignment]
    origin = debug.trace_nan(called, torch.randn(6, 4))
    assert origin is not None
    kind = "backward" if sickness == "sqrt" else "operator"
    assert (origin.kind, origin.operator, origin.module) == (kind, sickness, "blocks.1")
    lines, first = inspect.getsourcelines(Block.forward)
    number = next(place for place, line in enumerate(lines, first) if f"torch.{sickness}(" in line)
    assert origin.line == f"{__file__}:{number}"
