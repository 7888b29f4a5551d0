"""The benchmark of a GPU, on a device that is the CPU: its program runs, and its table is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from tests.bench import gpu
from tests.bench.gpu import Block, Processor, Result, measure
from tests.training import loss_of, mlp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


def training() -> Iterator[None]:
    """A small one."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def test_a_training_is_measured_with_and_without_us(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of each, and the session is over: torch is as it was."""
    monkeypatch.setenv("TORCHOBS_GRAD_INTERVAL", "1")
    monkeypatch.setattr(gpu, "WARM_UP_S", 0.1)  # the figures are not looked at
    before = torch.autograd.backward
    result = measure(Processor(), training(), 5, 2, "advanced", flight_dir)
    assert len(result.plain) == len(result.observed) == 2
    assert result.norms_us > 0
    assert not _global_optimizer_pre_hooks
    assert torch.autograd.backward is before


def test_ratios_are_of_neighbours() -> None:
    """So that a device that becomes slower, or faster, does so in both."""
    plain = [Block(float(ms), float(ms), 1 << 20) for ms in (1, 2, 4)]
    observed = [Block(1.5 * one.device_ms, 2.0 * one.host_ms, 3 << 20) for one in plain]
    row = Result(plain, observed, bookkeeping_us=15.0, norms_us=5.0, interval=4.0).row("mlp", "basic")
    assert row == "| mlp | basic | 2.00 ms | 15 µs | 5 µs | 4 | 1.00% | +50.00% | +100.00% | +2.0 MiB |"
