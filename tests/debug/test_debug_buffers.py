"""A model whose buffers are of any kind of tensor that torch has: nothing that runs a model beside its training minds."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchobs import debug, guard, tune

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what torch says of sparse, quantised and nested tensors

WHOLE = torch.arange(12.0).reshape(3, 4)
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": WHOLE.to_sparse,
    "sparse_csr": WHOLE.to_sparse_csr,
    "sparse_bsc": lambda: WHOLE.to_sparse_bsc((1, 2)),
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 5),
    "expanded twice": lambda: torch.ones(()).expand(2, 3),
    "quantised": lambda: torch.quantize_per_tensor(WHOLE, 0.1, 0, torch.qint8),
    "quantised by channel": lambda: torch.quantize_per_channel(WHOLE, torch.ones(3), torch.zeros(3).int(), 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


def _dies(_: torch.Tensor) -> torch.Tensor:
    return torch.full((), float("nan"), requires_grad=True)


def _skip(model: nn.Module, x: torch.Tensor) -> None:
    recovery = guard.Recovery(model, torch.optim.SGD(model.parameters(), 0.1))
    assert recovery.step(x, lambda batch: _dies(model(batch))).action == "skip"


def _benchmark(model: nn.Module, x: torch.Tensor) -> None:
    tune.benchmark(model, (x, x), None, nn.functional.mse_loss, modes=("none",), rounds=6)


def _budget(model: nn.Module, x: torch.Tensor) -> None:
    tune.optimize(model, mode="memory_efficient", checkpoint=nn.Linear, activation_budget=1, example=x)


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "memory_usage": debug.memory_usage,
    "count_flops": debug.count_flops,
    "trace_nan": debug.trace_nan,
    "devices": debug.devices,
    "ddp": lambda model, _: debug.ddp(model),
    "Recovery": _skip,
    "benchmark": _benchmark,
    "activation_budget": _budget,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_may_be_of_any_kind(kind: str) -> None:
    """Promise: none of them raises or ends the process, and the buffer is the same tensor afterwards."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)
    buffer = KINDS[kind]()
    model.register_buffer("odd", buffer)
    for run in RUNS.values():
        run(model, x)
        assert model.odd is buffer
