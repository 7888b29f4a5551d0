"""A step's batches as they go through the model: each with its share of the samples, in parts where one does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.guard.batches import shares_of, size_of, split

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
