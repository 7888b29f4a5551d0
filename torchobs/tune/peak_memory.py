"""The most memory that a function needs at one time on a device, and waiting for what the device still has to do."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable


def synchronize(device: str) -> None:
    """Wait until the device has done all that it was given. A CPU has."""
    kind = device.partition(":")[0]
    if kind in {"cuda", "xpu"}:
        getattr(torch, kind).synchronize(device)  # which need not be the current one
    elif kind == "mps":
        torch.mps.synchronize()


def peak_bytes(function: Callable[[], None], device: str) -> int | None:
    """Return the most bytes that tensors on the device had during a call beyond those before it; None where torch cannot tell.

    On CUDA and XPU by the allocator's own count, whose peak is reset; on a CPU by the sizes that torch's profiler records.
    """
    kind = device.partition(":")[0]
    if kind in {"cuda", "xpu"}:
        module = getattr(torch, kind)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        function()
        module.synchronize(device)
        return int(module.max_memory_allocated(device) - before)
    return _profiled_peak(function) if kind == "cpu" else None


def _profiled_peak(function: Callable[[], None]) -> int | None:
    if torch._C._autograd._profiler_enabled():
        return None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        function()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    if results is None:
        return None
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return int(max(accumulate((size for _, size in changes), initial=0)))
