"""Models with reentrant checkpointing, through which torch differentiates into ``.grad`` alone."""

# mypy: disable-error-code="no-untyped-call"

import pytest
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


@pytest.mark.parametrize("function", [debug.memory_usage, debug.count_flops])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_nothing_of_it_is_changed(function: type, mode: type) -> None:
    """Promise: parameters are the same objects, ``.grad`` keeps what is in it, and no hook of a parameter is called."""
    model, x, called = _Checkpointed(reentrant=True), torch.randn(8, 6), list[object]()
    before = [(name, each, each.clone()) for name, each in model.named_parameters(remove_duplicate=False)]
    for each in model.parameters():
        each.register_hook(called.append)
        each.register_post_accumulate_grad_hook(called.append)
    model.first.weight.grad = torch.ones(6, 6)
    with mode():
        function(model, x)
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(one is y and torch.equal(y, z) for (_, one), (_, y, z) in zip(after, before, strict=True))
    assert [name for name, _ in after] == [name for name, *_ in before]
    assert all(one is other for one, other in zip(model.cell._flat_weights, model.cell.parameters(), strict=True))
    assert [name for name, each in model.named_parameters() if each.grad is not None] == ["first.weight"]
    assert torch.equal(model.first.weight.grad, torch.ones(6, 6))
    assert called == []
