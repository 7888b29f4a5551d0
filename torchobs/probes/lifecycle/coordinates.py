"""Find a rank's place along each axis of parallelism: data, tensor, pipeline, context and expert parallel.

Read are the names of device-mesh dimensions, and the parallel state of Megatron-LM and DeepSpeed if they are loaded; nothing is
imported, and nothing communicates.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

AXES = ("dp", "tp", "pp", "cp", "ep")
"""Data, tensor, pipeline, context and expert parallel"""
SAME_BATCH = ("tp", "pp", "cp")
"""Axes along which all ranks are given the same batch. Context parallelism splits each sample after it was loaded."""

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
"""Beginnings of ``…_rank`` and ``…_world_size``: Megatron's names, then those of DeepSpeed's pipeline grid, whose "model" is
tensor and pipeline in one, then those of its older clients, whose "model" is tensor parallelism."""


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
    """Return the dimensions of the mesh that this one was cut out of, if they have names of axes: it has all of them."""
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    found = dimensions(root) if root is not mesh else {}
    return found if by_axis(found) else {}


def of_process_groups() -> dict[str, Place]:
    """Return this rank's place in each process group that was made for a named mesh dimension.

    Each is described as ``mesh_NAME`` (``DeviceMesh``); so are meshes found that no parameter belongs to, as a pipeline's.
    """
    found = {}
    for group in groups():
        name = str(getattr(group, "group_desc", ""))
        if name.startswith("mesh_"):
            found[name.removeprefix("mesh_")] = Place(int(group.rank()), int(group.size()))
    return found


def groups() -> list[Any]:
    """Return the process groups that this rank is in. The training thread may make one meanwhile."""
    known = getattr(getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None), "pg_map", ())
    try:
        return list(known)
    except RuntimeError:  # a dictionary changed size
        return []


def of_frameworks() -> dict[str, Place]:
    """Return this rank's place on each axis by Megatron's or DeepSpeed's parallel state."""
    megatron = imported("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        return _asked(megatron)
    deepspeed = imported("deepspeed.utils.groups")
    return _asked(getattr(deepspeed, "mpu", None))


def _asked(state: Any) -> dict[str, Place]:
    found = {}
    for axis, getters in _GETTERS.items():
        getter = next((name for name in getters if hasattr(state, f"{name}_rank")), None)
        if getter is not None:
            size = int(getattr(state, f"{getter}_world_size")())
            if size > 1:
                found[axis] = Place(int(getattr(state, f"{getter}_rank")()), size)
    return found


def by_axis(places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the place on each axis, from those in dimensions by name; dimensions of other names are left out.

    Replicated and sharded data parallelism are one axis: the index counts shards first.
    """
    found = {axis: places[name] for axis, names in _NAMES.items() for name in names[::-1] if name in places}
    parts = [part for names in (_REPLICATE, _SHARD) if (part := _first(places, names)) is not None]
    if parts and "dp" not in found:
        index = size = 0
        for part in parts:
            index, size = index * part.size + part.coordinate, max(size, 1) * part.size
        found["dp"] = Place(index, size)
    return found


def axis_of(name: str | None) -> str | None:
    """Return the axis that a mesh dimension of that name is."""
    if name in {*_REPLICATE, *_SHARD}:
        return "dp"
    return next((axis for axis, names in _NAMES.items() if name in names), None)


def _first(places: Mapping[str, Place], names: Iterable[str]) -> Place | None:
    return next((places[name] for name in names if name in places), None)
