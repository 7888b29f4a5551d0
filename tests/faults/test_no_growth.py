"""A rank that trains for a long time is no larger at its end, and neither is its flight file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import torchobs

STEPS = 100_000
WARM = 20_000
ALLOWED = 2 * 1024**2
"""Bytes: a fifth of a byte per step would be beyond it."""


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.timeout(900)
def test_a_hundred_thousand_steps_leave_nothing_behind(flight_dir: Path) -> None:
    """Memory after 100,000 steps is that after 20,000; the file has its size, every step is counted."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with torchobs.init(flight_dir=flight_dir) as session:
        assert session.writer is not None
        path = Path(session.writer.path)
        size = path.stat().st_size
        before = resident()
        for step in range(STEPS):
            if step == WARM:
                before = resident()
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
        grown = resident() - before
        assert session.context is not None
        session.context.recorder.flush()
        assert session.context.recorder.step == STEPS
        assert path.stat().st_size == size
    assert grown < ALLOWED, f"{grown} bytes more after {STEPS - WARM} steps"
