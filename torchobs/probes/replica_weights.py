"""Write down, in a few steps, what tells apart the weights of ranks that train one model by DistributedDataParallel.

DDP averages gradients: weights that differ once (a checkpoint loaded on one rank alone, a learning rate of its own) differ for
ever, while the gradients agree. Steps are powers of two, so that all ranks choose the same without a word to each other; what
is written are the norm of some weights and their sums with random signs, whose squared differences are, on average, the squared
distance between the weights (Johnson & Lindenstrauss 1984; with signs: Achlioptas 2003).
"""

from __future__ import annotations

import random
from math import fsum, sqrt
from typing import TYPE_CHECKING, Any

from torchobs import catalog
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
        """Number of the ended step after which it is looked next"""

    def before_step(self) -> None:
        """Look at the weights, if it is time: before a step's first optimizer. In the training thread."""
        step = self._context.recorder.step
        if step < self.due_at:
            return
        late = step > self.due_at
        self.due_at = (1 << (step + 1).bit_length()) - 1
        if late or self._context.device.cuda.capturing():
            return
        import torch  # torch is optional until training begins

        with torch.no_grad():
            chosen = [_some(each) for each in _evenly(list(self._parameters()), _PARAMETERS)]
            if not chosen or len({each.device for each in chosen}) > 1:
                return
            vector = torch.cat(chosen)
            self._sent.append((step + 1, vector.tolist() if vector.is_cpu else self._devices.copies.send(vector)))

    def _parameters(self) -> Iterator[Any]:
        """Yield the parameters that are the same on all ranks of the run."""
        import torch  # torch is optional until training begins

        for known in self._replicas.models:
            model = known()
            group = getattr(model, "process_group", None)
            if model is None or group is None or group.size() != torch.distributed.get_world_size():
                continue
            ignored = getattr(model, "parameters_to_ignore", ())
            for name, each in model.module.named_parameters():
                dense = type(each) in {torch.nn.Parameter, torch.Tensor} and each.layout is torch.strided
                plain = dense and each.is_floating_point()
                if plain and each.requires_grad and name not in ignored and each.is_contiguous() and each.numel():
                    yield each

    def sample(self) -> None:
        """Write what has arrived. In the sampler thread."""
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


def _some(parameter: Any) -> Any:
    return evenly_sampled(parameter.detach().view(-1), _ELEMENTS).float()


def _evenly(items: list[Any], most: int) -> list[Any]:
    return items if len(items) <= most else [items[index * len(items) // most] for index in range(most)]
