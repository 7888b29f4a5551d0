"""Batches of any structure: how many samples, in parts with their shares of a step, on the CPU; and the memory they took."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Part(NamedTuple):
    """What goes through the model at once: a micro-batch, or a part of one."""

    batch: Any
    share: float
    """of the step's samples"""
    micro_batch: int
    """index of the micro-batch that it belongs to"""


def parts_of(micro_batches: Sequence[Any], splits: int) -> Iterator[Part]:
    """Yield the micro-batches, those that can be split in so many parts, with their shares of all samples."""
    for index, (micro_batch, share) in enumerate(zip(micro_batches, shares_of(micro_batches), strict=True)):
        within = split(micro_batch, splits) if splits > 1 and can_be_split(micro_batch, 1) else [(micro_batch, 1.0)]
        yield from (Part(part, share * part_share, index) for part, part_share in within)


def can_be_split(batch: Any, parts: int) -> bool:
    """Return True if the batch has more samples than parts."""
    try:
        return size_of(batch) > parts
    except ValueError:
        return False


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
