"""What a training loop asks of a loader, and where its batches go."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from torchobs.support.model_calls import rebuilt
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
    """Return a batch with its tensors on the device, in whatever lists, tuples, mappings and dataclasses they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):
        packed: Any = value
        return packed.to(device)  # the sizes of its batches stay on the host
    return rebuilt(value, lambda part: moved(part, device))
