"""What a training loop asks of a loader, and where its batches go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from torchobs.support.samplers import samplers


def length(loader: Any) -> int | None:
    """Return the number of batches, or None where nobody knows: of a generator, of a DataLoader over an iterable data set."""
    try:
        return len(loader)
    except TypeError:
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers that shuffle by the number of the epoch, as a ``DistributedSampler`` does."""
    for sampler in samplers(loader):
        if callable(told := getattr(sampler, "set_epoch", None)):
            told(epoch)


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device, in whatever lists, tuples and mappings they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):
        packed: Any = value
        return packed.to(device)  # the sizes of its batches stay on the host
    if isinstance(value, Mapping):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
