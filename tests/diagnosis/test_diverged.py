"""A loss that rises as a queue fills has not diverged."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.diagnosis.observing import Look, observe
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, QUEUE, WIDTH, TEMPERATURE = 32, 1024, 32, 0.07


def contrast(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Look], None]:
    """MoCo (He et al. 2020), whose queue begins with random keys."""

    def train(look: Look) -> None:
        torch.manual_seed(0)
        query = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        key, queue = copy.deepcopy(query), functional.normalize(torch.randn(QUEUE, WIDTH), dim=1)
        optimizer = make(query.parameters())
        for number in range(100):
            batch = torch.randn(BATCH, WIDTH) + 3.0
            queries = functional.normalize(query(batch + 0.1 * torch.randn_like(batch)), dim=1)
            with torch.no_grad():
                for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
                keys = functional.normalize(key(batch + 0.1 * torch.randn_like(batch)), dim=1)
            alike = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / TEMPERATURE
            loss: Any = functional.cross_entropy(alike, torch.zeros(BATCH, dtype=torch.long), reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            begin = number * BATCH % QUEUE
            queue[begin : begin + BATCH] = keys
            look.stepped()

    return train


@pytest.mark.parametrize(
    "make",
    [lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9), lambda parameters: torch.optim.Adam(parameters, 1e-3)],
    ids=["SGD", "Adam"],
)
def test_a_loss_that_rises_as_a_queue_fills_has_not_diverged(make: Any) -> None:
    """Fiftyfold and more within 20 steps, and it stays there."""
    observed = observe(contrast(make), grad_interval=1)
    losses = [step.loss or 0.0 for step in observed.reports[0].steps]
    assert min(losses[20:]) > 20 * max(losses[0], 1.0)
    assert "diverged" not in observed.kinds()
    assert [fact.text("kind") for fact in observed.events(catalog.EVENT_ANOMALY)].count("diverged") == 0
