"""One rank of a job under DistributedDataParallel or FSDP2, in which rank 1 gets a bad batch or both ranks a bad operator."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchobs


class Net(nn.Module):
    """Two layers with a logarithm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.ill = nn.Linear(8, 8), nn.Linear(8, 1), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        if self.ill:
            h = torch.log(h * 0)
        out: torch.Tensor = self.second(h)
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
    model: nn.Module = sharded(net) if way == "sharded batch" else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(8):
        x = torch.randn(6, 8)
        if number == 4 and way != "operator" and dist.get_rank() == 1:
            x[2, 3] = float("nan")
        net.ill = number == 4 and way == "operator"
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    torchobs.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
