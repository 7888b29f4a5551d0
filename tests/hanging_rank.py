"""One rank of a gloo job of two, of which rank 1 stops in its sixth step: `python -m tests.hanging_rank DIRECTORY PLACE`.

PLACE: it sleeps in its `forward`, in its `data` set or in a `hook` of its backward, or leaves a collective out (`skip`),
so that the other waits for one more when it is done. With `bypass` both ranks go around DDP from that step on. A third
argument is how often the slow sensors are asked, in seconds.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchobs
from torchobs.runtime import sampler

AT = 6


class Model(torch.nn.Module):
    """Sleeps in one of its forwards, or backwards."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.inner, self.place, self.calls = torch.nn.Linear(4, 4), place, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        if self.calls == AT and self.place == "forward":
            time.sleep(600)
        if self.calls == AT and self.place == "hook":
            out.register_hook(lambda _: time.sleep(600))  # type: ignore[no-untyped-call]
        return out


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Sleeps at one of its samples."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == AT - 1 and self.place == "data":
            time.sleep(600)
        return torch.full((4,), 1.0 + int(os.environ["RANK"]))


def main() -> None:
    """Train until stopped."""
    torch.set_num_threads(1)
    if len(sys.argv) > 3:  # as above
        sampler.OBSERVE_INTERVAL_S = float(sys.argv[3])
    torchobs.init(flight_dir=sys.argv[1])
    dist.init_process_group("gloo")
    place = sys.argv[2] if os.environ["RANK"] == "1" else ""
    model = DistributedDataParallel(Model(place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(torch.utils.data.DataLoader(Data(place)), 1):
        alone = (step == AT and place == "skip") or (step >= AT and sys.argv[2] == "bypass")
        (model.module if alone else model)(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(600)


if __name__ == "__main__":
    main()
