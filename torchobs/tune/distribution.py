"""Training on several ranks: DDP, or FSDP2 (``fully_shard``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from torchobs.support.import_hooks import imported
from torchobs.tune.choices import outermost, repeated_blocks
from torchobs.tune.plan import model_device

if TYPE_CHECKING:
    from collections.abc import Collection

    Wrapped = bool | type[nn.Module] | Collection[type[nn.Module]]


def check_sharding(model: nn.Module, fsdp: Wrapped, *, ddp: str | bool, compiled: bool) -> None:
    """Raise ValueError for classes that the model has not, and for what cannot be had together with sharding."""
    if fsdp is False:
        return
    _blocks(model, fsdp)
    if ddp is True:
        raise ValueError("fsdp replaces ddp: leave out ddp=True")
    if compiled:
        raise ValueError("fsdp and compile=True: gathering parameters breaks the graph at each block; leave out compile")


def distribute(model: nn.Module, *, ddp: str | bool, fsdp: Wrapped, dtype: torch.dtype | None) -> nn.Module:
    """Return the model as the ranks train it: sharded in place, in DDP, or as it is where there is one rank."""
    launched = distributed.is_available() and (distributed.is_initialized() or distributed.is_torchelastic_launched())
    if is_sharded(model) or not (launched if ddp == "auto" or fsdp else ddp):
        return model
    if not distributed.is_initialized():
        try:
            distributed.init_process_group()
        except ValueError as error:  # torch's own names the variable that is missing
            words = "ranks are started by torchrun, or call torch.distributed.init_process_group() first"
            raise ValueError(f"ddp=True needs a process group: {words} ({error})") from error
    if distributed.get_world_size() == 1:
        return model
    if fsdp:
        _shard(model, fsdp, dtype)
        return model
    device = model_device(model)
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])


def is_sharded(model: nn.Module) -> bool:
    """Return True if ``fully_shard`` was given the model."""
    fsdp = imported("torch.distributed.fsdp")  # its import takes long, and who has not imported it has sharded nothing
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def _shard(model: nn.Module, wrapped: Wrapped, dtype: torch.dtype | None) -> None:
    """Shard blocks and root over all ranks; compute in ``dtype``, average gradients in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    blocks = _blocks(model, wrapped)
    mesh = init_device_mesh(model_device(model).type, (distributed.get_world_size(),))
    reduce = None if dtype is None else torch.float32
    for block in reversed([module for module in model.modules() if module in blocks and module is not model]):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce))  # children first
    # the loss is computed in float32, as of autocast's outputs it should be
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, output_dtype=reduce))


def _blocks(model: nn.Module, wrapped: Wrapped) -> set[nn.Module]:
    if wrapped is True:
        return set(outermost(repeated_blocks(model)))
    kinds = tuple(wrapped) if isinstance(wrapped, (tuple, list, set, frozenset)) else (wrapped,)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        raise ValueError(f"fsdp is True, False, or module classes, not {wrapped!r}")
    blocks = {module for module in model.modules() if isinstance(module, kinds)}
    if not blocks:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"the model has no module of the classes that fsdp names ({names}): fsdp=True finds repeated blocks")
    return blocks


def check_whole(model: nn.Module) -> None:
    """Raise RuntimeError for a model of which each rank has shards: a checkpoint is one process's file."""
    if is_sharded(model):
        raise RuntimeError("the model is sharded by FSDP: torch.distributed.checkpoint saves and loads it")


def mean_of_ranks(value: float, model: nn.Module, device: torch.device) -> float:
    """Return the mean over the ranks that train the model together: what each decides by it, is the same. All ranks call it."""
    if not isinstance(model, DistributedDataParallel) and not is_sharded(model):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()
