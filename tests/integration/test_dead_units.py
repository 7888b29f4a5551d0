"""Rectifiers whose units never fire are told at level extreme; sparse ones that are alive are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.training import Recording, recording
from torchobs import catalog
from torchobs.detect.learning import LASTING_STEPS
from torchobs.probes.activations.activations import FiredUnits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """At level extreme."""
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


def test_most_units_of_a_layer_are_dead(run: Recording) -> None:
    """Told once, with how many."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    weaken(model[2], 12)
    (found,) = told(run, model, torch.empty(64, 8))
    assert {name: found[name] for name in ("layer", "units_dead", "units")} == {"layer": "3", "units_dead": 12, "units": 16}


def test_channels_of_an_image(run: Recording) -> None:
    """Ten of sixteen; of the other layer all fire, in some places."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    weaken(model[0], 10)
    (found,) = told(run, model, torch.empty(32, 1, 6, 6))
    assert (found["layer"], found["units_dead"]) == ("1", 10)


def test_units_that_fire_seldom_are_alive(run: Recording) -> None:
    """Each for one sample in forty; and a hinge is no unit."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.ReLU())
    first: Any = model[0]
    with torch.no_grad():
        first.weight.copy_(torch.eye(16, 8) + torch.eye(16, 8).roll(8, 0))
        first.bias.fill_(-2.0)
    assert told(run, model, torch.empty(64, 8)) == []


def test_the_count_begins_anew_after_a_verdict() -> None:
    """A unit that dies later is found later."""
    units, alive, dead = FiredUnits(), torch.ones(1024, 8), torch.zeros(1024, 8)
    counts = [units.add(alive if step < 50 else dead, step * 10) for step in range(100)]
    silent = [int(found[0]) for found in counts if found is not None and found[1].enough]
    assert silent[0] == 0
    assert silent[-1] == 8
