"""What the tests of tune.pipeline share: batches, loaders, copies of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
