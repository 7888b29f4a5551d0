"""A training process that does on request what it should not: `python -m tests.stuck_rank DIRECTORY [RANK]`.

It trains a small model, a step every 10 ms, and reads words from its standard input: `hold` holds Python's lock in C for as
many seconds as follow, or until the named pipe that follows is opened, `become` takes another effective user, `end` ends it.
It prints the first word when it has obeyed, `holds` when it is about to.
"""

import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

import torch

import torchobs

words: "queue.Queue[list[str]]" = queue.Queue()


def read() -> None:
    """Hand on what is said; the training thread does not wait for it."""
    for line in sys.stdin:
        words.put(line.split())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One of them."""
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)


def tell(what: str) -> None:
    """Let whoever has said something know."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def hold(until: str) -> None:
    """Wait in C, with Python's lock held: for so many seconds, or until somebody opens a named pipe to write."""
    tell("holds")
    if until.isdecimal():
        left = int(until)
        while left:
            left = ctypes.PyDLL(None).sleep(left)
    else:
        while ctypes.PyDLL(None).open(until.encode(), os.O_RDONLY) == -1:
            pass  # a signal came


def obey(order: list[str]) -> None:
    """Do what was said."""
    match order:
        case ["hold", until]:
            hold(until)
        case ["become", uid]:
            os.seteuid(int(uid))


def train(obey: Callable[[list[str]], None]) -> None:
    """Train, and do what is said, until that is `end`."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    threading.Thread(target=read, daemon=True).start()
    order: list[str] = []
    while order != ["end"]:
        step(model, optimizer)
        order = words.get_nowait() if not words.empty() else []
        if order:
            obey(order)
            tell(order[0])


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    torchobs.init(flight_dir=sys.argv[1], rank=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    train(obey)


if __name__ == "__main__":
    main()
