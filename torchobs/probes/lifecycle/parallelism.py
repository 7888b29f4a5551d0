"""Recognizes the kinds of parallelism from existing objects: no collective, no scan of all objects."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.lifecycle.coordinates import (
    AXES,
    SAME_BATCH,
    Place,
    by_axis,
    dimensions,
    of_frameworks,
    of_process_groups,
    root_dimensions,
)
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Parallelism(NamedTuple):
    """Recognized kinds, in the order of :data:`_ORDER`, the mesh's dimensions by name, and the rank's place."""

    kinds: tuple[str, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    copies: int = 1
    """ranks that are given the same batch: the product of the sizes of the axes in ``coordinates.SAME_BATCH``"""
    coordinates: tuple[tuple[str, int], ...] = ()
    """the rank's index along each known axis, in the order of ``coordinates.AXES``"""


_ORDER = ("ddp", "fsdp1", "fsdp2", "hsdp", "tensor")


def recognise(optimizers: Iterable[Any], *, ddp: bool) -> Parallelism:
    """Return how these optimizers' parameters are distributed.

    A mesh dimension on which ``fully_shard`` shards or replicates is FSDP's; any other one on which a parameter is sharded is
    tensor parallelism. ``ddp``: a ``DistributedDataParallel`` model is known.
    """
    kinds, mesh = {"ddp"} if ddp else set(), dict[str, Place]()
    sharded, split, roots = dict[str, Place](), dict[str, Place](), dict[str, Place]()
    meshes = dict[int, dict[str, Place]]()
    for one, its_mesh in _fully_sharded():
        kinds.add(one)
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
        found = meshes[id(its_mesh)]
        split |= {
            name: found[name]
            for name, place in zip(found, parameter.placements, strict=True)
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
    """Return the rank's place on each axis: as a framework says, by the dimensions' names, else by what is done along them."""
    found = by_axis(named) | of_frameworks()
    for axis, used in (("dp", sharded), ("tp", split)):
        if axis not in found and len(used) == 1 and not by_axis(used):
            found[axis] = next(iter(used.values()))
    return found


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
