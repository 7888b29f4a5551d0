"""Which rank had a loss that is not finite, where averaged gradients bring its NaN to all of them.

A rank writes it into the store with which the process group was made, before its backward pass and so before gradients are
exchanged: one whose own loss was finite finds it there. No collective is called and no rank waits for another.
"""

from __future__ import annotations

import sys
from typing import Any

from torchobs.support.process_group import rank_and_size

_KEY = "torchobs/nonfinite_loss/"


def post(step: int) -> None:
    """Tell the other ranks that this one's loss is not finite in this step. Raises what the store raises."""
    store = _store()
    if store is not None:
        store.set(f"{_KEY}{step}", str(_rank()))
        store.add(f"{_KEY}count", 1)  # waits for the store's answer: what was set is there before the backward pass begins


def another(step: int) -> int | None:
    """Return a rank, other than this one, whose loss was not finite in this step; None if none has said so."""
    store = _store()
    if store is None or not store.check([f"{_KEY}{step}"]):
        return None
    rank = int(store.get(f"{_KEY}{step}"))
    return rank if rank != _rank() else None


def _rank() -> int:
    import torch  # torch is optional until training begins

    return int(torch.distributed.get_rank())


def _store() -> Any:
    """Return the default process group's store; None outside of a job of several ranks."""
    group = rank_and_size()
    if group is None or group[1] <= 1:
        return None
    get = getattr(sys.modules["torch.distributed.distributed_c10d"], "_get_default_store", None)
    return get() if get is not None else None  # the one that init_process_group was given or made
