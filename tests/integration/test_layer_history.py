"""The history of what layers put out around an anomaly, beside the flight file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.activations import Extreme, perceptron, trainer
from tests.training import recording
from torchobs import catalog
from torchobs.diagnosis.load import load_reports
from torchobs.diagnosis.numerics import numerics
from torchobs.flight.files import artifacts
from torchobs.report.content import HeatMap
from torchobs.report.sections import layers

if TYPE_CHECKING:
    from pathlib import Path


def test_a_nan_leaves_a_history(extreme: Extreme, flight_dir: Path) -> None:
    """The last steps looked at before it and two after it, each layer's statistics and some elements; once."""
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


def test_an_explosion_leaves_a_history(extreme: Extreme, flight_dir: Path) -> None:
    """A finite one, that begins in one layer."""
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


def test_the_report_shows_outputs_by_layer_and_time(extreme: Extreme, flight_dir: Path) -> None:
    """Beside the gradients, in a heat map of their own."""
    model: Any = perceptron()
    step = trainer(model, torch.randn(32, 8))
    extreme.start(step)
    step(4)
    extreme.run.look()
    extreme.record_gauges()
    (path,) = flight_dir.glob("*.flight")
    (report,), _ = load_reports([path])
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


def test_inspect_names_the_file(extreme: Extreme, flight_dir: Path) -> None:
    """A person who reads of the anomaly is told where to look."""
    model: Any = perceptron()
    step = trainer(model, torch.randn(32, 8))
    extreme.start(step)
    step(4)
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    step(5)
    extreme.run.look()
    (path,) = flight_dir.glob("*.flight")
    (file,) = flight_dir.glob(f"*.{artifacts.LAYERS}-*")
    (report,), _ = load_reports([path])
    found = {one.kind: one.text for one in numerics(report)}
    assert found["layer_history"] == f"What the layers put out around the nonfinite loss of step 7 is in {file.name}."
