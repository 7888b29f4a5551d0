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


def classifier() -> nn.Sequential:
    """One of ten classes."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))


def guess(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with labels that nothing tells: the loss stays where it is."""
    optimizer.zero_grad()
    loss: Any = nn.functional.cross_entropy(model(torch.randn(128, 16)), torch.randint(0, 10, (128,)))
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make", [lambda given: torch.optim.SGD(given, 1e-6, momentum=0.9), lambda given: torch.optim.Adam(given, 1e-9)]
)
def test_a_run_that_goes_on_from_a_checkpoint(make: Any) -> None:
    """Its first loss is that of a trained model, and its rate may be the end of a schedule."""

    def train(look: Look) -> None:
        model = classifier()
        optimizer = make(model.parameters())
        optimizer.load_state_dict(state)
        for _ in range(150):
            guess(model, optimizer)
            look.stepped()

    trained = classifier()
    first = make(trained.parameters())
    guess(trained, first)
    state = first.state_dict()
    assert "no_progress" not in observe(train, grad_interval=1).kinds()


def test_a_long_warm_up_that_begins_with_a_part_of_the_rate() -> None:
    """As ``LinearLR`` does: in its first hundreds of steps the rate is a fiftieth."""

    def train(look: Look) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, 1.0, 5000)
        for _ in range(150):
            guess(model, optimizer)
            scheduler.step()
            look.stepped()

    observed = observe(train, grad_interval=1)
    assert observed.events(catalog.EVENT_NO_PROGRESS) == []
    assert "no_progress" not in observed.kinds()


@pytest.mark.parametrize("last", [True, False])
def test_weight_decay_of_several_optimizers_of_one_class(*, last: bool) -> None:
    """What one of them does with it is not what all do, whichever is asked last."""

    def train(look: Look) -> None:
        model = classifier()
        optimizers = [
            torch.optim.Adam(model[index].parameters(), 0.02, weight_decay=2.0, decoupled_weight_decay=decoupled)
            for index, decoupled in ((0, not last), (2, last))
        ]
        for _ in range(150):
            guess(model, optimizers[0])
            optimizers[1].step()
            model.zero_grad()
            look.stepped()

    assert "no_progress" not in observe(train, grad_interval=1).kinds()
