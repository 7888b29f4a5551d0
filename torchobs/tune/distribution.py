"""Training on several ranks: DDP, or FSDP2 (``fully_shard``), whose states are gathered into those of one process and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchobs.support.collectives import let_backend_finish
from torchobs.support.import_hooks import imported
from torchobs.tune.choices import outermost, repeated_blocks
from torchobs.tune.plan import model_device

if TYPE_CHECKING:
    from collections.abc import Collection

    Wrapped = bool | type[nn.Module] | Collection[type[nn.Module]]


def check_sharding(model: nn.Module, fsdp: Wrapped, *, ddp: str | bool, compiled: bool, averaged: bool) -> None:
    """Raise ValueError for classes that the model has not, and for what cannot be had together with sharding."""
    if fsdp is False:
        return
    _blocks(model, fsdp)
    if ddp is True:
        raise ValueError("fsdp replaces ddp: leave out ddp=True")
    if compiled:
        raise ValueError("fsdp and compile=True: gathering parameters breaks the graph at each block; leave out compile")
    if averaged:
        raise ValueError("fsdp and ema_decay: AveragedModel copies whole weights, of which a rank has shards; leave it out")


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


def state_of(part: Any) -> dict[str, Any]:
    """Return the state of a model, an optimizer or another part; that of shards whole, on the CPU of rank 0: all ranks call it.

    It is as one process has it, so that any number of ranks can resume it. ``torch.distributed.checkpoint.state_dict`` would
    name an optimizer's state by parameter, and begin one that has not stepped by a step of its own.
    """
    state: dict[str, Any] = part.state_dict()
    if isinstance(part, nn.Module) and is_sharded(part):
        for name, value in state.items():
            state[name] = _whole(value)  # in place, for what torch keeps beside the items
    elif isinstance(part, torch.optim.Optimizer) and any(map(_dtensor, _parameters(part))):
        state["state"] = {
            number: {name: _whole(value) for name, value in values.items()} for number, values in state["state"].items()
        }
    return state


def load_state(part: Any, state: dict[str, Any]) -> None:
    """Give a part its state; of a whole state each rank takes its shards: of a tensor as large as its parameter the same.

    Raises:
        RuntimeError: it is of another module, which is as it was, as it is after whatever a module raises for such a state.
    """
    if isinstance(part, nn.Module) and is_sharded(part):
        shards = part.state_dict()
        state = {name: _shard_of(value, shards.get(name)) for name, value in state.items()}
    elif isinstance(part, torch.optim.Optimizer) and any(map(_dtensor, parameters := _parameters(part))):
        shards = {
            number: {name: _shard_of(value, parameters[number]) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        state = {**state, "state": shards}
    kept = _before_other(part, state) if isinstance(part, nn.Module) else []
    try:
        part.load_state_dict(state)
    except BaseException:  # by then torch has loaded all that fits
        for tensor, before in kept:
            tensor.copy_(before)
        raise


def _before_other(module: nn.Module, state: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a module's tensors, each with a copy, where a state looks like another module's; else nothing."""
    whole = module.state_dict()
    names, own = whole.keys(), {name: x for name, x in whole.items() if isinstance(x, torch.Tensor) and not is_lazy(x)}
    others = {name: x.shape for name, x in state.items() if isinstance(x, torch.Tensor)}
    is_alike = names == state.keys() and {name: x.shape for name, x in own.items()} == others
    return [] if is_alike else [(x, x.clone()) for x in own.values()]


def of_all_ranks(value: Any) -> list[Any]:
    """Return every rank's value on rank 0, elsewhere nothing. All ranks call it."""
    rank = distributed.get_rank()
    values: list[Any] = [None] * distributed.get_world_size() if rank == 0 else []
    distributed.gather_object(value, values if rank == 0 else None)
    let_backend_finish()
    return values


def mean_of_ranks(value: float, model: nn.Module, device: torch.device) -> float:
    """Return the mean over the ranks that train the model together: what each decides by it, is the same. All ranks call it."""
    if not isinstance(model, DistributedDataParallel) and not is_sharded(model):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def _whole(value: Any) -> Any:
    """Gather a tensor of shards: only rank 0 keeps it, and not on the device, which may not have room for all of them."""
    if not _dtensor(value):
        return value
    tensor = value.full_tensor()
    return None if distributed.get_rank() else tensor.cpu()


def _shard_of(value: Any, like: Any) -> Any:
    if not _dtensor(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # every rank has read the file


def _dtensor(value: Any) -> bool:
    tensors = imported("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return its parameters, in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
