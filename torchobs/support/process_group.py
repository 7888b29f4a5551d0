"""The default process group, if the program has made one: torch is not imported for it."""

from __future__ import annotations

from torchobs.support.import_hooks import imported


def rank_and_size() -> tuple[int, int] | None:
    """Return rank and world size of the default process group, if it is initialized."""
    distributed = imported("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
