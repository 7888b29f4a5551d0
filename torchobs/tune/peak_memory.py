"""The most memory that a function needs at one time on a device, and waiting for what the device still has to do."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _EventType

from torchobs.probes.core.torch_profiler import ProfilerBusyError, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def synchronize(device: str) -> None:
    """Wait until the device has done all that it was given. A CPU has."""
    kind = device.partition(":")[0]
    if kind in {"cuda", "xpu"}:
        getattr(torch, kind).synchronize(device)  # which need not be the current one
    elif kind == "mps":
        torch.mps.synchronize()


def peak_bytes(function: Callable[[], None], device: str) -> int | None:
    """Return the most bytes that tensors on the device had during a call beyond those before it; None where torch cannot tell.

    On CUDA and XPU by the allocator's own count, whose peak is reset; on a CPU by the allocations that torch's profiler
    records. There the size of memory that was allocated before is not known: a call that frees some seems to need more.
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
    try:
        profiler = recorded("torchobs.tune, memory of a step", function, profile_memory=True)
    except ProfilerBusyError:
        return None
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return None if results is None else _peak(_changes(results.experimental_event_tree()))


def _changes(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Return address and size of each allocation that the profiler saw, and with a size below 0 each free, as they came."""
    found: list[tuple[int, int, int]] = []
    pending = list(events)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=itemgetter(0))]


def _peak(changes: Iterable[tuple[int, int]]) -> int:
    """Return the most bytes that were live at a time.

    A free counts with the size that was allocated at its address since the beginning, and not if nothing was: torch keeps the
    sizes of earlier profiles, whose memory was freed between them, and takes them for those of what is at the address now.
    """
    live: dict[int, int] = {}
    current = most = 0
    for address, size in changes:
        current -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            current += size
            most = max(most, current)
    return most
