"""Memory of this process and of its devices before, after and at most during an operation."""

from __future__ import annotations

import functools
import os
import resource
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from torchobs.probes.memory.allocators import has_statistics
from torchobs.support.import_hooks import imported
from torchobs.support.result import Result


@dataclass(frozen=True, slots=True)
class MemoryUse(Result):
    """Bytes before, after, and at most meanwhile."""

    before: int
    after: int
    peak: int
    """Exact if the greatest value of the process so far was passed meanwhile; else the greater of both, a lower bound"""

    @property
    def growth(self) -> int:
        """Bytes after minus bytes before."""
        return self.after - self.before


class Reading(NamedTuple):
    """Bytes in use now and at most so far. Nobody's peaks are reset."""

    host: int
    host_peak: int
    device: int | None
    device_peak: int


def read() -> Reading:
    """Read the process's resident memory, and what torch's CUDA allocator has given to tensors on all devices."""
    device, device_peak = _devices()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Reading(_process().memory_info().rss, peak, device, device_peak)


@functools.lru_cache(maxsize=1)
def _process_of(pid: int) -> psutil.Process:
    return psutil.Process(pid)


def _process() -> psutil.Process:
    """Return this process, which a fork makes another one. Making the object takes longer than reading by it."""
    return _process_of(os.getpid())


def _devices() -> tuple[int | None, int]:
    torch: Any = imported("torch")
    if torch is None or not torch.cuda.is_initialized() or not has_statistics(torch):
        return None, 0
    devices = range(torch.cuda.device_count())
    return sum(map(torch.cuda.memory_allocated, devices)), sum(map(torch.cuda.max_memory_allocated, devices))


def synchronize() -> None:
    """Wait for the CUDA devices that this process uses, which need not be the current one."""
    torch: Any = imported("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        torch.cuda.synchronize()
        return
    for index in range(torch.cuda.device_count()):
        if has_context(index):  # to wait for another one would make a context there
            torch.cuda.synchronize(index)


def use(before: Reading, after: Reading) -> tuple[MemoryUse, MemoryUse | None]:
    """Return what was used on the host and, where there is one, on CUDA devices."""
    host = MemoryUse(before.host, after.host, _peak(before.host, after.host, before.host_peak, after.host_peak))
    if after.device is None:
        return host, None
    begun = before.device or 0
    peak = _peak(begun, after.device, before.device_peak, after.device_peak)
    return host, MemoryUse(begun, after.device, peak)


def _peak(before: int, after: int, peak_before: int, peak_after: int) -> int:
    return max(before, after, peak_after if peak_after > peak_before else 0)
