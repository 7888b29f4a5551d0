"""``count_flops``: the floating-point operations of a forward and a backward pass, by torch's counter."""

# mypy: disable-error-code="no-untyped-call"
# torch has no types for its dispatch modes

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchobs.debug.tensors import require
from torchobs.support.result import Result
from torchobs.tensors.losses import compute_loss
from torchobs.tensors.running import beside_grad, state_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.tensors.running import Backward

_PRODUCTS = re.compile(
    r"(?:^|_)[a-z]*m[mv](?:_|$)|conv(?!ert)|matmul|attention|rnn_layer|_rnn$|_rnn_backward|lstm$|gru$|mkldnn_linear|_trilinear"
    r"|transformer_encoder|_fft_|[cp]dist|linalg_(?!vector_norm|check_errors)|cholesky|_solve$|matrix_exp|ormqr|householder"
)
"""Names of torch's operators that multiply: products of matrices, convolutions, transforms, decompositions"""


@dataclass(frozen=True, slots=True)
class FlopCount(Result):
    """Floating-point operations of one batch."""

    model: str
    forward: int
    backward: int
    operators: tuple[tuple[str, int], ...]
    """Operators of both passes with their operations, the greatest first"""
    unknown: tuple[str, ...]
    """Operators that multiply but are not counted, since torch's counter has no formula for them"""

    @property
    def flops(self) -> int:
        """Those of both passes."""
        return self.forward + self.backward


class _AllTogether(AbstractContextManager[None]):
    """Takes the place of torch's tracker of modules: every operator is the whole model's."""

    parents = frozenset({"Global"})

    def __exit__(self, *_: object) -> None:
        """Leave no hook, since there is none."""


def count_flops(model: Any, batch: Any, loss_fn: Callable[..., Any] | None = None) -> FlopCount:
    """Count the operations of the matrix products, convolutions and attention in a forward and a backward pass of a batch.

    ``torch.utils.flop_counter.FlopCounterMode`` counts; normalisation and activations are left out. Operators without a formula
    (recurrent layers, fused attention on the CPU) are in ``unknown``. Recomputation by activation checkpointing counts. The
    model is not changed: gradients are computed beside ``.grad``, and buffers and the random state are put back. It is two
    passes: call it once, and give the result, times the batches of a step, to ``torchobs.log(flops=...)``.

    Args:
        model: the module, not compiled; in train mode, as it is trained.
        batch: as for :func:`torchobs.debug.forward_pass`, on the model's device.
        loss_fn: as for :func:`torchobs.debug.trace_nan`.

    Raises:
        TypeError: ``model`` is no module. What the model raises goes on.
    """
    require(model, "nn.Module", "count_flops")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = _AllTogether()  # torch's has hooks that fail in models that differentiate in their forward pass
    unknown = set[str]()

    class UnknownProducts(TorchDispatchMode):
        """Collects operators that multiply and have no formula. It is entered before the counter, which decomposes them."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            packet = getattr(func, "_overloadpacket", None)  # the name by which the counter's formulas are known
            if packet is not None and func.namespace == "aten" and packet not in counter.flop_registry:
                unknown.update([str(packet)] if _PRODUCTS.search(packet.__name__) else [])
            return func(*args, **(kwargs or {}))

    def passes(backward: Backward) -> tuple[int, int]:
        with state_kept(model), torch.inference_mode(mode=False), torch.enable_grad(), UnknownProducts(), counter:
            loss = compute_loss(model, batch, loss_fn)
            forward = counter.get_total_flops()
            backward(loss)
            return int(forward), int(counter.get_total_flops())

    forward, total = beside_grad(model, passes)
    counts = counter.get_flop_counts().get("Global", {})
    operators = sorted(((str(operator), int(number)) for operator, number in counts.items()), key=lambda row: -row[1])
    return FlopCount(type(model).__name__, forward, total - forward, tuple(operators), tuple(sorted(unknown)))
