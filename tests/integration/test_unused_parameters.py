"""Parameters that DistributedDataParallel's error gives by index are named."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.training import Recording, recording
from torchobs import catalog

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("group")


class Heads(torch.nn.Module):
    """Two heads, one of which takes no part in the loss; their weights may be one tensor, and the body frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.spare = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.main(self.body(x))
        return out


def raised(run: Recording, model: torch.nn.Module) -> dict[str, Any]:
    """What is recorded of the error of a model's second forward pass, when it ends the program."""
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="did not receive grad") as caught:
        model(torch.ones(1, 3))
    sys.excepthook(RuntimeError, caught.value, caught.value.__traceback__)
    (attributes,) = run.attributes(catalog.EVENT_EXCEPTION.name)
    return attributes


def test_parameters_without_a_gradient_are_named(flight_dir: Path) -> None:
    """By the names in the model that DDP wraps."""
    for run in recording(flight_dir):
        found = raised(run, DistributedDataParallel(Heads()))
        assert (found["unused"], found["unused_count"], found["unused_of"]) == (["spare.weight", "spare.bias"], 2, "Heads")


def test_the_names_are_those_of_the_model_that_raised(flight_dir: Path) -> None:
    """Another DDP model, frozen parameters before and tied ones shift the indices; what is frozen later does not."""
    for run in recording(flight_dir):
        other = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)))
        inner = Heads()
        inner.body.weight.requires_grad_(False)  # noqa: FBT003  # its one argument
        inner.main.weight = inner.spare.weight
        model = DistributedDataParallel(inner)
        inner.body.weight.requires_grad_(True)  # noqa: FBT003  # its one argument
        other(torch.ones(1, 3)).sum().backward()
        assert raised(run, model)["unused"] == ["spare.bias"]
