"""Raise an error where a loss or gradients are not finite, for ``init(raise_on={"nonfinite"})``.

It is raised when the backward pass of such a loss returns, and before an optimizer steps with such gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs.probes.core.hook_removal import remove_hooks
from torchobs.probes.core.patch import Patch
from torchobs.probes.nonfinite.backward import bad_gradients
from torchobs.probes.nonfinite.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.nonfinite.origin import NonfiniteOrigin
    from torchobs.support.error_guard import CircuitBreaker


class NonfiniteRaiser:
    """A part of the probe, from its making until :meth:`remove`."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker, trace: Callable[[Any], object]) -> None:
        """``trace``: called with an optimizer whose gradients are not finite; it calls :meth:`expect`."""
        import torch  # torch is optional until training begins
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._context, self._trace = context, trace
        self._pending: NonFiniteError | None = None
        look = breaker.guard(self._look_at_gradients)

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            del args, kwargs
            look(optimizer)
            self._raise_pending()

        self._patch = Patch(torch.autograd, "backward", self._watched)
        self._handles = [register_optimizer_step_pre_hook(before)]

    def remove(self) -> None:
        """Remove hook and wrapper."""
        remove_hooks(self._handles)
        self._patch.undo()

    def expect(self, what: str, origin: NonfiniteOrigin | None) -> None:
        """Have an error raised at the next place for it."""
        self._pending = NonFiniteError(what, origin)

    def _look_at_gradients(self, optimizer: Any) -> None:
        if self._pending is not None or skips_by_itself(optimizer) or self._context.device.cuda.capturing():
            return
        if bad_gradients(parameter for group in optimizer.param_groups for parameter in group["params"]):
            self._trace(optimizer)

    def _raise_pending(self) -> None:
        error, self._pending = self._pending, None
        if error is not None:
            raise error

    def _watched(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._raise_pending()
            return result

        return backward


def skips_by_itself(optimizer: Any) -> bool:
    """Return True for a fused step that a loss scaler has told whether to skip: its overflow is no fault."""
    import torch  # torch is optional until training begins

    return isinstance(getattr(optimizer, "found_inf", None), torch.Tensor)
