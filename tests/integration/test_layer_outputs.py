"""What layers put out: around an anomaly in a file of its own, and in models that torch.compile compiles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fork_server
from tests.activations import Extreme, perceptron, trainer
from tests.training import recording
from torchobs import catalog
from torchobs.diagnosis.load import load_reports
from torchobs.diagnosis.numerics import numerics
from torchobs.document.blocks import HeatMap
from torchobs.document.sections import layers
from torchobs.flight.files import artifacts


def test_a_nan_leaves_a_history(extreme: Extreme, flight_dir: Path) -> None:
    """The last steps looked at before it and two after it, each layer's statistics and some elements; once, and named."""
    model: Any = perceptron()
    step = trainer(model, torch.randn(32, 8))
    extreme.start(step)
    for index in range(30):
        step(index)
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    for index in range(2):
        step(index)
    extreme.run.look()
    for index in range(4):
        step(index)
    extreme.run.look()
    (history,) = extreme.histories(flight_dir)
    assert (history["kind"], history["step"], history["value"]) == ("nonfinite_loss", 36, "nan")
    steps = [row["step"] for row in history["steps"]]
    assert len(steps) == 16
    assert steps[-1] >= 37
    before, after = (next(row["layers"] for row in history["steps"] if row["step"] == step) for step in (steps[0], 36))
    assert before.keys() == after.keys() == {"0", "1", "2"}
    assert (before["2"]["nonfinite"], after["2"]["nonfinite"], after["0"]["nonfinite"]) == (0.0, 1.0, 0.0)
    assert len(after["0"]["samples"]) == 31  # of 512 every 17th: 16 would be of a few columns alone
    assert set(after["2"]["samples"]) == {"nan"}
    assert sum(len(layer["samples"]) for row in history["steps"] for layer in row["layers"].values()) <= 65_536
    assert {"0", "2"} == history["gradient_norms"][0]["layers"].keys()
    (told,) = extreme.run.frames(catalog.EVENT_LAYER_HISTORY.name)
    (file,) = flight_dir.glob(f"*.{artifacts.LAYERS}-*")
    name = artifacts.parse(file.name)
    assert name is not None
    assert told["attrs"]["evidence"] == name.id
    (report,), _ = load_reports(list(flight_dir.glob("*.flight")))
    found = {one.kind: one.long for one in numerics(report)}
    assert found["layer_history"] == f"What the layers put out around the nonfinite loss of step 36 is in {file.name}."


def test_an_explosion_leaves_a_history(extreme: Extreme, flight_dir: Path) -> None:
    """A finite one, that begins in one layer; the report has a heat map of the outputs."""
    model: Any = perceptron()
    inputs = torch.randn(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scale = [1.0]
    model[2].weight.register_hook(lambda gradient: gradient * scale[0])

    def step(index: int) -> None:
        optimizer.zero_grad()
        noise = 1.0 + 0.1 * ((index * 7919) % 13) / 13
        (model(inputs).square().mean() * noise).backward()
        optimizer.step()

    extreme.start(step)
    for index in range(60):
        step(index)
    extreme.run.look()
    scale[0] = 1e6
    step(0)
    extreme.run.look()
    histories = extreme.histories(flight_dir)
    assert "gradient_explosion" in {history["kind"] for history in histories}
    assert all(history["steps"] for history in histories)
    extreme.record_gauges()
    (report,), _ = load_reports(list(flight_dir.glob("*.flight")))
    maps = {block.name: block.names for block in layers(report, "").blocks if isinstance(block, HeatMap)}
    assert maps["Standard deviation of the output by layer and time"] == ("0", "1", "2")


def test_samples_can_be_turned_off(flight_dir: Path) -> None:
    """Then a history has statistics alone."""
    for run in recording(flight_dir, level="extreme", tensor_samples=False):
        extreme = Extreme(run)
        model: Any = perceptron()
        step = trainer(model, torch.randn(32, 8))
        extreme.start(step)
        step(4)
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        step(5)
        run.look()
        (history,) = extreme.histories(flight_dir)
        layers = [layer for row in history["steps"] for layer in row["layers"].values()]
        assert layers
        assert not any("samples" in layer for layer in layers)


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
elif kind == "in_place":
    model[2].compile(backend="eager", fullgraph=False)
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
told = dict(zip(("layers", "left_out", "compiled", "silent"), getattr(probe, "_told", ()) or ()))
layers = sorted(probe._around._rows[-1].layers) if probe._around._rows else []
more = len(utils.get_compilation_metrics()) - warm
print(json.dumps([more, sum(utils.counters["graph_break"].values()), layers, told, errors]))
"""


def run(kind: str) -> Any:
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
        ("in_place", ["0", "1", "3"], {"layers": 3, "compiled": 2, "silent": 0}),
    ],
)
def test_nothing_is_compiled_anew_and_what_is_not_looked_at_is_told(kind: str, layers: list[str], told: dict[str, int]) -> None:
    """No compilation and no graph break after the first steps; what is not compiled is looked at though other code is."""
    more, breaks, looked_at, said, errors = run(kind)
    assert (more, breaks, errors) == (0, 0, [])
    assert looked_at == layers
    assert {name: said[name] for name in told} == told


def test_what_is_compiled_under_our_hooks_is_whole_and_compiled_once_more_at_most() -> None:
    """A hook is nothing in a graph; when it is gone, the graph is made again, and hooks do not come back."""
    more, breaks, _, said, errors = run("late")
    assert (breaks, errors) == (0, [])
    assert 1 <= more <= 2
    assert said["silent"] == 5


def test_inspect_says_what_was_not_looked_at(extreme: Extreme) -> None:
    """A compiled model is no silent gap."""
    model = perceptron()
    compiled = torch.compile(model, backend="eager")
    step = trainer(model, torch.randn(4, 8), compiled)
    extreme.start(step)
    extreme.run.look()
    writer = extreme.run.session.writer
    assert writer is not None
    (report,), _ = load_reports([Path(writer.path)])
    found = {one.kind: one.long for one in numerics(report)}
    assert "3 of 3 layers" in found["activations_unread"]
