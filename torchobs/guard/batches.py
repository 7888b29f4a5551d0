"""Batches of any structure: how many samples, in parts, on the CPU; and the memory that they took."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def size_of(batch: Any) -> int:
    """Return the number of samples: the first dimension that all tensors of the batch share.

    Raises:
        ValueError: there is no tensor, or their first dimensions differ.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensor"
        raise ValueError(f"a batch that can be split has tensors of one first dimension; here there is {found}")
    return int(sizes.pop())


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """Return at most ``parts`` parts of a batch, each with its share of the samples; what is no tensor is in all parts."""
    size = size_of(batch)
    length = -(-size // parts)
    starts = range(0, size, length)
    return [(_slice(batch, start, start + length), min(length, size - start) / size) for start in starts]


def shares_of(batches: Sequence[Any]) -> list[float]:
    """Return the share of each batch in the samples of all; equal shares where a number of samples is not known."""
    try:
        sizes = [size_of(batch) for batch in batches]
    except ValueError:
        sizes = []
    total = sum(sizes)
    return [size / total for size in sizes] if total else [1 / len(batches)] * len(batches)


def on_cpu(value: Any) -> Any:
    """Return the same structure with its tensors copied to the CPU."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def free_memory() -> None:
    """Collect garbage, and give memory that torch caches back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _slice(batch: Any, start: int, end: int) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[start:end] if tensor.dim() else tensor, batch)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
