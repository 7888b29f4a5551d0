"""One rank of a job under DistributedDataParallel or FSDP2, in which rank 1 gets a bad batch."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchobs


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def sharded(net: Net) -> nn.Module:
    """Its layers, each for itself, and the whole, by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(net.first)
    fully_shard(net.second)
    fully_shard(net)
    return net


def main(way: str) -> None:
    """Train eight steps."""
    dist.init_process_group("gloo")
    torchobs.init(log_level="ERROR")
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = sharded(net) if way == "sharded" else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(8):
        x = torch.randn(6, 8)
        if number == 4 and dist.get_rank() == 1:
            x[2, 3] = float("nan")
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    torchobs.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
