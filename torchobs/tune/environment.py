"""The device to train on, its memory, and the generators of random numbers."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

import psutil
import torch
from torch import distributed

from torchobs.support import cgroup
from torchobs.support.arguments import is_number
from torchobs.support.import_hooks import imported
from torchobs.support.result import Checked, Measured, Problem

ACCELERATORS = ("cuda", "xpu", "mps")
"""In the order of ``auto``"""
MOST_SEED = 2**32 - 1
"""NumPy's limit"""


@dataclass(frozen=True)
class MemoryStats(Measured):
    """Memory in bytes; fields that the device does not report are None."""

    device: str
    allocated_bytes: int
    """by tensors; on the CPU resident memory of the process"""
    reserved_bytes: int | None
    """held by torch's allocator, tensors included"""
    peak_bytes: int | None
    """most bytes allocated at one time"""
    free_bytes: int | None
    """free on the device, for all processes; on the CPU still available to this container without swapping"""
    total_bytes: int | None


@dataclass(frozen=True)
class Devices(Measured):
    """All devices that this process may use: ``tune.devices()["cuda:0"]`` is one of them."""

    devices: tuple[MemoryStats, ...]


@dataclass(frozen=True)
class Freed(Measured):
    """The result of :func:`clear_cache`."""

    device: str
    freed_bytes: int
    """returned to the device, or on the CPU to the system"""
    objects: int
    """objects that Python's garbage collector freed"""


@dataclass(frozen=True)
class MemoryLimit(Checked):
    """The result of :func:`memory_fraction`; its problem says why no limit could be set."""

    device: str
    fraction: float
    limit_bytes: int | None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Seeded(Measured):
    """The result of :func:`seed`; notes say what cannot be set in a running process."""

    seed: int
    deterministic: bool
    generators: tuple[str, ...]
    notes: tuple[str, ...]


def device(name: str | torch.device = "auto") -> torch.device:
    """Return a device; ``auto`` prefers CUDA (under torchrun the local rank's), XPU, MPS and the CPU, in this order.

    Raises:
        ValueError: it is no name of a device, or the device is not there; the message names those that are.
    """
    if name == "auto":
        kind = next((kind for kind in ACCELERATORS if _count(kind)), "cpu")
        return torch.device(kind, _local_index(kind)) if kind in {"cuda", "xpu"} else torch.device(kind)
    try:
        chosen = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name!r} is no device: use 'auto', 'cpu', 'cuda', 'cuda:1', 'mps' or 'xpu'") from error
    if chosen.type in ACCELERATORS and (chosen.index or 0) >= _count(chosen.type):
        present = [f"{_count(kind)} × {kind}" for kind in ACCELERATORS if _count(kind)]
        raise ValueError(f"device {name!r} is not there: this process sees {', '.join(['cpu', *present])}")
    return chosen


def devices() -> Devices:
    """Return the memory of the CPU and of each accelerator that this process sees; CUDA makes a context on each."""
    names = ["cpu"]
    for kind in ACCELERATORS:
        names += [kind] if kind == "mps" and _count(kind) else [f"{kind}:{number}" for number in range(_count(kind))]
    return Devices(tuple(map(memory_stats, names)))


def memory_stats(on: str | torch.device = "auto") -> MemoryStats:
    """Return the memory of a device, as this process sees it."""
    chosen = device(on)
    if chosen.type in {"cuda", "xpu"}:
        module = getattr(torch, chosen.type)
        free, total = module.mem_get_info(chosen)
        figures = module.memory_allocated(chosen), module.memory_reserved(chosen), module.max_memory_allocated(chosen)
        return MemoryStats(str(chosen), *figures, free, total)
    if chosen.type == "mps":
        total = torch.mps.recommended_max_memory()
        reserved = torch.mps.driver_allocated_memory()
        return MemoryStats("mps", torch.mps.current_allocated_memory(), reserved, None, total - reserved, total)
    free, total = _host_memory()
    return MemoryStats(str(chosen), psutil.Process().memory_info().rss, None, None, free, total)


def clear_cache(on: str | torch.device = "auto") -> Freed:
    """Collect garbage and return unused memory: torch's caches on an accelerator, the C heap on Linux."""
    chosen = device(on)
    before = _reserved_bytes(chosen)
    objects = gc.collect()
    if chosen.type in ACCELERATORS:
        getattr(torch, chosen.type).empty_cache()
    elif sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than GNU's has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
    return Freed(str(chosen), max(0, before - _reserved_bytes(chosen)), objects)


def memory_fraction(fraction: float, on: str | torch.device = "auto") -> MemoryLimit:
    """Limit this process to a share of the device's memory; beyond it an allocation raises ``OutOfMemoryError``.

    Raises:
        ValueError: the fraction is not above 0 and at most 1.
    """
    if not (is_number(fraction) and 0 < fraction <= 1):
        raise ValueError(f"fraction is above 0 and at most 1, not {fraction!r}")
    chosen = device(on)
    module = getattr(torch, chosen.type)
    if not hasattr(module, "set_per_process_memory_fraction"):
        problem = Problem("unsupported", str(chosen), f"torch cannot limit memory of {chosen.type}")
        return MemoryLimit(str(chosen), fraction, None, (problem,))
    module.set_per_process_memory_fraction(fraction, *([] if chosen.type == "mps" else [chosen]))
    total = memory_stats(chosen).total_bytes
    return MemoryLimit(str(chosen), fraction, None if total is None else int(total * fraction))


def seed(value: SupportsIndex, *, deterministic: bool | None = None) -> Seeded:
    """Seed Python, NumPy (where it is imported) and torch on all devices.

    Args:
        value: from 0 to 2**32 - 1; it may be an integer of NumPy.
        deterministic: True makes torch use deterministic algorithms, and raise where it has none; False allows others; None
            changes nothing.

    Raises:
        ValueError: the seed is out of its range.
    """
    number = index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else -1
    if not 0 <= number <= MOST_SEED:  # before any generator is seeded
        raise ValueError(f"a seed is a whole number from 0 to {MOST_SEED}, not {value!r}")
    random.seed(number)
    torch.manual_seed(number)
    numpy: Any = imported("numpy")
    if numpy is not None:
        numpy.random.seed(number)
    if deterministic is not None:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = deterministic
        if deterministic:
            torch.backends.cudnn.benchmark = False
    generators = ("python", "torch", *(("numpy",) if numpy is not None else ()))
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    notes = ["sets and dictionaries of texts keep their order between runs if PYTHONHASHSEED is set before Python starts"]
    if is_deterministic and torch.cuda.is_available():
        notes.append("cuBLAS computes the same each time if CUBLAS_WORKSPACE_CONFIG=:4096:8 is set before CUDA starts")
    return Seeded(number, is_deterministic, generators, tuple(notes))


def _count(kind: str) -> int:
    module = getattr(torch, kind, None)
    return module.device_count() if module is not None and (kind == "mps" or module.is_available()) else 0


def _local_index(kind: str) -> int:
    launched = distributed.is_available() and distributed.is_torchelastic_launched()
    return distributed.get_node_local_rank(0) % _count(kind) if launched else 0


def _host_memory() -> tuple[int, int]:
    """Return free and total bytes: the machine's, or this container's if it has a lower limit."""
    memory = psutil.virtual_memory()
    groups = cgroup.of_process("memory")
    tightest = cgroup.tightest(groups) if groups is not None else None
    limit, left = (None, None) if tightest is None else (tightest[1].limit, tightest[1].left)
    if limit is None or left is None or limit >= memory.total:
        return memory.available, memory.total
    return min(memory.available, left), limit


def _reserved_bytes(chosen: torch.device) -> int:
    stats = memory_stats(chosen)
    return stats.allocated_bytes if stats.reserved_bytes is None else stats.reserved_bytes
