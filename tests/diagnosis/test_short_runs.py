"""Layers that learn nothing are told in runs of less than a second, too: on a clock that stands still."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.diagnosis.observing import Look, observe
from torchobs import catalog
from torchobs.probes.gradients import publish, stuck_layers

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 16


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a thousand steps take a second."""
    for module in (publish, stuck_layers):
        monkeypatch.setattr(module, "monotonic", lambda: 1000.0)


def fit(make: Callable[[], nn.Module], steps: int, *, rate: float = 0.1, adam: bool = False) -> Callable[[Look], None]:
    """A regression on the first of the inputs."""

    def train(look: Look) -> None:
        torch.manual_seed(3)
        model = make()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, rate) if adam else torch.optim.SGD(trained, rate)
        for _ in range(steps):
            x = torch.randn(8, WIDTH)
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
            look.stepped()

    return train


def deep(activation: type[nn.Module], depth: int) -> Callable[[], nn.Module]:
    """No normalisation, no residual connection."""

    def make() -> nn.Module:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), activation())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    return make


@pytest.mark.parametrize("adam", [False, True])
def test_first_layers_that_no_gradient_reaches_are_told_within_two_hundred_steps(*, adam: bool) -> None:
    """Twenty sigmoids leave 1e-17 of it, from the first step on."""
    observed = observe(fit(deep(nn.Sigmoid, 20), 260, rate=1e-3 if adam else 0.1, adam=adam), grad_interval=1)
    told = observed.events(catalog.EVENT_UNMOVED_LAYERS)
    assert [fact.text("cause") for fact in told] == ["vanishing"]
    assert "0" in told[0].texts("layers")
    assert (told[0].step or 0) <= 200
    assert "unmoved_layers" in observed.kinds()


class Branch(nn.Module):
    """A residual branch, of which the last layer or a scale begins at (or near) zero."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = None if scale is None else nn.Parameter(torch.full((WIDTH,), scale))
        if scale is None:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any batch."""
        change: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + (change if self.scale is None else self.scale * change)


class Adapter(nn.Module):
    """LoRA: a frozen layer beside a product of which the second factor begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.first, self.second = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any batch."""
        return torch.tanh(self.frozen(x) + self.second(self.first(x)))


class Tokens(nn.Module):
    """An embedding of many tokens, of which a batch has few, with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5000, WIDTH, sparse=True), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens from the batch's first column."""
        found: torch.Tensor = self.head(self.table((x[:, 0].abs() * 1000).long() % 5000))
        return found


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "deep tanh": deep(nn.Tanh, 8),
    "deep ReLU": deep(nn.ReLU, 12),
    "zero-initialised branches": lambda: nn.Sequential(*[Branch(None) for _ in range(12)], nn.Linear(WIDTH, 1)),
    "LayerScale": lambda: nn.Sequential(*[Branch(1e-6) for _ in range(12)], nn.Linear(WIDTH, 1)),
    "LoRA": lambda: nn.Sequential(*[Adapter() for _ in range(4)], nn.Linear(WIDTH, 1).requires_grad_(requires_grad=False)),
    "sparse embedding": Tokens,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_layers_that_begin_slowly_are_not(name: str) -> None:
    """What begins at zero, and grows."""
    rate = 0.01 if name in {"deep ReLU", "zero-initialised branches", "LayerScale"} else 0.1
    observed = observe(fit(HEALTHY[name], 300, rate=rate), grad_interval=1)
    assert observed.events(catalog.EVENT_UNMOVED_LAYERS) == []
