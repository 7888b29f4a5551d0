"""A training process that does on request what it should not: `python -m tests.stuck_rank DIRECTORY [RANK]`.

It trains a small model, a step every 10 ms, and reads words from its standard input: `sleep` sleeps in Python, `hold` holds
Python's lock in C for as many seconds as follow, or until the named pipe that follows is opened, `profile` runs the
application's own profiler for a moment, `end` ends it.
`limit` lets files have that many bytes (-1: any number), `deadly` gives the signal for larger ones its default back and
collects what is garbage, `sudden` gives it back when there is room for stacks that are about to be written, `become` takes
another effective user. It prints the first word when it has obeyed, `naps` and `holds` when it is about to.
"""

import ctypes
import gc
import os
import queue
import resource
import signal
import sys
import threading
import time

import torch
from torch import profiler

import torchobs
from torchobs.flight import artifacts, files

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


def nap(seconds: float) -> None:
    """Sleep in Python."""
    tell("naps")
    time.sleep(seconds)


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


def sudden(directory_fd: int, size: int) -> str | None:
    """Look for room as always; then, before a byte is written, another thread gives the signal its default back."""
    vars(artifacts)["shortage"] = files.shortage
    lack = files.shortage(directory_fd, size)
    ctypes.CDLL(None).signal(signal.SIGXFSZ, 0)
    return lack


def obey(given: list[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do what was said."""
    match given:
        case ["sleep", seconds]:
            nap(float(seconds))
        case ["hold", until]:
            hold(until)
        case ["limit", size]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
        case ["deadly"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            gc.collect()
        case ["sudden"]:
            vars(artifacts)["shortage"] = sudden
        case ["become", uid]:
            os.seteuid(int(uid))
        case ["profile"]:
            with profiler.profile():
                step(model, optimizer)


def main() -> None:
    """Train until told to end."""
    torch.set_num_threads(1)
    torchobs.init(flight_dir=sys.argv[1], rank=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    threading.Thread(target=read, daemon=True).start()
    given: list[str] = []
    while given != ["end"]:
        step(model, optimizer)
        given = words.get_nowait() if not words.empty() else []
        if given:
            obey(given, model, optimizer)
            tell(given[0])


if __name__ == "__main__":
    main()
