"""Tell a weight that an optimizer has spoiled, by a gradient that was not finite, from one that was overwritten otherwise.

Of a step that was not measured nobody has seen the gradients. They are, for good, in what the optimizer keeps, its running
means; the gradient itself is there until it is set to zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs.probes.nonfinite.gradients import bad_gradients
from torchobs.probes.nonfinite.values import Condition, condition, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_GRADIENTS = frozenset({"exp_avg", "momentum_buffer"})
"""What optimizers keep that is infinite if a gradient was; a square of a gradient, or a sum of such, may have overflowed"""


def spoiled_by(optimizers: Iterable[Any], parameter: Any, *, is_scaled: bool) -> Any:
    """Return the optimizer that has stepped with a gradient of this parameter, which is not finite, that was not; or None.

    ``is_scaled``: gradients are of a scaled loss. One that overflows is left out by its scaler, and says nothing.
    """
    for optimizer in optimizers:
        if any(each is parameter for group in list(optimizer.param_groups) for each in group["params"]):
            state = optimizer.state.get(parameter)
            kept = list(state.items()) if isinstance(state, dict) else []
            if any(_is_evidence(name, value) for name, value in kept) or (not is_scaled and bad_gradients([parameter])):
                return optimizer
    return None


def _is_evidence(name: Any, value: Any) -> bool:
    import torch  # torch is optional until training begins

    values = plain(value) if isinstance(value, torch.Tensor) else None
    if values is None:
        return False
    return bool(values.isnan().any()) or (name in _OF_GRADIENTS and condition(values) is not Condition.FINITE)
