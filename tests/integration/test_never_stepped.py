"""A loop without ``optimizer.step()`` is told; analyses and long accumulations are left in peace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.training import Recording
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.diagnosis.load import load_reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("seeded")


def told(run: Recording) -> list[dict[str, object]]:
    """The attributes of the mistake's events, as of the rank's end."""
    run.look()
    return run.attributes(catalog.EVENT_LOOP_MISTAKE.name)


def passes(model: nn.Module, count: int, before: Callable[[], object] = lambda: None) -> None:
    """Backward passes, each after a call of ``before``."""
    for _ in range(count):
        before()
        model(torch.randn(8, 8)).square().mean().backward()


@pytest.mark.parametrize("clears", [True, False], ids=["zero_grad", "without zero_grad"])
def test_an_optimizer_that_never_steps_is_told(run: Recording, clears: bool) -> None:  # noqa: FBT001  # of the test
    """The line that was forgotten, or that an ``if`` never comes to."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    passes(model, 150, optimizer.zero_grad if clears else lambda: None)
    (mistake,) = told(run)
    assert (mistake["kind"], mistake["optimizer"]) == ("never_stepped", "AdamW")
    assert mistake["backward_passes"] in range(100, 151)


def saliency() -> None:
    """Gradients of a model that is not trained here."""
    model = nn.Linear(8, 1)
    passes(model, 150, model.zero_grad)


def attack() -> None:
    """Gradients of the input; the model has an optimizer."""
    model, example = nn.Linear(8, 1), torch.randn(8, 8, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters())
    model.requires_grad_(requires_grad=False)
    for _ in range(150):
        example.grad = None
        model(example).square().mean().backward()
    del optimizer


def trains() -> None:
    """A search for something before the training, then the training."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())
    passes(model, 50, optimizer.zero_grad)
    passes(model, 150, lambda: (optimizer.step(), optimizer.zero_grad()))


def trains_by_hand() -> None:
    """An optimizer that is made and not used, since the script updates the parameters itself."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def update() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None

    passes(model, 150, update)
    del optimizer


@pytest.mark.parametrize("script", [saliency, attack, trains, trains_by_hand], ids=lambda each: each.__name__)
def test_other_backward_passes_are_left_in_peace(run: Recording, script: Callable[[], None]) -> None:
    """Not everything with a gradient is a training without a step."""
    script()
    assert told(run) == []


def test_of_a_long_accumulation_nothing_is_said_in_the_end(run: Recording, flight_dir: Path) -> None:
    """The event cannot know that a step comes after all; who reads it can."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())
    passes(model, 150)
    assert told(run)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        passes(model, 2)
    run.look()
    (report,), _ = load_reports(list(flight_dir.glob("*.flight")))
    assert "never_stepped" not in {finding.kind for finding in diagnose(report)}
