"""Distributed training: the process group, each kind of parallelism and the rank's place in it, DDP's own timings.

Nothing here communicates, or imports anything: read are the names of device-mesh dimensions, and the parallel state of
Megatron-LM and DeepSpeed if they are loaded. DDP's logger is read in the training thread, at the start of a backward, every
ten seconds (8 µs): reading takes the reducer's lock, which a backward holds while it waits for a slow rank. With a rank that
came 3 s late, a call from another thread took as long, and the sampler's heartbeat must go on.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
import weakref
from functools import partial
from math import nan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.probes.exits import root_cause, runtime_message
from torchobs.support.import_hooks import imported
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torchobs.catalog import Metric
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.replicas import Replicas


_INDICES = re.compile(r"^Parameter indices which did not receive grad for rank \d+: (\d[\d ]*?)( \.\.\.)?$", re.MULTILINE)
"""Parameters in the message of ``reducer.cpp`` (``Reducer::ensure_prior_reduction_finished``), at most a hundred"""
_FILE = "torch/nn/parallel/distributed.py"
_MAX_NAMED = 8
_MAX_NAME = 120


def _raising(error: BaseException) -> Any:
    """Return the DDP module that raised the error; ``None`` if the traceback has none."""
    from torch.nn.parallel import DistributedDataParallel

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename.endswith(_FILE)]
    owners = [frame.f_locals.get("self") for frame in reversed(frames)]
    return next((owner for owner in owners if isinstance(owner, DistributedDataParallel)), None)


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that ``DistributedDataParallel._build_params_for_reducer`` collects, with names."""
    yielded = set[int]()
    for prefix, module in model.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            ignored = f"{prefix}.{name}" in model.parameters_to_ignore
            if parameter.requires_grad and not ignored and id(parameter) not in yielded:
                yielded.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter


AXES = ("dp", "tp", "pp", "cp", "ep")
"""Data, tensor, pipeline, context and expert parallel"""
SAME_BATCH = ("tp", "pp", "cp")
"""Axes along which all ranks get the same batch. Context parallelism splits each sample after it was loaded."""

_NAMES = {
    "dp": ("dp", "data", "data_parallel", "batch"),
    "tp": ("tp", "tensor", "tensor_parallel"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel"),
    "cp": ("cp", "context", "context_parallel"),
    "ep": ("ep", "expert", "expert_parallel"),
}
"""Usual names of mesh dimensions: those of PyTorch's documentation, torchtitan, Lightning and Accelerate"""
_REPLICATE = ("dp_replicate", "replicate")
_SHARD = ("dp_shard", "fsdp", "shard")
"""Data parallelism in two dimensions. ``fsdp`` comes second: torchtitan's is ``dp_shard`` and ``cp`` in one."""
_GETTERS = {
    "dp": ("get_data_parallel",),
    "tp": ("get_tensor_model_parallel", "get_slice_parallel", "get_model_parallel"),
    "pp": ("get_pipeline_model_parallel", "get_pipe_parallel"),
    "cp": ("get_context_parallel",),
    "ep": ("get_expert_model_parallel",),
}
"""Beginnings of ``…_rank`` and ``…_world_size``: Megatron's names, then those of DeepSpeed's pipeline grid, where "model" is
tensor and pipeline in one, then those of its older clients, where "model" is tensor parallelism."""


class Place(NamedTuple):
    """A rank's coordinate along an axis, from 0, and the axis' size."""

    coordinate: int
    size: int


def dimensions(mesh: Any) -> dict[str, Place]:
    """Return this rank's place in each dimension of a ``DeviceMesh``, by name; unnamed dimensions are numbered."""
    names = mesh.mesh_dim_names or [f"dim{index}" for index in range(mesh.ndim)]
    where = mesh.get_coordinate() or [0] * mesh.ndim  # None: the rank is not part of the mesh
    return {name: Place(int(where[index]), int(mesh.size(index))) for index, name in enumerate(names)}


def root_dimensions(mesh: Any) -> dict[str, Place]:
    """Return the dimensions of the whole mesh from which this one was sliced, if they have names of axes."""
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    places = dimensions(root) if root is not mesh else {}
    return places if by_axis(places) else {}


def of_process_groups() -> dict[str, Place]:
    """Return this rank's place in each process group of a named mesh dimension.

    Each is described as ``mesh_NAME`` (``DeviceMesh``); so are meshes found that no parameter belongs to, as a pipeline's.
    """
    places = {}
    for group in groups():
        name = str(getattr(group, "group_desc", ""))
        if name.startswith("mesh_"):
            places[name.removeprefix("mesh_")] = Place(int(group.rank()), int(group.size()))
    return places


def groups() -> list[Any]:
    """Return the process groups that this rank is in. The training thread may make one meanwhile."""
    group_map = getattr(getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None), "pg_map", ())
    try:
        return list(group_map)
    except RuntimeError:  # a dictionary changed size
        return []


def of_frameworks() -> dict[str, Place]:
    """Return this rank's place on each axis by Megatron's or DeepSpeed's parallel state."""
    megatron = imported("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        return _read_places(megatron)
    deepspeed = imported("deepspeed.utils.groups")
    return _read_places(getattr(deepspeed, "mpu", None))


def _read_places(state: Any) -> dict[str, Place]:
    places = {}
    for axis, getters in _GETTERS.items():
        getter = next((name for name in getters if hasattr(state, f"{name}_rank")), None)
        if getter is not None:
            size = int(getattr(state, f"{getter}_world_size")())
            if size > 1:
                places[axis] = Place(int(getattr(state, f"{getter}_rank")()), size)
    return places


def by_axis(places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the place on each axis, from those in dimensions by name; dimensions of other names are left out.

    Replicated and sharded data parallelism are one axis: the index counts shards first.
    """
    axes = {axis: places[name] for axis, names in _NAMES.items() for name in names[::-1] if name in places}
    parts = [part for names in (_REPLICATE, _SHARD) for part in [places[name] for name in names if name in places][:1]]
    if parts and "dp" not in axes:
        index = size = 0
        for part in parts:
            index, size = index * part.size + part.coordinate, max(size, 1) * part.size
        axes["dp"] = Place(index, size)
    return axes


def axis_of(name: str | None) -> str | None:
    """Return the axis for a mesh dimension's name."""
    if name in {*_REPLICATE, *_SHARD}:
        return "dp"
    return next((axis for axis, names in _NAMES.items() if name in names), None)


class Parallelism(NamedTuple):
    """Recognized kinds, in the order of :data:`_ORDER`, the mesh's dimensions by name, and the rank's place."""

    kinds: tuple[str, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    copies: int = 1
    """ranks that get the same batch: the product of the sizes of the axes in ``coordinates.SAME_BATCH``"""
    coordinates: tuple[tuple[str, int], ...] = ()
    """the rank's index along each known axis, in the order of ``coordinates.AXES``"""


_ORDER = ("ddp", "fsdp1", "fsdp2", "hsdp", "tensor")


def recognise(optimizers: Iterable[Any], *, ddp: bool) -> Parallelism:
    """Return the kinds and places by which these optimizers' parameters are distributed.

    A mesh dimension on which ``fully_shard`` shards or replicates is FSDP's; any other one on which a parameter is sharded is
    tensor parallelism. ``ddp``: a ``DistributedDataParallel`` model is known.
    """
    kinds, mesh = {"ddp"} if ddp else set(), dict[str, Place]()
    sharded, split, roots = dict[str, Place](), dict[str, Place](), dict[str, Place]()
    meshes = dict[int, dict[str, Place]]()
    for kind, its_mesh in _fully_sharded():
        kinds.add(kind)
        sharded |= dimensions(its_mesh)
        roots |= root_dimensions(its_mesh)
    for parameter in _distributed_parameters(optimizers):
        if type(parameter).__name__ == "FlatParameter":
            kinds.add("fsdp1")
            continue
        its_mesh = parameter.device_mesh
        if id(its_mesh) not in meshes:  # 10,000 parameters have one or two
            meshes[id(its_mesh)] = dimensions(its_mesh)
            mesh |= meshes[id(its_mesh)]
            roots |= root_dimensions(its_mesh)
        places = meshes[id(its_mesh)]
        split |= {
            name: places[name]
            for name, place in zip(places, parameter.placements, strict=True)
            if name not in sharded and place.is_shard()
        }
    if split:
        kinds.add("tensor")
    mesh |= sharded | roots
    axes = _axes(of_process_groups() | mesh, sharded, split)
    return Parallelism(
        tuple(kind for kind in _ORDER if kind in kinds),
        tuple(sorted((name, place.size) for name, place in mesh.items())),
        prod(axes[axis].size for axis in SAME_BATCH if axis in axes),
        tuple((axis, axes[axis].coordinate) for axis in AXES if axis in axes),
    )


def _axes(named: Mapping[str, Place], sharded: Mapping[str, Place], split: Mapping[str, Place]) -> dict[str, Place]:
    """Return the rank's place on each axis: by the framework, by the dimensions' names, else by the use of each dimension."""
    axes = by_axis(named) | of_frameworks()
    for axis, used in (("dp", sharded), ("tp", split)):
        if axis not in axes and len(used) == 1 and not by_axis(used):
            axes[axis] = next(iter(used.values()))
    return axes


def _distributed_parameters(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield parameters that are not plain tensors. Checked once per type: 10,000 parameters take half a millisecond."""
    is_distributed: dict[type, bool] = {}
    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            for parameter in list(group["params"]):
                kind = type(parameter)
                if kind not in is_distributed:
                    is_distributed[kind] = kind.__name__ == "FlatParameter" or hasattr(kind, "device_mesh")
                if is_distributed[kind]:
                    yield parameter


def _fully_sharded() -> Iterator[tuple[str, Any]]:
    """Yield kind and mesh of every module that ``fully_shard`` was applied to."""
    states = imported("torch.distributed._composable_state")
    if states is None or imported("torch.distributed.fsdp") is None:
        return
    for module in states._module_state_mapping.keyrefs():  # a copy: the training thread may be adding to it
        state = states._module_state_mapping.get(module())
        for group in getattr(state and state(), "_fsdp_param_groups", ()):
            info = group.mesh_info
            hybrid = getattr(info, "shard_mesh_dim", None) is not None and info.replicate_mesh_dim is not None
            yield "hsdp" if hybrid else "fsdp2", info.mesh


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
        self._names: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
        """Names of DDP modules' parameters, in the order of their reducers"""
        self._objects: set[int] = set()
        self._published: tuple[object, ...] | None = None
        self._fresh = False
        self._join = ""
        self._info: dict[Metric, dict[str, str]] = {}

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        import torch.distributed
        from torch.nn.parallel import DistributedDataParallel

        self._context, self._distributed = context, torch.distributed
        if not torch.distributed.is_available():
            return
        self._ddp = DistributedDataParallel
        self._read = context.breaker(self.name).guard(self._read_ddp)
        context.hooks.explain_error.register(context.breaker(self.name), self._describe_unused)
        watched = partial(self._watched, context.breaker(self.name).guard(self._note_new))
        self._patch = Patch(DistributedDataParallel, "__init__", watched, probe=self.name, nests=True)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`. Reads a last time, when no backward can hold the lock."""
        patch, self._patch = self._patch, None
        if patch is None:
            return
        patch.undo()
        if not self._context.training.backwards:
            self._read_group()
            self._read()

    def sample(self) -> None:
        """Find models created before ``init()`` by their running forward; observe at once if there is a new model."""
        if self._patch is not None and not self._models and self._distributed.is_initialized():
            running = getattr(self._ddp, "_active_ddp_module", None)
            if running is not None:
                self._add_model(running)
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
        # now: what requires a gradient may be changed later on
        self._names[model] = [name for name, _ in _parameters(model)]
        self._add_model(model)

    def _add_model(self, model: Any) -> None:
        if model not in self._living() and len(self._models) < _MODELS:
            self._models.append(weakref.ref(model))
            self._fresh = True

    def _describe_unused(self, error: BaseException) -> dict[str, Any]:
        """Return attributes of the exception's event; empty for another error, and where a name would be uncertain."""
        error = root_cause(error)
        match = _INDICES.search(runtime_message(error))
        model = _raising(error) if match is not None else None
        if match is None or model is None:
            return {}
        indices = [int(text) for text in match[1].split()]
        names = self._names.get(model, [])  # none of a model that was made before init()
        if not indices or max(indices) >= len(names):
            return {}
        named = [names[index][:_MAX_NAME] for index in indices[:_MAX_NAMED]]
        counted = {} if match[2] else {"unused_count": len(indices)}
        return {"unused": named, **counted, "unused_of": type(model.module).__qualname__[:_MAX_NAME]}

    def _living(self) -> list[Any]:
        return [model for reference in list(self._models) if (model := reference()) is not None]

    def _read_group(self) -> None:
        distributed = self._distributed
        if not distributed.is_initialized():
            if self._published is not None:
                self._context.set_gauge(catalog.DISTRIBUTED_WORLD_SIZE, nan)
            return
        optimizers = self._context.recorder.optimizers()
        process_groups = groups()  # if their number has changed, there may be a new mesh
        kinds = {id(optimizer) for optimizer in optimizers} | {id(model) for model in self._living()} | {len(process_groups)}
        if kinds != self._objects or "torch.distributed.fsdp" in sys.modules:
            self._objects = kinds
            self._parallelism = recognise(optimizers, ddp=bool(self._living()))
        try:
            backend, world_size = str(distributed.get_backend()), distributed.get_world_size()
        except ValueError:  # the training thread has just destroyed the group
            return
        self._publish_group(backend, world_size)

    def _publish_group(self, backend: str, world_size: int) -> None:
        spread = self._parallelism
        parallelism, mesh = "+".join(spread.kinds) + self._join, ",".join(f"{name}={size}" for name, size in spread.mesh)
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
        if not self._join and any(getattr(getattr(model, "_join_config", None), "enable", False) for model in self._living()):
            self._join, self._fresh = "+join", True
        timed = [logged for logged in data if logged.get("iteration", 0) > 0 and not logged.get("has_error")]
        for part, key in _PARTS.items() if timed else ():
            self._context.set_gauge(catalog.DDP_TIME, sum(logged.get(key, 0) for logged in timed) / 1e9, {"part": part})
        if not data:
            return
        if not any(logged.get("iteration", 0) for logged in data):
            self._context.at_backward(self._read)  # the first backward: DDP has timed nothing yet, and the next asking is far
        buckets = [int(size) for logged in data for size in re.findall(r"\d+", logged.get("bucket_sizes", ""))]
        if buckets:
            self._context.set_gauge(catalog.DDP_BUCKETS, len(buckets))
            self._context.set_gauge(catalog.DDP_BUCKET_SIZE, max(buckets))
        unused = [logged["unused_parameter_size"] for logged in timed if logged.get("find_unused_parameters")]
        if unused:
            self._context.set_gauge(catalog.DDP_UNUSED_SIZE, sum(unused))
        self._describe(catalog.DDP_INFO, _setup(max(data, key=lambda logged: int(logged.get("total_parameter_size_bytes", 0)))))

    def _describe(self, metric: Metric, attributes: dict[str, str]) -> None:
        """Set an info metric to 1 with these labels, and remove it with the previous ones."""
        before = self._info.get(metric)
        if before is not None and before != attributes:
            self._context.set_gauge(metric, nan, before)
        self._info[metric] = attributes
        self._context.set_gauge(metric, 1.0, attributes)


def _setup(data: Mapping[str, Any]) -> dict[str, str]:
    switches = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    return {name: "true" if data.get(name) else "false" for name in switches} | {"comm_hook": str(data.get("comm_hook", ""))}
