"""Counts samples and tokens of a DataLoader's batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

_MAX_PARTS = 16
"""Most elements of a batch that are inspected: it may be a list of a million numbers"""


def samples_in(batch: Any) -> int:
    """Return the first dimension of the batch's first tensor; 0 if there is none."""
    if hasattr(batch, "dim"):
        return int(batch.shape[0]) if batch.dim() else 0
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    return next((number for part in islice(parts, _MAX_PARTS) if (number := samples_in(part))), 0)


def tokens_in(batch: Any) -> int:
    """Return the number of elements of the batch's ``input_ids``, padding included; 0 if it has none."""
    ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.numel()) if hasattr(ids, "numel") else 0
