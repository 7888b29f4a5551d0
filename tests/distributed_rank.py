"""One rank of a gloo job that tests start: trains plainly, then watched, and says how many collectives each took."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Model(torch.nn.Module):
    """Two layers that are used and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = torch.nn.Linear(8, 300), torch.nn.Linear(300, 1), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)  # most of a step, as in a model of some size: one that was made early is found in its forward
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def _ddp() -> torch.nn.Module:
    return DistributedDataParallel(Model(), find_unused_parameters=True, bucket_cap_mb=0.005)


def _hook() -> torch.nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = Model()
    del model.unused
    wrapped = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def _fsdp2() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    return model


def _tensor() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(Model(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


WAYS: dict[str, Callable[[], torch.nn.Module]] = {"ddp": _ddp, "hook": _hook, "fsdp2": _fsdp2, "tensor": _tensor}


def main(way: str, order: str) -> None:
    """``order``: torchobs begins before the model is made, or after some steps without it."""
    if order == "before":
        torchobs.init()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = WAYS[way]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _collectives_of(_train(model, optimizer, 5))
    steps = 400 if way == "ddp" else 50  # DDP takes its own times every so many steps
    said = {"plain": _collectives_of(_train(model, optimizer, steps if order == "after" else 1))}
    if order == "after":
        torchobs.init()
        said["watched"] = _collectives_of(_train(model, optimizer, steps))
    sys.stdout.write(json.dumps(said) + "\n")
    torchobs.shutdown()
    # torch 2.13 can deadlock when a group goes while a gloo thread frees a backward's work, for which it wants Python's lock
    dist.barrier()
    time.sleep(1)
    dist.destroy_process_group()


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[None]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 8), 0.1)).sum().backward()
        optimizer.step()
        yield


def _collectives_of(training: Iterator[None]) -> int:
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    for _ in training:
        pass
    return int(group._get_sequence_number_for_group() - before)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
