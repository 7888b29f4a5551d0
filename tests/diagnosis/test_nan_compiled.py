"""A NaN that is born inside a compiled part of a model is traced to its operator, by running that part without the compiler."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests import support
from tests.diagnosis.compiled_nets import (
    AT,
    BACKWARD_LINES,
    FILTERS,
    LINES,
    WAYS,
    WIDTH,
    Block,
    Net,
    made,
    source_line,
    told,
    train,
    train_to_bad_gradients,
)
from tests.training import Recording, recording
from torchobs.probes.nonfinite.eager_replay import NOTE

pytestmark = [*FILTERS, pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize(("way", "sickness"), [*zip(WAYS, ("log", "div", "acos", "log"), strict=True)])
def test_the_operator_within_is_named_with_its_line(run: Recording, way: str, sickness: str) -> None:
    """Promise: in the step of its birth, for a model compiled as a whole, in place, or by blocks; and it is said how."""
    train(*made(way), sickness)
    found = told(run)
    assert (found["step"], found["origin"], found["operator"], found["module"]) == (AT, "operator", sickness, "blocks.1")
    assert found["location"] == source_line(LINES[sickness])
    assert NOTE in found["note"]
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


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", ["around", "within"])
def test_a_model_of_ddp_is_run_without_it(run: Recording, way: str) -> None:
    """No collective is called: of one rank the other one would know nothing."""
    model = Net()
    called: Any = DistributedDataParallel(torch.compile(model, backend="aot_eager") if way == "around" else model)
    train(model, called if way == "around" else torch.compile(called, backend="aot_eager"), "log")
    found = told(run)
    assert (found["operator"], found["module"], found["step"]) == ("log", "blocks.1", AT)
