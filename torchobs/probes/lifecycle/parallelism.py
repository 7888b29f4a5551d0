"""Recognizes the kinds of parallelism from existing objects: no collective, no scan of all objects."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Parallelism(NamedTuple):
    """Recognized kinds, in the order of :data:`_ORDER`, and the mesh's dimensions by name."""

    kinds: tuple[str, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    copies: int = 1
    """ranks that train on the same batch: the product of the mesh's tensor- and pipeline-parallel dimensions"""


_SAME_BATCH = frozenset({"tp", "tensor", "pp", "pipeline"})
"""Usual names of the dimensions along which all ranks have the same batch"""
_ORDER = ("ddp", "fsdp1", "fsdp2", "hsdp", "tensor")


def recognise(optimizers: Iterable[Any], *, ddp: bool) -> Parallelism:
    """Return how these optimizers' parameters are distributed.

    A mesh dimension on which ``fully_shard`` shards or replicates is FSDP's; any other one on which a parameter is sharded is
    tensor parallelism. ``ddp``: a ``DistributedDataParallel`` model is known.
    """
    kinds, mesh = {"ddp"} if ddp else set(), dict[str, int]()
    fsdp_dimensions, same_batch = set[str](), set[str]()
    for one, dimensions in _fully_sharded():
        kinds.add(one)
        mesh |= dimensions
        fsdp_dimensions |= dimensions.keys()
    for parameter in _distributed_parameters(optimizers):
        if type(parameter).__name__ == "FlatParameter":
            kinds.add("fsdp1")
            continue
        dimensions = _dimensions(parameter.device_mesh)
        mesh |= dimensions
        split = {
            name
            for name, place in zip(dimensions, parameter.placements, strict=True)
            if name not in fsdp_dimensions and place.is_shard()
        }
        if split:
            kinds.add("tensor")
            same_batch |= split
    copies = prod(size for name, size in mesh.items() if name in same_batch | _SAME_BATCH)
    return Parallelism(tuple(kind for kind in _ORDER if kind in kinds), tuple(sorted(mesh.items())), copies)


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


def _fully_sharded() -> Iterator[tuple[str, dict[str, int]]]:
    """Yield kind and mesh of every module that ``fully_shard`` was applied to."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None or "torch.distributed.fsdp" not in sys.modules:
        return
    for module in states._module_state_mapping.keyrefs():  # a copy: the training thread may be adding to it
        state = states._module_state_mapping.get(module())
        for group in getattr(state and state(), "_fsdp_param_groups", ()):
            info = group.mesh_info
            hybrid = getattr(info, "shard_mesh_dim", None) is not None and info.replicate_mesh_dim is not None
            yield "hsdp" if hybrid else "fsdp2", _dimensions(info.mesh)


def _dimensions(mesh: Any) -> dict[str, int]:
    """Return a mesh's dimensions and sizes; unnamed dimensions are numbered."""
    names = mesh.mesh_dim_names or [f"dim{index}" for index in range(mesh.ndim)]
    return {name: mesh.size(index) for index, name in enumerate(names)}
