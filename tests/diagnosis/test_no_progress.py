"""A training whose loss cannot fall is told so while it runs, by page and top as well as by inspect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.diagnosis.observing import Look, observe
from torchobs import catalog
from torchobs.diagnosis.status import run_status

if TYPE_CHECKING:
    from collections.abc import Callable


def training(make: Callable[[Any], torch.optim.Optimizer], limit: float | None = None) -> Callable[[Look], None]:
    """A classifier of ten classes that are plain to see."""

    def train(look: Look) -> None:
        torch.manual_seed(5)
        model, centres = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), torch.randn(10, 16)
        optimizer = make(model.parameters())
        for _ in range(150):
            labels = torch.randint(0, 10, (64,))
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(centres[labels] + 0.1 * torch.randn(64, 16)), labels)
            loss.backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            look.stepped()

    return train


@pytest.mark.parametrize(
    ("make", "limit", "cause"),
    [
        (lambda given: torch.optim.SGD(given, 0.1, weight_decay=5.0), None, "weight_decay"),
        (lambda given: torch.optim.SGD(given, 1e-6, momentum=0.9), None, "short_steps"),
        (lambda given: torch.optim.SGD(given, 0.1), 1e-5, "clipped"),
        (lambda given: torch.optim.Adam(given, 1e-9), None, "small_rate"),
        (lambda given: torch.optim.SGD(given, 0.1), None, ""),
        (lambda given: torch.optim.Adam(given, 1e-3), 1.0, ""),
    ],
    ids=["weight decay", "rate", "clipping", "rate of Adam", "healthy", "healthy Adam"],
)
def test_a_loss_that_cannot_fall_is_told_with_its_cause(make: Any, limit: float | None, cause: str) -> None:
    """By one verdict: the gauge, the event and the finding."""
    observed = observe(training(make, limit), grad_interval=1)
    assert run_status(observed.reports).ranks[0].no_progress == cause
    assert [fact.text("cause") for fact in observed.events(catalog.EVENT_NO_PROGRESS)] == ([cause] if cause else [])
    assert ("no_progress" in observed.kinds()) == bool(cause)


def test_a_backbone_that_hardly_learns_beside_a_head_that_does() -> None:
    """The first group's rate explains nothing where another group has the training's."""

    def train(look: Look) -> None:
        torch.manual_seed(5)
        backbone, head = nn.Linear(16, 32), nn.Linear(32, 10)
        groups: list[dict[str, Any]] = [{"params": backbone.parameters(), "lr": 1e-9}, {"params": head.parameters()}]
        optimizer = torch.optim.Adam(groups, lr=1e-4)
        for _ in range(150):
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(head(backbone(torch.randn(64, 16)).relu()), torch.randint(0, 10, (64,)))
            loss.backward()
            optimizer.step()
            look.stepped()

    assert "no_progress" not in observe(train).kinds()
