"""Level extreme beside torch.compile: nothing is compiled anew for it, and what it does not look at is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fork_server
from tests.activations import Extreme, perceptron, trainer
from torchobs.diagnosis.load import load_reports
from torchobs.diagnosis.numerics import numerics

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
    found = {one.kind: one.text for one in numerics(report)}
    assert "3 of 3 layers" in found["activations_unread"]
