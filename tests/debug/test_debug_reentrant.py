"""Models with reentrant checkpointing, through which torch differentiates into ``.grad`` alone."""

# mypy: disable-error-code="no-untyped-call"

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchobs import debug


class _Checkpointed(nn.Module):
    """Recomputes a recurrent layer and a part that has the weights of the first layer."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.cell, self.tied = nn.Linear(6, 6), nn.GRU(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(y: torch.Tensor) -> torch.Tensor:
            return self.tied(self.cell(y)[0]).tanh()  # type: ignore[no-any-return]

        return checkpoint(part, self.first(x), use_reentrant=self.reentrant).square()  # type: ignore[no-any-return]


def test_it_is_measured_as_the_other_kind_is() -> None:
    """Promise: the same operations, recomputation among them, and the same parameters, gradients and input."""
    reentrant, other = _Checkpointed(reentrant=True), _Checkpointed(reentrant=False)
    x = torch.randn(8, 6)
    assert debug.count_flops(reentrant, x).flops == debug.count_flops(other, x).flops
    found, expected = debug.memory_usage(reentrant, x), debug.memory_usage(other, x)
    assert (found.parameters, found.gradients, found.inputs) == (expected.parameters, expected.gradients, expected.inputs)
    assert found.peak > found.gradients
