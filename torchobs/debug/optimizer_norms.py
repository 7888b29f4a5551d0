"""The gradient norm that an optimizer's step starts from, computed on the gradients' device and read later."""

from __future__ import annotations

import sys
from threading import Lock
from typing import TYPE_CHECKING, Any

from torchobs.debug.gradients import scale_in_use
from torchobs.probes.core.hook_removal import remove_hooks, remove_later
from torchobs.probes.gradients.norms import device_norms, local
from torchobs.support.after_fork import renew_in_child
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_lock = Lock()
renew_in_child(sys.modules[__name__], _lock=Lock)
_handles: list[Any] = []
_wanted = 0


def watch_steps(note: Callable[[Any], None]) -> None:
    """Call ``note`` with the norm of the gradients, a tensor, before each optimizer step, until :func:`unwatch_steps`."""
    global _handles, _wanted  # noqa: PLW0603  # the hook is one for the process
    torch: Any = imported("torch")
    with _lock:
        _wanted += 1
        if _handles or torch is None:
            return

        handles: list[Any] = []

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            del args, kwargs
            if handles is not _handles or torch.compiler.is_compiling():  # removed, but not by torch yet
                return
            norm = _norm_of_step(torch, optimizer)
            if norm is not None:
                note(norm)

        from torch.optim.optimizer import register_optimizer_step_pre_hook

        handles.append(register_optimizer_step_pre_hook(before_step))
        _handles = handles


def unwatch_steps() -> None:
    """Undo one :func:`watch_steps`; the last one removes the hook."""
    global _handles, _wanted  # noqa: PLW0603  # as above
    with _lock:
        _wanted -= 1
        if not _wanted and _handles:
            handles, _handles = _handles, []
            remove_hooks(handles)
            remove_later()


def _norm_of_step(torch: Any, optimizer: Any) -> Any:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # a fused optimizer under a loss scaler unscales in its kernel
    return norm_of(torch, parameters, getattr(optimizer, "grad_scale", None))


def norm_of_model(model: Any) -> Any:
    """Return the norm of a module's gradients, unscaled, as a tensor; ``None`` if it has none."""
    import torch

    return norm_of(torch, list(model.parameters()), scale_in_use(None))


def norm_of(torch: Any, parameters: Iterable[Any], scale: Any) -> Any:
    """Return the L2 norm of all gradients as a tensor; ``None`` without any. Of a DTensor the local shard's."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_device: dict[Any, list[Any]] = {}
    with torch.no_grad():
        for gradient in local([0] * len(gradients), gradients).tensors if gradients else ():
            by_device.setdefault(gradient.device, []).append(gradient)
        totals = [torch.linalg.vector_norm(device_norms(group)[0]) for group in by_device.values()]
        if not totals:
            return None
        # of several devices the first one: a model that is spread over some is rare, and this copies one number each
        total = torch.linalg.vector_norm(torch.stack([one.to(totals[0].device, non_blocking=True) for one in totals]))
        return total if scale is None else total / scale.to(total.device, non_blocking=True)
