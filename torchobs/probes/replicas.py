"""Record values that differ if ranks that train one model by DistributedDataParallel do not agree: of weights and batches.

*Weights*: DDP averages gradients: weights that differ once (a checkpoint loaded on one rank alone, a learning rate of its own)
differ for ever, while the gradients agree. Steps are powers of two, so that all ranks choose the same without communication;
the record has the norm of some weights and their sums with random signs. Their squared differences are, on average, the squared
distance between the weights (Johnson & Lindenstrauss 1984; with signs: Achlioptas 2003).

*Batches*: without a ``DistributedSampler`` each rank computes what the others compute. The first eight batches of an iteration
that trains (steps end between its fetches; an evaluation of all data on every rank is none) are each written as a number made
of some of their elements; the reader of the ranks compares them. Nothing is written where there are smaller process groups than
that of all ranks: ranks of a tensor-, sequence- or pipeline-parallel group get the same batches on purpose.
"""

from __future__ import annotations

import random
import sys
from itertools import islice
from math import fsum, isfinite, sqrt
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from torchobs import catalog
from torchobs.detect.disagreement import LOOKED_BATCHES
from torchobs.support.process_group import rank_and_size
from torchobs.tensors.batches import MOST_DEPTH, items
from torchobs.tensors.values import evenly_sampled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from weakref import ref

    from torchobs.probes.context import ProbeContext
    from torchobs.tensors.device_reads import Devices, PendingCopy

FIRST = 16
_PARAMETERS, _ELEMENTS = 16, 8
_SUMS = 8


class Replicas:
    """The DDP models of this process. Found by the distributed probe, read by the gradient probe."""

    def __init__(self) -> None:
        self.models: list[ref[Any]] = []


class ReplicaWeights:
    """A part of the gradient probe."""

    def __init__(self, context: ProbeContext, replicas: Replicas, devices: Devices) -> None:
        self._context, self._replicas, self._devices = context, replicas, devices
        self._sent: list[tuple[int, list[float] | PendingCopy]] = []
        self.due_at = FIRST - 1
        """Number of the ended step after which the next look is due"""

    def before_step(self) -> None:
        """Sample the weights, if it is time: before a step's first optimizer. In the training thread."""
        step = self._context.recorder.step
        if step < self.due_at:
            return
        late = step > self.due_at
        self.due_at = (1 << (step + 1).bit_length()) - 1
        if late or self._context.device.cuda.capturing():
            return
        with torch.no_grad():
            chosen = [
                evenly_sampled(parameter.detach().view(-1), _ELEMENTS).float()
                for parameter in _evenly(list(self._parameters()), _PARAMETERS)
            ]
            if not chosen or len({parameter.device for parameter in chosen}) > 1:
                return
            vector = torch.cat(chosen)
            self._sent.append((step + 1, vector.tolist() if vector.is_cpu else self._devices.copies.send(vector)))

    def _parameters(self) -> Iterator[Any]:
        """Yield the parameters that are the same on all ranks of the run."""
        for reference in self._replicas.models:
            model = reference()
            group = getattr(model, "process_group", None)
            if model is None or group is None or group.size() != torch.distributed.get_world_size():
                continue
            ignored = getattr(model, "parameters_to_ignore", ())
            for name, tensor in model.module.named_parameters():
                dense = type(tensor) in {torch.nn.Parameter, torch.Tensor} and tensor.layout is torch.strided
                plain = dense and tensor.is_floating_point()
                if plain and tensor.requires_grad and name not in ignored and tensor.is_contiguous() and tensor.numel():
                    yield tensor

    def sample(self) -> None:
        """Write the values that have arrived. In the sampler thread."""
        while self._sent:
            step, values = self._sent[0]
            if not isinstance(values, list):
                if not values.ready():
                    return
                values = values.take()
            self._sent.pop(0)
            self._context.writer.event(catalog.EVENT_REPLICA_WEIGHTS.name, {"values": sums_of(values)}, step)


def sums_of(values: list[float]) -> list[float]:
    """Return the norm of some numbers, and their sums with random signs, the same on every rank."""
    chance = random.Random(0)  # noqa: S311  # no secret
    signs = [[chance.choice((-1.0, 1.0)) for _ in values] for _ in range(_SUMS)]
    sums = [fsum(sign * value for sign, value in zip(row, values, strict=True)) for row in signs]
    return [float(f"{number:.7g}") for number in (sqrt(fsum(value * value for value in values)), *sums)]


def _evenly(items: list[Any], most: int) -> list[Any]:
    return items if len(items) <= most else [items[index * len(items) // most] for index in range(most)]


_MOST_ITERATIONS = 4
"""Iterations with their batches recorded; the first may be a look at the data, or an evaluation"""
_TENSORS, _ELEMENTS = 4, 4096


class ReplicaBatches:
    """A part of the loader probe."""

    def __init__(self, context: ProbeContext, replicas: Replicas) -> None:
        self._context, self._replicas = context, replicas
        self._fetched: WeakKeyDictionary[Any, list[tuple[int, float]]] = WeakKeyDictionary()
        """For each iterator the last ended step before a fetch, and the batch's number"""
        self._written = 0

    def wants(self) -> bool:
        """Return whether the batches of an iteration that begins are to be examined."""
        return self._written < _MOST_ITERATIONS and _in_one_group()

    def observe_batch(self, iterator: Any, batch: Any) -> bool:
        """Record a batch's number; return whether the next one is wanted, too. In the thread that fetches it."""
        if not self.wants():
            return False
        fetched = self._fetched.setdefault(iterator, [])
        number = number_of(batch)
        if number is None or len(fetched) >= LOOKED_BATCHES:
            return False
        fetched.append((self._context.recorder.ended, number))
        if len(fetched) < LOOKED_BATCHES:
            return True
        self._fetched.pop(iterator)
        first, last = fetched[0][0], fetched[-1][0]
        if last > first and self._is_replicated():
            self._written += 1
            values = [number for _, number in fetched]
            self._context.writer.event(catalog.EVENT_REPLICA_BATCHES.name, {"values": values}, first + 1)
        return False

    def _is_replicated(self) -> bool:
        """Return whether all ranks train one model together."""
        size = sys.modules["torch.distributed"].get_world_size()
        groups = [getattr(reference(), "process_group", None) for reference in self._replicas.models]
        return any(group is not None and group.size() == size for group in groups)


def _in_one_group() -> bool:
    """Return whether there are several ranks, and no process group of some of them."""
    group = rank_and_size()
    if group is None:
        return False
    size = group[1]
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    members = getattr(world, "pg_group_ranks", None)
    return size > 1 and members is not None and all(len(ranks) in {1, size} for ranks in dict(members).values())


def number_of(batch: Any) -> float | None:
    """Return a number that differs where some of a batch's elements do; ``None`` without tensors on the CPU."""
    total, count = 0.0, 0
    for tensor in islice(_tensors(batch, MOST_DEPTH), _TENSORS):
        flat = tensor.detach().reshape(-1)[:_ELEMENTS].double()
        weights = torch.arange(1 + count, 1 + count + len(flat), dtype=torch.float64, device="cpu").sqrt()
        total, count = total + float((flat * weights).sum()), count + len(flat)
    return total if count and isfinite(total) else None


def _tensors(part: Any, depth: int) -> Iterator[Any]:
    if type(part) is torch.Tensor:
        if part.is_cpu and part.layout is torch.strided and not part.is_complex() and not part.is_quantized and part.numel():
            yield part
    elif depth:
        for _, item in items(part):
            yield from _tensors(item, depth - 1)
