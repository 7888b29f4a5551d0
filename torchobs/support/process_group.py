"""The default process group, and small exchanges over it."""

from __future__ import annotations

from contextlib import contextmanager
from time import sleep
from typing import TYPE_CHECKING, Any

from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def rank_and_size() -> tuple[int, int] | None:
    """Return rank and world size of the default process group, if it is initialized."""
    distributed = imported("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


_LETTING_GO_S = 0.01


def is_shared() -> bool:
    """Return whether several ranks train together."""
    group = rank_and_size()
    return group is not None and group[1] > 1


def greatest(value: float, device: torch.device) -> float:
    """Return the greatest value of all ranks, by one all-reduce of a number."""
    import torch

    number = torch.tensor(float(value), device=device)
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
    return float(number.item())


@contextmanager
def gradient_sync(model: Any, *, on: bool) -> Iterator[None]:
    """Let DDP and FSDP average gradients in the last backward pass of a step alone."""
    no_sync, set_sync = getattr(model, "no_sync", None), getattr(model, "set_requires_gradient_sync", None)
    if not on and callable(no_sync):  # DDP, FSDP1
        with no_sync():
            yield
    elif not on and callable(set_sync):  # FSDP2
        set_sync(False)
        try:
            yield
        finally:
            set_sync(True)
    else:
        yield


def let_backend_finish() -> None:
    """Wait a moment after a collective, so that the thread of gloo's that ran it has let go of the tensors.

    It does so after the call has returned, and needs Python's lock for it. A process group that is
    destroyed in that moment, as by the end of a script, waits for the thread while it holds the lock, for ever (torch 2.13: in
    one of eight runs). Not for what is called in each step, where the program goes on.
    """
    sleep(_LETTING_GO_S)
