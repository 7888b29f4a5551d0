"""Batches of any structure: how many samples, in parts that fit, with their shares of a step, on the CPU; and their memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.support.model_calls import rebuilt, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEAST_WAIT = 100
"""Steps with a split batch before larger parts are tried again. One that does not fit costs about a step: 1 % of the time, and
less each time, since the wait doubles"""


def size_of(batch: Any) -> int:
    """Return the number of samples: the first dimension that all tensors of the batch share.

    Raises:
        ValueError: there is no tensor, or their first dimensions differ.
    """
    sizes = {tensor.shape[0] for _, tensor in walk(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensor"
        raise ValueError(f"a batch that can be split has tensors of one first dimension; here there is {found}")
    return int(sizes.pop())


def split(batch: Any, most: int) -> list[tuple[Any, float]]:
    """Return parts of at most ``most`` samples, each with its share of them; what is no tensor is in all parts.

    They are as equal as can be, so that a batch of one sample more than fit does not leave one alone: batch norm refuses that.

    Raises:
        ValueError: its tensors have no first dimension of their own, or cannot be cut.
    """
    size = size_of(batch)
    number = -(-size // most)
    edges = [size * index // number for index in range(number + 1)]
    parts = []
    for start, end in pairwise(edges):
        part = _slice(batch, start, end)
        if samples_in(part) != end - start:  # all parts would be the whole batch
            raise ValueError(f"a batch of the class {type(batch).__name__} cannot be split")
        parts.append((part, (end - start) / size))
    return parts


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


def parts_of(micro_batches: Sequence[Any], most: int | None) -> Iterator[Part]:
    """Yield the micro-batches, those of more than ``most`` samples in parts, with their shares of all samples."""
    for index, (micro_batch, share) in enumerate(zip(micro_batches, shares_of(micro_batches), strict=True)):
        is_too_large = most is not None and samples_in(micro_batch) > most
        within = split(micro_batch, most) if most is not None and is_too_large else [(micro_batch, 1.0)]
        yield from (Part(part, share * part_share, index) for part, part_share in within)


def samples_in(batch: Any) -> int:
    """Return the number of samples; 0 of a batch that cannot be split."""
    try:
        return size_of(batch)
    except ValueError:
        return 0


@dataclass(slots=True)
class PartSize:
    """How many samples may go through the model at once: as many as have fitted, and after a while more."""

    fits: int | None = None
    """None until something did not fit"""
    wait: int = LEAST_WAIT
    """steps with a split batch before twice as many are tried; doubled by each step in which something did not fit"""
    steps: int = 0
    """such steps, since the number changed or the last try"""

    @property
    def most(self) -> int | None:
        """Samples of the largest part of this step; None: any number."""
        return self.fits if self.fits is None or self.steps < self.wait else 2 * self.fits

    def is_try(self, largest: int) -> bool:
        """Return True if parts of so many samples are more than have fitted."""
        return self.fits is not None and largest > self.fits

    def passed(self, largest: int, *, is_split: bool) -> None:
        """Learn from a step that fitted, whose largest part had so many samples."""
        if self.is_try(largest):
            self.fits, self.steps = largest, 0
        elif is_split:
            self.steps += 1

    def failed(self, largest: int, *, is_first: bool) -> None:
        """Learn from an attempt that did not fit: the first one of its step, or another."""
        if is_first and self.fits is not None:
            self.wait *= 2
        self.fits = self.fits if self.is_try(largest) else -(-largest // 2)
        self.steps = 0


def on_cpu(value: Any) -> Any:
    """Return the same structure with its tensors copied to the CPU; no list or mapping is shared, whatever is in it."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else rebuilt(value, on_cpu, anew=True)


def free_memory() -> None:
    """Collect garbage, and give memory that torch caches back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _slice(batch: Any, start: int, end: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.dim() else batch
    return rebuilt(batch, lambda part: _slice(part, start, end))
