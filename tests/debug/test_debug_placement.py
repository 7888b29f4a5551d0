"""``debug.devices``: wrong devices and silent copies, with torch's meta device as the second one."""

# mypy: disable-error-code="no-untyped-call"

import pytest
import torch
from torch import nn

from tests.debug.models import MODELS, hooks
from torchobs import debug


class Copying(nn.Module):
    """Sends its input to another device and back in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.to("meta")
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_found_in_healthy_models(name: str) -> None:
    """And neither buffers nor random state nor gradients change."""
    make, sample = MODELS[name]
    model, (inputs, _) = make(), sample()
    before, random = [x.clone() for x in model.state_dict().values()], torch.get_rng_state()
    found = debug.devices(model, inputs, optimizer=torch.optim.Adam(model.parameters()))
    assert (found.device, found.misplaced, found.copies, found.error, found.anomalies) == ("cpu", (), (), None, ())
    assert found.devices[0].parameters == len(list(model.parameters()))
    assert found.devices[0].inputs == 1
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())
    assert hooks(model) == 0


def test_a_parameter_and_an_input_elsewhere_are_named() -> None:
    """The forward pass that fails for it is told, not raised."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2))
    model[1].bias = nn.Parameter(torch.zeros(2, device="meta"))
    found = debug.devices(model, {"input": torch.zeros(3, 4, device="meta")})
    assert [(row.kind, row.name, row.device) for row in found.misplaced] == [
        ("parameter", "1.bias", "meta"), ("input", "input.input", "meta"),
    ]  # fmt: skip
    assert "parameter 1.bias is on meta, not on cpu" in found.anomalies
    assert "misplaced" in str(found)


def test_state_of_the_optimizer_elsewhere() -> None:
    """Its step counts belong on the CPU and are not meant."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert debug.devices(model, optimizer=optimizer).anomalies == ()
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 4, device="meta")
    (row,) = debug.devices(model, optimizer=optimizer).misplaced
    assert (row.kind, row.name) == ("optimizer state", "weight.exp_avg")


def test_a_silent_copy_is_told_with_its_line() -> None:
    """Twelve floats, once a call, from the line of the model."""
    (copy,) = debug.devices(Copying(), torch.zeros(3, 4)).copies
    assert (copy.operator, copy.source, copy.target, copy.count, copy.size) == ("_to_copy", "cpu", "meta", 1, 48)
    assert f"{__file__}:" in copy.location
