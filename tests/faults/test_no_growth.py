"""A rank that trains for a long time is no larger at its end, and neither is its flight file."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import torchobs

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 100_000
WARM = 5_000
"""Until rings are full, and the allocator has what it wants."""
MEMORY = 2 * 1024**2
"""Bytes that are allowed: what the arenas of an allocator come to."""
BOUNDED = 2_000
"""Objects in lists of bounded length that fill up slowly: records and spans of the steps that are sampled."""
BLOCKS = 0.1
"""Objects of Python's for each step that are allowed: one that is forgotten at every step is ten times that."""


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def blocks() -> int:
    """Count Python's objects: the fewest within two seconds without training.

    The sampler thread holds some ten thousand until it has worked them off; they are not forgotten.
    """
    gc.collect()
    fewest = sys.maxsize
    for _ in range(20):
        time.sleep(0.1)
        fewest = min(fewest, sys.getallocatedblocks())
    return fewest


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_thousand_steps_leave_nothing_behind(flight_dir: Path, share_of: Callable[[int], int]) -> None:
    """No more memory and no more objects at the end than soon after the start; the file has its size, every step is counted."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

    more = share_of(STEPS - WARM)
    with torchobs.init(flight_dir=flight_dir) as session:
        assert session.writer is not None
        path = Path(session.writer.path)
        size = path.stat().st_size
        train(WARM)
        objects, before = blocks(), resident()
        train(more)
        forgotten, grown = blocks() - objects, resident() - before
        assert session.context is not None
        session.context.recorder.flush()
        assert session.context.recorder.step == WARM + more
        assert path.stat().st_size == size
    assert grown < MEMORY, f"{grown} bytes more after {more} steps"
    assert forgotten < BOUNDED + BLOCKS * more, f"{forgotten} objects more after {more} steps"
