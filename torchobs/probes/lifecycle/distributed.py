"""Distributed training: the process group, the kinds of parallelism, and DistributedDataParallel's own timings.

Nothing here communicates. DDP's logger is read in the training thread, at the start of a backward, every ten seconds (8 µs):
reading takes the reducer's lock, which a backward holds while it waits for a slow rank. With a rank that came 3 s late, a
call from another thread took as long, and the sampler's heartbeat must go on.
"""

from __future__ import annotations

import functools
import sys
import weakref
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.core.patch import Patch
from torchobs.probes.lifecycle.coordinates import AXES, groups
from torchobs.probes.lifecycle.parallelism import Parallelism, recognise
from torchobs.probes.lifecycle.unused_parameters import UnusedParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchobs.catalog import Metric
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.replica_weights import Replicas

_MODELS = 8
_PARTS = {
    "forward": "forward_compute_time",
    "backward": "backward_compute_time",
    "communication": "backward_comm_time",
    "overlap": "backward_compute_comm_overlap_time",
}


class DistributedProbe:
    """Finds DDP models when they are created; those created before ``init()`` when they run."""

    name = "distributed"

    def __init__(self, replicas: Replicas | None = None) -> None:
        self._patch: Patch | None = None
        self._models = replicas.models if replicas is not None else list[weakref.ref[Any]]()
        self._parallelism = Parallelism()
        self._unused = UnusedParameters()
        self._seen: set[int] = set()
        self._published: tuple[object, ...] | None = None
        self._fresh = False
        self._info: dict[Metric, dict[str, str]] = {}

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        import torch.distributed
        from torch.nn.parallel import DistributedDataParallel

        self._context, self._distributed = context, torch.distributed
        if not torch.distributed.is_available():
            return
        self._ddp = DistributedDataParallel
        self._read = context.breaker(self.name).guard(self._read_ddp)
        self._explain = context.breaker(self.name).guard(self._unused.describe)
        context.explain_error.append(self._explain)
        watched = partial(self._watched, context.breaker(self.name).guard(self._note_new))
        self._patch = Patch(DistributedDataParallel, "__init__", watched, probe=self.name, nests=True)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`. Reads a last time, when no backward can hold the lock."""
        patch, self._patch = self._patch, None
        if patch is None:
            return
        patch.undo()
        self._context.explain_error.remove(self._explain)
        if not self._context.training.backwards:
            self._read_group()
            self._read()

    def sample(self) -> None:
        """Find models created before ``init()`` by their running forward; observe at once if there is a new model."""
        if self._patch is not None and not self._models and self._distributed.is_initialized():
            running = getattr(self._ddp, "_active_ddp_module", None)
            if running is not None:
                self._note(running)
        if self._fresh:
            self._fresh = False
            self.observe()

    def observe(self) -> None:
        """Publish the process group and parallelism; read DDP's timings at the next backward."""
        if self._patch is None:
            return
        self._read_group()
        if self._living():
            self._context.at_backward(self._read)

    def _watched(self, note: Callable[[Any], None], original: Any) -> Any:
        @functools.wraps(original)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it replaces __init__
            original(model, *args, **kwargs)
            note(model)

        return __init__

    def _note_new(self, model: Any) -> None:
        self._unused.add(model)
        self._note(model)

    def _note(self, model: Any) -> None:
        if model not in self._living() and len(self._models) < _MODELS:
            self._models.append(weakref.ref(model))
            self._fresh = True

    def _living(self) -> list[Any]:
        return [model for known in list(self._models) if (model := known()) is not None]

    def _read_group(self) -> None:
        distributed = self._distributed
        if not distributed.is_initialized():
            if self._published is not None:
                self._context.set_gauge(catalog.DISTRIBUTED_WORLD_SIZE, nan)
            return
        optimizers = self._context.recorder.optimizers()
        known = groups()  # if their number has changed, there may be a new mesh
        kinds = {id(optimizer) for optimizer in optimizers} | {id(model) for model in self._living()} | {len(known)}
        if kinds != self._seen or "torch.distributed.fsdp" in sys.modules:
            self._seen = kinds
            self._parallelism = recognise(optimizers, ddp=bool(self._living()))
        try:
            backend, world_size = str(distributed.get_backend()), distributed.get_world_size()
        except ValueError:  # the training thread has just destroyed the group
            return
        self._publish_group(backend, world_size)

    def _publish_group(self, backend: str, world_size: int) -> None:
        spread = self._parallelism
        parallelism, mesh = "+".join(spread.kinds), ",".join(f"{name}={size}" for name, size in spread.mesh)
        self._context.set_gauge(catalog.DISTRIBUTED_WORLD_SIZE, world_size)
        self._context.set_gauge(catalog.DISTRIBUTED_COPIES, spread.copies)
        if spread.coordinates:
            self._describe(
                catalog.DISTRIBUTED_COORDINATES, dict.fromkeys(AXES, "") | {a: str(i) for a, i in spread.coordinates}
            )
        if self._published != (backend, world_size, parallelism, mesh):
            self._published = (backend, world_size, parallelism, mesh)
            described = {"backend": backend, "parallelism": parallelism, "mesh": mesh}
            self._describe(catalog.DISTRIBUTED_INFO, described)
            self._context.writer.event(catalog.EVENT_DISTRIBUTED.name, described | {"world_size": world_size})

    def _read_ddp(self) -> None:
        """Read DDP's loggers. Several models (a GAN's) are summed; common settings are those of the largest."""
        data = [model._get_ddp_logging_data() for model in self._living() if getattr(model, "logger", None) is not None]
        timed = [one for one in data if one.get("iteration", 0) > 0 and not one.get("has_error")]
        for part, key in _PARTS.items() if timed else ():
            self._context.set_gauge(catalog.DDP_TIME, sum(one.get(key, 0) for one in timed) / 1e9, {"part": part})
        if not data:
            return
        if not any(one.get("iteration", 0) for one in data):
            self._context.at_backward(self._read)  # the first backward: DDP has timed nothing yet, and the next asking is far
        buckets = [int(size) for one in data for size in _list(one.get("bucket_sizes", ""))]
        if buckets:
            self._context.set_gauge(catalog.DDP_BUCKETS, len(buckets))
            self._context.set_gauge(catalog.DDP_BUCKET_SIZE, max(buckets))
        unused = [one["unused_parameter_size"] for one in timed if one.get("find_unused_parameters")]
        if unused:
            self._context.set_gauge(catalog.DDP_UNUSED_SIZE, sum(unused))
        self._describe(catalog.DDP_INFO, _setup(max(data, key=lambda one: int(one.get("total_parameter_size_bytes", 0)))))

    def _describe(self, metric: Metric, attributes: dict[str, str]) -> None:
        """Set an info metric to 1 with these labels, and remove it with the previous ones."""
        before = self._info.get(metric)
        if before is not None and before != attributes:
            self._context.set_gauge(metric, nan, before)
        self._info[metric] = attributes
        self._context.set_gauge(metric, 1.0, attributes)


def _setup(data: Mapping[str, Any]) -> dict[str, str]:
    switches = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    chosen = {name: "true" if data.get(name) else "false" for name in switches}
    return chosen | {"comm_hook": str(data.get("comm_hook", ""))}


def _list(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word.isdigit()]
