"""Write down what tells whether ranks that train one model by DistributedDataParallel are given the same batches.

Without a ``DistributedSampler`` each rank computes what the others compute. The first eight batches of an iteration that trains
(steps end between its fetches; an evaluation of all data on every rank is none) are each written as a number made of some of
their elements; whoever reads the ranks compares them. Nothing is written where there are smaller process groups than that of
all ranks: ranks of a tensor-, sequence- or pipeline-parallel group are given the same batches on purpose.
"""

from __future__ import annotations

import sys
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torchobs import catalog
from torchobs.detect.disagreement import LOOKED_BATCHES
from torchobs.support.process_group import rank_and_size
from torchobs.tensors.batches import MOST_DEPTH, items

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.probes.context import ProbeContext
    from torchobs.probes.replica_weights import Replicas

_MOST_ITERATIONS = 4
"""Iterations of which the batches are written; the first may be a look at the data, or an evaluation"""
_TENSORS, _ELEMENTS = 4, 4096


class ReplicaBatches:
    """A part of the loader probe."""

    def __init__(self, context: ProbeContext, replicas: Replicas) -> None:
        self._context, self._replicas = context, replicas
        self._seen: WeakKeyDictionary[Any, list[tuple[int, float]]] = WeakKeyDictionary()
        """Of each iterator the last ended step before a fetch, and the batch's number"""
        self._written = 0

    def wants(self) -> bool:
        """Return True if the batches of an iteration that begins are to be looked at."""
        return self._written < _MOST_ITERATIONS and _in_one_group()

    def look(self, iterator: Any, batch: Any) -> bool:
        """Look at a batch; return True if the next one is wanted, too. In the thread that fetches it."""
        if not self.wants():
            return False
        seen = self._seen.setdefault(iterator, [])
        number = number_of(batch)
        if number is None or len(seen) >= LOOKED_BATCHES:
            return False
        seen.append((self._context.recorder.ended, number))
        if len(seen) < LOOKED_BATCHES:
            return True
        self._seen.pop(iterator)
        first, last = seen[0][0], seen[-1][0]
        if last > first and self._is_replicated():
            self._written += 1
            values = [number for _, number in seen]
            self._context.writer.event(catalog.EVENT_REPLICA_BATCHES.name, {"values": values}, first + 1)
        return False

    def _is_replicated(self) -> bool:
        """Return True if all ranks train one model together."""
        size = sys.modules["torch.distributed"].get_world_size()
        groups = [getattr(known(), "process_group", None) for known in self._replicas.models]
        return any(group is not None and group.size() == size for group in groups)


def _in_one_group() -> bool:
    """Return True if there are several ranks, and no process group of some of them."""
    group = rank_and_size()
    if group is None:
        return False
    size = group[1]
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    members = getattr(world, "pg_group_ranks", None)
    return size > 1 and members is not None and all(len(ranks) in {1, size} for ranks in dict(members).values())


def number_of(batch: Any) -> float | None:
    """Return a number that differs where some of a batch's elements do; ``None`` without tensors on the CPU."""
    import torch  # torch is optional until training begins

    total, found = 0.0, 0
    for tensor in islice(_tensors(batch, MOST_DEPTH), _TENSORS):
        flat = tensor.detach().reshape(-1)[:_ELEMENTS].double()
        weights = torch.arange(1 + found, 1 + found + len(flat), dtype=torch.float64, device="cpu").sqrt()
        total, found = total + float((flat * weights).sum()), found + len(flat)
    return total if found and isfinite(total) else None


def _tensors(part: Any, depth: int) -> Iterator[Any]:
    import torch  # torch is optional until training begins

    if type(part) is torch.Tensor:
        if part.is_cpu and part.layout is torch.strided and not part.is_complex() and not part.is_quantized and part.numel():
            yield part
    elif depth:
        for _, item in items(part):
            yield from _tensors(item, depth - 1)
