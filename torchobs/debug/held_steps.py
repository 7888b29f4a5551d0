"""Hold an optimizer's step back while gradients are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.core.hook_removal import remove_hooks, remove_later
from torchobs.probes.nonfinite.backward import bad_gradients
from torchobs.probes.nonfinite.probe import skips_by_itself
from torchobs.runtime.session import current
from torchobs.support.collectives import greatest, is_shared
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from torch.utils.hooks import RemovableHandle

    from torchobs.probes.core.context import ProbeContext


class NanGuard:
    """What :func:`nan_guard` returns. As a context manager it ends with the block; else :meth:`remove` ends it."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, agree: bool = False) -> None:
        self._agree = agree
        self.held = 0
        """Number of steps held back"""
        self._gradients: list[tuple[Any, Any]] = []
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after),
        ]  # fmt: skip

    def __enter__(self) -> NanGuard:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Return the guard."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the hooks."""
        self.remove()

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        handles, self._handles = self._handles, []
        if handles:
            remove_hooks(handles)
            remove_later()
        self._give_back()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take the gradients away if one is not finite: an optimizer leaves parameters without a gradient as they are."""
        import torch

        if not self._handles:
            return  # removed, but not by torch yet
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise ValueError("nan_guard() cannot hold back a step with a closure, which computes its gradients within the step")
        self._give_back()  # of a step that raised
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        bad = [] if skips_by_itself(optimizer) else bad_gradients(parameters)
        is_bad = bool(bad)
        if self._agree and is_shared():
            is_bad = bool(greatest(is_bad, next((parameter.device for parameter in parameters), torch.device("cpu"))))
        if not is_bad:
            return
        self.held += 1
        self._gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        session = current()
        context = session.context if session is not None else None
        if context is not None:
            call(context.breaker("nonfinite"), _record, context, optimizer, len(bad), self.held)
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self._give_back()

    def _give_back(self) -> None:
        """Give the gradients back, but to parameters that have others by now."""
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        self._gradients = []


def _record(context: ProbeContext, optimizer: Any, parameters: int, held: int) -> None:
    if parameters:  # else they are another rank's
        context.hooks.nonfinite_gradient.notify(optimizer, frozenset())  # which traces them, unless it has
    context.event(catalog.EVENT_STEP_HELD, {"parameters": parameters, "held": held})


def nan_guard(optimizer: torch.optim.Optimizer, *, agree: bool = False) -> NanGuard:
    """Hold ``optimizer.step()`` back whenever a gradient is not finite, so that no weight becomes NaN.

    The parameters and the optimizer's state stay as they are in such a step; the gradients stay for the script to look at. All
    gradients are examined in every step: one pass over them on the CPU, one transfer that waits for the device on a GPU.
    Each rank looks at its own gradients. Under DDP all have the same; where parameters are in shards (FSDP, tensor parallel)
    ranks would decide differently, and ``agree=True`` lets all of them hold the step back together. Every step held back is an
    event in the flight file, and the next backward is watched for where the values are born.

    Args:
        optimizer: any optimizer of ``torch.optim``; its step must not be given a closure (LBFGS).
        agree: hold a step back on all ranks if one has such a gradient, by one all-reduce of a number in each step. All ranks
            have to step such an optimizer equally often.

    Raises:
        TypeError: it is not an optimizer.
        ValueError: in the step, if that is given a closure.
    """
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"nan_guard() takes an optimizer of torch.optim, not {type(optimizer).__name__}")
    return NanGuard(optimizer, agree=agree)
