"""A small training with any loss, observed: for tests of what is said of the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from tests.diagnosis.observing import Look, Observed, observe

SAMPLES = 16


def observe_loss(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], outputs: int, **autocast: bool) -> Observed:
    """Train twelve steps with a loss of outputs [SAMPLES, outputs] and inputs [SAMPLES, 4]."""

    def train(look: Look) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, outputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(12):
            x = torch.randn(SAMPLES, 4)
            with torch.autocast("cpu", dtype=torch.bfloat16, **{"enabled": False, **autocast}):
                loss = loss_of(model(x), x)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            look.stepped()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own losses
        return observe(train)
