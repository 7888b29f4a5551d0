"""Small trainings with a guard.Recovery around their steps, for several tests."""

from __future__ import annotations

from typing import Any

import torch

from torchobs import guard

Batch = dict[str, torch.Tensor]


def model(seed: int = 0) -> torch.nn.Module:
    """A small network with buffers that a skipped step must not leave changed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def with_buffers(seed: int = 0) -> torch.nn.Module:
    """The same with batch norm."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


def batches(number: int, seed: int = 0) -> list[Batch]:
    """Batches of eight samples, of a problem that can be learned."""
    source = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(8, 8, generator=source) for _ in range(number)]
    return [{"x": x, "y": x.sum(1, keepdim=True)} for x in inputs]


class Trained:
    """A network, its optimizer and a recovery around its steps."""

    def __init__(self, network: torch.nn.Module, **policy: Any) -> None:
        self.network = network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self.recovery = guard.Recovery(network, self.optimizer, guard.RecoveryPolicy(**policy))
        self.largest = 10**9
        """samples that fit"""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean loss; raises what a device raises whose memory is too small."""
        if len(batch["x"]) > self.largest:
            raise torch.OutOfMemoryError("too many samples")
        return torch.nn.functional.mse_loss(self.network(batch["x"]), batch["y"])

    def step(self, batch: Batch) -> guard.StepOutcome:
        """One step."""
        return self.recovery.step(batch, self.loss)


def weights(network: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, copied."""
    return [value.detach().clone() for value in network.state_dict().values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """True if all are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
