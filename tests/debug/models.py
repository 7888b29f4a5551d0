"""Small real models with a batch each: fully connected, convolutional, recurrent, a transformer decoder."""

# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, comparison-overlap"
# a parameter may have no gradient, and here it has one; torch has no types for `backward`

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.cell(x)[0][:, -1])
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        out: torch.Tensor = self.head(self.block(self.embedding(tokens), src_mask=mask, is_causal=True))
        return out.transpose(1, 2)


def _fully_connected() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def _convolutional() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers)


def _classes() -> torch.Tensor:
    return torch.randint(3, (5,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "MLP": (_fully_connected, lambda: (torch.randn(5, 8), _classes())),
    "CNN": (_convolutional, lambda: (torch.randn(5, 3, 8, 8), _classes())),
    "RNN": (Recurrent, lambda: (torch.randn(5, 6, 4), _classes())),
    "GPT": (Decoder, lambda: (torch.randint(11, (5, 6)), torch.randint(11, (5, 6)))),
}
"""What makes each model, and a batch of inputs and classes for it"""


def step(model: nn.Module, optimizer: Any, batch: Batch) -> torch.Tensor:
    """Train one step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def texts(result: Any) -> tuple[str, ...]:
    """Return a result's problems as people read them."""
    return tuple(map(str, result.problems))


def hooks(model: nn.Module) -> int:
    """How many forward hooks its modules have."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class Slope(nn.Module):
    """Differentiates in its forward pass, as networks for forces or for differential equations do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope
