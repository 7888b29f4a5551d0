"""Measurements wait for the device that computes, which need not be the current one, and make no context on another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from torchobs.debug import operations
from torchobs.tune.comparison import synchronize

if TYPE_CHECKING:
    import pytest


class Torch:
    """A torch with three devices, on the last two of which its process has a context."""

    def __init__(self, backend: str = "native") -> None:
        self.waited: list[int | None] = []
        self._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index > 0)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: True, device_count=lambda: 3, get_allocator_backend=lambda: backend,
            synchronize=self._synchronize, memory_allocated=lambda index: index, max_memory_allocated=lambda index: 2 * index,
        )  # fmt: skip

    def _synchronize(self, device: int | None = None) -> None:
        self.waited.append(device)


def test_a_timing_waits_for_the_devices_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """And makes no context on the others."""
    module: Any = Torch()
    monkeypatch.setattr(operations, "imported", lambda _: module)
    operations.wait_for_devices()
    assert module.waited == [1, 2]


def test_a_comparison_waits_for_the_device_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal has one."""
    waited = list[tuple[object, ...]]()
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "synchronize", lambda *device: waited.append(device))
    for device in ("cuda:1", "xpu:1", "mps", "cpu"):
        synchronize(device)
    assert waited == [("cuda:1",), ("xpu:1",), ()]
