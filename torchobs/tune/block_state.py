"""Whether a block's forward pass changes the block: computed again for the backward pass, it would not be the same pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from torchobs.support.import_hooks import imported
from torchobs.support.model_calls import call
from torchobs.support.module_modes import training
from torchobs.support.storages import stored
from torchobs.tune.difference import undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def known_state(blocks: Iterable[nn.Module]) -> str | None:
    """Return what torch has in these blocks that a forward pass changes in training, by class; None if there is nothing."""
    observers = imported("torch.ao.quantization.observer")
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(module, _BatchNorm):
            return "batch normalisation, whose statistics a second forward pass would update twice"
        if isinstance(module, _NormBase) and module.track_running_stats:
            return f"{type(module).__name__} with running statistics, which a second forward pass would update twice"
        hooks = module._forward_pre_hooks.values()
        if isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks):
            return "spectral normalisation, of which a second forward pass would have another weight"
        if observers is not None and isinstance(module, observers.ObserverBase):
            return "observers of quantisation, which a second forward pass would update twice"
    return None


def tried_state(model: nn.Module, example: Any, blocks: Sequence[nn.Module]) -> str | None:
    """Return which block's buffers a forward pass in training mode changes, by trial; None if none does.

    What the first pass alone fills (tables, first statistics) is the same after a second: two are done, without gradients, and
    buffers, random states and modes are put back. State that is in no buffer is not seen.

    Raises:
        ValueError: parameters are not initialised yet, which a pass would do.
    """
    if any(map(is_lazy, model.parameters())):
        raise ValueError("parameters are not initialised yet")
    with undisturbed(model), training(model), torch.no_grad():
        call(model, example)
        before = [{name: buffer.clone() for name, buffer in block.named_buffers()} for block in blocks]
        call(model, example)
        for block, values in zip(blocks, before, strict=True):
            for name, buffer in block.named_buffers():
                if name not in values or not _equal(values[name], buffer):
                    return f"{type(block).__name__}'s buffer {name!r}, which a second forward pass would change again"
    return None


def _equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return True if two buffers hold the same, NaN in the same places: nothing has been written to such a one yet."""
    mine, theirs = (x.unbind() if x.is_nested else stored(x) for x in (before, after))
    return len(mine) == len(theirs) and all(map(_parts_equal, mine, theirs))


def _parts_equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    if torch.equal(before, after):
        return True
    if before.shape != after.shape or not (before.is_floating_point() or before.is_complex()):
        return False
    return bool(((before == after) | (before.isnan() & after.isnan())).all())
