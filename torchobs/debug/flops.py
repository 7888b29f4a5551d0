"""``count_flops``: the floating-point operations of a forward and a backward pass, counted operator by operator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchobs.debug.backward_passes import beside_grad
from torchobs.debug.batch_memory import loss_of
from torchobs.debug.tensors import require_module
from torchobs.support.kept_state import state_kept
from torchobs.support.model_calls import call
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.debug.backward_passes import Backward


@dataclass(frozen=True, slots=True)
class FlopCount(Result):
    """Floating-point operations of one batch."""

    model: str
    forward: int
    backward: int
    operators: tuple[tuple[str, int], ...]
    """Operators of both passes with their operations, the greatest first"""
    unknown: tuple[str, ...]
    """Operators that multiply, and are not counted, since no formula of them is known: other libraries', Fourier transforms,
    decompositions of matrices"""

    @property
    def flops(self) -> int:
        """Those of both passes."""
        return self.forward + self.backward


class _AllTogether(AbstractContextManager[None]):
    """Takes the place of torch's tracker of modules: every operator is the whole model's."""

    parents = frozenset({"Global"})

    def __exit__(self, *_: object) -> None:
        """Leave no hook, since there is none."""


def count_flops(model: Any, batch: Any, *, loss_fn: Callable[[Any], Any] | None = None) -> FlopCount:
    """Count the operations of the matrix products, convolutions and attention in a forward and a backward pass of a batch.

    By ``torch.utils.flop_counter.FlopCounterMode``, with formulas for operators that it does not know (recurrent layers and
    attention on the CPU among them); nothing else counts (no normalisation, no activation). What has no formula is in
    ``unknown``. Recomputation by activation checkpointing counts. Nothing of the model is changed: gradients
    are computed beside ``.grad``, and buffers and the random state are put back. It is two passes: call it once, and give the
    result to ``torchobs.log(flops=...)``, multiplied by the number of batches of a step.

    Args:
        model: the module, not compiled; in train mode, as it is trained.
        batch: as for :func:`torchobs.debug.forward_pass`, on the model's device.
        loss_fn: of the output; without it, the output's ``loss``, or the sum of its floating-point tensors.

    Raises:
        TypeError: ``model`` is no module. What the model raises goes on.
    """
    require_module(model, "count_flops")
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from torchobs.debug.flop_formulas import UnknownProducts, formulas

    counter: Any = FlopCounterMode(display=False, custom_mapping=formulas())
    counter.mod_tracker = _AllTogether()  # torch's own has hooks that no model takes which differentiates in its forward pass
    unknown = UnknownProducts(counter.flop_registry)

    def passes(backward: Backward) -> tuple[int, int]:
        with state_kept(model), torch.inference_mode(mode=False), torch.enable_grad(), unknown, counter:
            loss = loss_of(call(model, batch), loss_fn)
            forward = counter.get_total_flops()
            backward(loss)
            return int(forward), int(counter.get_total_flops())

    forward, total = beside_grad(model, passes)
    found = counter.get_flop_counts().get("Global", {})
    operators = sorted(((str(operator), int(number)) for operator, number in found.items()), key=lambda row: -row[1])
    return FlopCount(type(model).__name__, forward, total - forward, tuple(operators), tuple(sorted(unknown.names)))
