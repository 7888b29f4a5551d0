"""Statistics of torch's device allocators: CUDA (and ROCm), XPU, MPS. Reading them initializes nothing.

``memory_stats`` reads the allocator's own counters under its lock, without synchronizing, and creates no context on an
unused device. Only devices with memory that is, or was, reserved are listed, and only their limit is asked for: with
``cudaMallocAsync`` the memory fraction of a device cannot be had without its context. A pluggable allocator (RAPIDS') has no
statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class DeviceMemory(NamedTuple):
    """One device's allocator, in bytes and counts; ``None``: not reported. ``peak`` is since the user's last reset."""

    device: str
    allocated: int
    reserved: int
    active: int | None = None
    inactive_split: int | None = None
    peak: int | None = None
    limit: int | None = None
    retries: int | None = None
    ooms: int | None = None


def used_devices(torch: Any) -> list[DeviceMemory]:
    """Return the devices that this process uses. ``torch`` is the imported module."""
    return [*_cuda_devices(torch), *_xpu_devices(torch), *_mps_devices(torch)]


def of_stats(device: str, stats: Mapping[str, Any], limit: int | None) -> DeviceMemory | None:
    """Read the nested dictionary of ``memory_stats_as_nested_dict``; ``None`` for a device that was never used."""
    reserved = _bytes(stats, "reserved_bytes", "current")
    if not reserved and not _bytes(stats, "reserved_bytes", "peak") and not stats.get("num_ooms"):
        return None
    return DeviceMemory(
        device=device,
        allocated=_bytes(stats, "allocated_bytes", "current") or 0,
        reserved=reserved or 0,
        active=_bytes(stats, "active_bytes", "current"),
        inactive_split=_bytes(stats, "inactive_split_bytes", "current"),
        peak=_bytes(stats, "allocated_bytes", "peak"),
        limit=limit,
        retries=stats.get("num_alloc_retries"),
        ooms=stats.get("num_ooms"),
    )


def has_statistics(torch: Any) -> bool:
    """Return True unless the CUDA allocator in use is one of the user's, which raises when it is asked."""
    backend = getattr(torch.cuda, "get_allocator_backend", None)
    return backend is None or backend() in {"native", "cudaMallocAsync"}


def _bytes(stats: Mapping[str, Any], name: str, which: str) -> int | None:
    value = stats.get(name, {}).get("all", {}).get(which)
    return None if value is None else int(value)


def _cuda_devices(torch: Any) -> Iterator[DeviceMemory]:
    if torch.cuda.is_initialized() and has_statistics(torch):
        yield from _devices_of(torch, "cuda")


def _xpu_devices(torch: Any) -> Iterator[DeviceMemory]:
    xpu = getattr(torch, "xpu", None)  # in torch since 2.3
    if xpu is not None and xpu.is_initialized():
        yield from _devices_of(torch, "xpu")


def _devices_of(torch: Any, kind: str) -> Iterator[DeviceMemory]:
    there = getattr(torch, kind)
    for index in range(there.device_count()):
        found = of_stats(f"{kind}:{index}", there.memory_stats_as_nested_dict(index), None)
        if found is not None:
            yield found._replace(limit=_limit(torch, kind, index))


def _limit(torch: Any, kind: str, index: int) -> int:
    """Return the process's limit in bytes: all device memory, or the user's fraction of it (readable since torch 2.8)."""
    total = int(getattr(torch, kind).get_device_properties(index).total_memory)
    fraction = getattr(torch._C, f"_{kind}_getMemoryFraction", None)
    return total if fraction is None else int(total * fraction(index))


def _mps_devices(torch: Any) -> Iterator[DeviceMemory]:
    """Yield Metal's one device: its allocator keeps no peaks, and its initialization cannot be checked."""
    if not torch.backends.mps.is_available():
        return
    reserved = torch.mps.driver_allocated_memory()
    if reserved:
        limit = getattr(torch.mps, "recommended_max_memory", None)
        yield DeviceMemory("mps:0", torch.mps.current_allocated_memory(), reserved, limit=limit() if limit else None)
