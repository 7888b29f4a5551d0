"""An explosion is told with the layer in which it began, by the norms of that very step."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchobs import catalog
from torchobs.detect.spikes import BlownLayer
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.probes.layers import MOST_LAYERS, SHOWN_S, GrownLayers
from torchobs.ranks.runs import load_reports

if TYPE_CHECKING:
    from pathlib import Path

    from tests.training import Recording

STEPS, AT = 60, 50


@pytest.mark.parametrize("layer", ["0", "4", "8"])
def test_the_layer_of_an_explosion_is_named(run: Recording, flight_dir: Path, layer: str) -> None:
    """Its gradient is ten thousand times what it was in one step among sixty; the steps after it are ordinary."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        torch.autograd.backward((model(torch.randn(8, 16)) - 1.0).square().mean())
        if step == AT:
            model[int(layer)].weight.grad.mul_(10_000.0)
        optimizer.step()
    run.look()
    told = [frame for frame in run.frames(catalog.EVENT_ANOMALY.name) if frame["step"] == AT]
    (attributes,) = (frame["attrs"] for frame in told if frame["attrs"]["kind"] == "gradient_explosion")
    assert attributes["layer"] == layer
    assert attributes["layer_norm"] > 100 * attributes["layer_usual"] > 0
    grown = {key[1]: value for key, value in run.values().items() if key[0] == catalog.GRAD_LAYER_GROWTH.name}
    assert grown[layer] == pytest.approx(attributes["layer_norm"] / attributes["layer_usual"], rel=1e-6)
    (report,), _ = load_reports(list(flight_dir.glob("*.flight")))
    assert any(f"The gradient of layer {layer} grew most" in finding.long for finding in diagnose(report))


def test_layers_that_grew_are_shown_for_ten_minutes(run: Recording) -> None:
    """At most eight names in a whole run; a layer whose usual gradient is zero has a number, too."""
    context = run.session.context
    assert context is not None
    grown = GrownLayers(context)
    for index in range(12):
        grown.note(BlownLayer(f"layer{index}", 5.0, float(index > 0)), 0.0)
    assert context.writer.table.cell(catalog.GRAD_LAYER_GROWTH, {"layer": "layer0"}) is not None
    context.writer.publish()
    shown = {key[1]: value for key, value in run.values().items() if key[0] == catalog.GRAD_LAYER_GROWTH.name}
    assert len(shown) == MOST_LAYERS
    assert (shown["layer0"], shown["layer1"]) == (1e9, 5.0)
    grown.note(BlownLayer("layer1", 9.0, 1.0), SHOWN_S - 1.0)
    grown.forget(SHOWN_S)
    context.writer.publish()
    shown = {key[1]: value for key, value in run.values().items() if key[0] == catalog.GRAD_LAYER_GROWTH.name}
    assert {name for name, value in shown.items() if value is not None and not isnan(value)} == {"layer1"}
