"""A loss that is back at the untrained model's is a finding, and no other level of the loss is."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.diagnosis.observing import Look, observe
from tests.diagnosis_files import facts, step
from torchobs import catalog
from torchobs.diagnosis.numerics import collapsed

if TYPE_CHECKING:
    from torchobs.diagnosis.health import Finding


@pytest.mark.parametrize("labels", ["shuffled", "renamed", "right"])
def test_a_loss_that_is_back_at_the_untrained_models_is_a_finding(labels: str) -> None:
    """Promise: so it is where labels belong to other samples from a step on; a new task is learned meanwhile."""

    def train(look: Look) -> None:
        torch.manual_seed(5)
        model, centres = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), torch.randn(10, 16)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for number in range(300):
            classes = torch.randint(0, 10, (64,))
            x = centres[classes] + 0.1 * torch.randn(64, 16)
            if number >= 150 and labels == "shuffled":
                classes = classes[torch.randperm(64)]
            elif number >= 150 and labels == "renamed":
                classes = (classes + 1) % 10
            loss: Any = nn.functional.cross_entropy(model(x), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            look.stepped()

    observed = observe(train)
    assert observed.events(catalog.EVENT_ANOMALY) == []
    assert ("collapsed" in observed.kinds()) == (labels == "shuffled")


def back_at_first(before: float, after: float, *, first: int = 1, noise: float = 0.01) -> list[Finding]:
    """The findings on a run that began at 2.3, had the one loss for a hundred steps, and then the other."""
    losses = [2.3] * 5 + [before] * 100 + [after] * 100
    steps = [step(first + number, loss * (1 + noise * (number % 3 - 1))) for number, loss in enumerate(losses)]
    return list(collapsed(facts(steps)))


def test_a_loss_that_is_back_at_the_first_is_a_finding() -> None:
    """Promise: it names the losses and the step; within a quarter of what had been learned it is the first loss."""
    (finding,) = back_at_first(0.1, 2.2)
    assert (finding.severity, finding.kind) == ("warning", "collapsed")
    assert finding.text.startswith("The loss is back at its first, 2.3: around step 26 it was 0.1, in the last 50 steps 2.2.")
    assert back_at_first(0.1, 2.7)


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [(0.1, 1.5, 1), (0.1, 9.0, 1), (2.0, 2.3, 1), (0.1, 2.3, 1000)],
    ids=["learned in part", "harder data", "never learned", "began before the file's steps"],
)
def test_other_levels_of_the_loss_are_none(before: float, after: float, first: int) -> None:
    """Promise: a level that is not the untrained model's may be a stage of the data, and is not judged."""
    assert back_at_first(before, after, first=first) == []


def test_a_loss_that_has_fallen_again_or_is_not_finite_is_none() -> None:
    """Promise: what a training has learned again is no finding, nor is a NaN here, which has one of its own."""
    losses = [2.3] * 5 + [0.1] * 100 + [2.3] * 60 + [0.1] * 60
    assert list(collapsed(facts([step(number, loss) for number, loss in enumerate(losses, 1)]))) == []
    assert list(collapsed(facts([step(number, loss) for number, loss in enumerate([*losses[:165], nan], 1)]))) == []
    assert list(collapsed(facts())) == []
