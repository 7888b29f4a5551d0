"""One rank that hangs after some steps: `hanging.py KIND STEP`; what it does is in `KINDS`."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

KIND, STEP = sys.argv[1], int(sys.argv[2])
FOREVER_S = 100_000.0
ASLEEP_S = 5.0
"""So long sleeps what would keep a processor busy for half of the time after which a rank is called hung. What is left of it is
several times as long as the heartbeat may be missing."""


def spin() -> None:
    """Python code without an end: other threads get the GIL."""
    time.sleep(ASLEEP_S)
    while True:
        pass


def backtrack() -> None:
    """A regular expression without an end, in C: no other thread gets the GIL."""
    time.sleep(ASLEEP_S)
    re.match(r"(a+)+$", "a" * 60 + "b")


def deadlock() -> None:
    """A lock that nobody gives back; a worker does not outlive its rank, which is killed."""
    lock, parent = threading.Lock(), os.getppid()
    lock.acquire()
    while os.getppid() == parent:
        lock.acquire(timeout=2.0)


def wait_for_peer() -> None:
    """Rank 1 sleeps, rank 0 waits for it in a collective."""
    if distributed.get_rank() == 1:
        time.sleep(FOREVER_S)
    distributed.all_reduce(torch.ones(1))


KINDS: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(FOREVER_S),
    "spin": spin,
    "backtrack": backtrack,
    "worker": deadlock,
    "collective": wait_for_peer,
}


class Rows(Dataset[Any]):
    """Random samples, one for each step; the one after the last step is never read."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if index >= STEP and KIND == "worker":
            KINDS[KIND]()
        return torch.randn(8)


def main() -> None:
    """Train; one of the first steps is slow, as behind cold caches."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if KIND == "collective":
        distributed.init_process_group("gloo")
    for number, row in enumerate(DataLoader(Rows(), batch_size=1, num_workers=KIND == "worker")):
        if number == STEP and KIND != "worker":
            KINDS[KIND]()
        optimizer.zero_grad()
        model(row).sum().backward()
        time.sleep(1.5 if number == 1 else 0.02)
        optimizer.step()


if __name__ == "__main__":
    main()
