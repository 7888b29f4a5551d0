"""Small models of the kinds that people train, batches and loaders for them, and copies of weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer's block without attention."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def blocks(width: int = 16, depth: int = 3, dropout: float = 0.1) -> nn.Sequential:
    """Repeated blocks with dropout and a head."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, dropout) for _ in range(depth)), nn.Linear(width, 4))


def convolutions() -> nn.Sequential:
    """A small CNN with batch normalisation."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


class SlowUnlessAutocast(nn.Module):
    """Takes fifteen times as long without autocast, whatever the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002 if torch.is_autocast_enabled("cpu") else 0.03)
        return self.layer(x)  # type: ignore[no-any-return]


loss_fn = nn.functional.mse_loss
PAIR = (torch.ones(4, 16), torch.ones(4, 4))


class StoppedError(Exception):
    """Raised by a test in the middle of a training."""


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the model's parameters."""
    return [weight.detach().clone() for weight in model.parameters()]


class Listed:
    """A loader of batches at hand that draws no random number."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        return iter(self._batches)
