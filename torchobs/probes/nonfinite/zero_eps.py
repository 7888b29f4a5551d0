"""Find an optimizer that has divided zero by zero: its ``eps`` is too small for the data type in which it computes.

Adam and its relatives divide by the root of a running mean of squared gradients, plus ``eps`` (Kingma & Ba 2015, algorithm 1).
The usual 1e-8 is zero in float16, whose least number is 6e-8: an element whose gradients were all zero, or whose squares are,
becomes NaN. The fused implementations compute in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class ZeroEps(NamedTuple):
    """An optimizer that has made a parameter NaN."""

    optimizer: str
    """its class"""
    note: str


def divided_by_zero(optimizers: Iterable[Any], parameter: torch.Tensor) -> ZeroEps | None:
    """Return the optimizer whose ``eps`` made the parameter, which is not finite, so; ``None`` if it did not.

    What the optimizer keeps for the parameter has to be finite: gradients that were not would be in it.
    """
    import torch  # torch is optional until training begins

    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            eps, state = group.get("eps"), optimizer.state.get(parameter)
            if not isinstance(eps, float) or not eps or group.get("fused") or not isinstance(state, dict) or not state:
                continue
            kept = [one for one in state.values() if isinstance(one, torch.Tensor) and one.shape == parameter.shape]
            if not kept or not all(bool(one.isfinite().all()) for one in kept) or all(one.all() for one in kept):
                continue
            is_in = any(each is parameter for each in group["params"])
            if is_in and not torch.tensor(eps, dtype=parameter.dtype, device="cpu"):
                dtype = str(parameter.dtype).removeprefix("torch.")
                return ZeroEps(type(optimizer).__name__, f"its eps, {eps:g}, is 0 in {dtype}, so that it divides 0 by 0")
    return None
