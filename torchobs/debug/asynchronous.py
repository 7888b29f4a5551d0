"""``acheck_tensor`` and ``acheck_gradients``: the same checks in an ``asyncio`` program, whose event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from torchobs.debug.gradients import EXPLODING, VANISHING, GradientCheck, check_gradients, start_gradients
from torchobs.debug.tensors import TensorStats, analyze_tensor, parameters_of, start_tensor
from torchobs.debug.values import require_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

LARGE = 1 << 16
"""Elements on the CPU from which a thread computes: some milliseconds"""


async def acheck_tensor(x: Any, name: str = "tensor") -> TensorStats:
    """Return what :func:`torchobs.debug.analyze_tensor` does, without blocking the event loop.

    A CUDA device computes on the current stream, and its answer is awaited. What the CPU has to compute of a large tensor is
    done in a thread; the tensor must not be changed meanwhile.

    Raises:
        TypeError: ``x`` is not a tensor.
    """
    require_tensor(x, "acheck_tensor")
    if _blocks([x]):
        return await asyncio.to_thread(analyze_tensor, x, name)
    numbers, build = start_tensor(x, name, "acheck_tensor")
    return build(await numbers.aread())


async def acheck_gradients(
    model: Any, loss: Any = None, *, scaler: Any = None, exploding: float = EXPLODING, vanishing: float = VANISHING
) -> GradientCheck:
    """Return what :func:`torchobs.debug.check_gradients` does, without blocking the event loop. The gradients must not change.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``, or ``loss`` not one number.
        ValueError: a threshold is not above 0.
    """
    limits = {"exploding": exploding, "vanishing": vanishing}
    named = parameters_of(model, "acheck_gradients")
    if _blocks(parameter.grad for _, parameter in named if parameter.grad is not None):
        return await asyncio.to_thread(check_gradients, model, loss, scaler=scaler, **limits)
    numbers, build = start_gradients(model, loss, scaler, "acheck_gradients", **limits)
    return build(await numbers.aread())


def _blocks(tensors: Iterable[Any]) -> bool:
    """Return True if the statistics take long on the CPU, or wait for a device (sparse and nested tensors)."""
    import torch

    on_cpu = 0
    for x in tensors:
        if x.is_nested or (x.layout is not torch.strided and x.device.type != "cpu"):
            return True
        on_cpu += x.numel() if x.device.type == "cpu" else 0
    return on_cpu >= LARGE
