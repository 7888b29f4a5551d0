"""Records out-of-memory errors: of a device in the allocator, before torch raises; of the host where the exception ends.

What takes the memory is told by component and module, and by line where torch records the allocator's history.

torch calls an observer with the allocator's lock released (``CUDACachingAllocator.cpp``, ``malloc``), so it may read
statistics and a snapshot. An observer cannot be detached, and attaching needs CUDA to be initialized: one function is
attached once per process, by CUDA's own initialization, and does nothing while no session listens.
"""

from __future__ import annotations

import inspect
import os
import re
import resource
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.memory.allocators import of_stats
from torchobs.probes.memory.components import components
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchobs.probes.core.context import ProbeContext

_ASKED = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory(?:: you tried to allocate (\d{1,18}) bytes)?")
MAX_LOCATIONS = 8
MOST_BLOCKS = 50_000
"""Blocks of all devices up to which a snapshot is taken: it lists them all, with their stacks, some 10 µs each"""
MIN_INTERVAL_S = 1.0
"""At most one event a second: a script that halves the batch until it fits fails often, and the ring is small."""


class OomObserver:
    """Writes ``torchobs.memory.out_of_memory`` events. Part of the device memory probe."""

    def __init__(self) -> None:
        self._attach: Callable[[], object] | None = None
        self._last = -MIN_INTERVAL_S

    def install(self, context: ProbeContext) -> None:
        """Listen, and attach the observer when CUDA is initialized, or at once if it is."""
        import torch

        if not hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
            return  # a build without CUDA
        self._context, self._torch = context, torch
        breaker = context.breaker(
            "oom"
        )  # a breaker of its own: an allocator without observers (cudaMallocAsync) still has statistics
        _Listening.to = breaker.guard(self.note)
        if not _Listening.attached:
            self._attach = breaker.guard(_attach)
            lazily: Any = torch.cuda._lazy_call
            lazily(self._attach)

    def remove(self) -> None:
        """Stop listening; remove our pending call from CUDA's initialization."""
        if self._attach is None and _Listening.to is None:
            return
        _Listening.to = None
        queue = self._torch.cuda._queued_calls
        queue[:] = [entry for entry in queue if entry[0] is not self._attach]

    def note(self, device: int, requested: int, limit: int, free: int) -> None:
        """Write the event. Called in the thread that ran out of memory, before the exception is raised."""
        now = time.monotonic()
        if now - self._last < MIN_INTERVAL_S:
            return
        self._last = now
        stats = self._torch.cuda.memory_stats_as_nested_dict(device)
        attributes: dict[str, Any] = {
            "device": f"cuda:{device}",
            "requested": requested,
            "limit": limit,
            "free": free,
            **summary(stats),
        }
        attributes |= held(self._context, f"cuda:{device}")
        if has_history(self._torch) and (segments := segments_in_time(self._torch)) is not None:
            package = os.path.dirname(self._torch.__file__)
            attributes["largest"] = largest_allocations({"segments": segments}, device, package)
        self._context.event(catalog.EVENT_OUT_OF_MEMORY, attributes)


def has_history(torch: Any) -> bool:
    """Return True if torch records where each block was allocated."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(enabled is not None and enabled())


def segments_in_time(torch: Any) -> Any:
    """Return the allocators' segments, or ``None`` if to list them would take longer than some 0.5 s.

    A snapshot is of all devices. Unless it is told not to, which older versions of torch cannot be, it also lists the history
    of all that was ever allocated and freed, which may take minutes.
    """
    stats = [torch.cuda.memory_stats_as_nested_dict(device) for device in range(torch.cuda.device_count())]
    listed = sum(_count(one, "allocation", "current") + _count(one, "inactive_split", "current") for one in stats)
    without = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
    if not without:
        listed += 2 * sum(_count(one, "allocation", "allocated") for one in stats)  # each is freed, too
    if listed > MOST_BLOCKS:
        return None
    return torch.cuda.memory_snapshot(include_traces=False) if without else torch.cuda.memory_snapshot()


def _count(stats: Mapping[str, Any], what: str, which: str) -> int:
    return int(stats.get(what, {}).get("all", {}).get(which) or 0)


def held(context: ProbeContext, device: str) -> dict[str, Any]:
    """Return what takes the memory of that device, as attributes of the event; empty if it cannot be told."""
    found = call(context.breaker("oom"), components, context, device)
    if found is None or not any(found.sizes.values()):
        return {}
    return {**found.sizes, **({"modules": found.modules} if found.modules else {})}


def host_shortage(context: ProbeContext, error: BaseException) -> dict[str, Any] | None:
    """Return the event's attributes if the host's memory ran out; ``None`` for another error.

    That is a ``MemoryError`` (numpy's, too), or the ``RuntimeError`` of torch's CPU allocator, which has no class of its own.
    A kernel that has no memory left rather kills; a limit of the address space, where there is one, is what refuses.
    """
    found = _ASKED.search(str(error)) if type(error) is RuntimeError else None
    if found is None and not isinstance(error, MemoryError):
        return None
    asked = {"requested": int(found[1])} if found is not None and found[1] else {}
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limit = min((each for each in limits if each != resource.RLIM_INFINITY), default=None)
    return {"device": "cpu", **asked, **({} if limit is None else {"limit": limit}), **held(context, "cpu")}


def summary(stats: Mapping[str, Any]) -> dict[str, int]:
    """Return the main figures of the allocator's nested statistics: ``torch.cuda.memory_summary`` in one line."""
    memory = of_stats("", stats, None)
    if memory is None:
        return {}
    allocations = stats.get("allocation", {}).get("all", {}).get("current")
    found = {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "active": memory.active,
        "inactive_split": memory.inactive_split,
        "allocations": allocations,
        "alloc_retries": memory.retries,
        "ooms": memory.ooms,
    }
    return {name: value for name, value in found.items() if value is not None}


def largest_allocations(snapshot: Mapping[str, Any], device: int, package: str) -> list[str]:
    """Return the code locations that hold most of a device's memory, as ``file:line size B in n blocks``.

    ``snapshot`` is from ``torch.cuda.memory._snapshot``; a block's location is its innermost Python frame outside torch's
    ``package``.
    """
    sizes, blocks = blocks_by_location(snapshot, device, package)
    return [f"{location} {size} B in {blocks[location]} blocks" for location, size in sizes.most_common(MAX_LOCATIONS)]


def blocks_by_location(snapshot: Mapping[str, Any], device: int | None, package: str) -> tuple[Counter[str], Counter[str]]:
    """Return bytes and number of the blocks in use, by code location; ``device``: its index, or ``None`` for all."""
    sizes, blocks = Counter[str](), Counter[str]()
    for segment in snapshot["segments"]:
        if device is not None and segment.get("device", device) != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                location = _location(block.get("frames", ()), package)
                sizes[location] += block["size"]
                blocks[location] += 1
    return sizes, blocks


def _location(frames: Iterable[Mapping[str, Any]], package: str) -> str:
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    own = next((frame for frame in python if not frame["filename"].startswith(f"{package}/")), None)
    frame = own or (python[0] if python else None)
    return f"{frame['filename']}:{frame['line']}" if frame else "unknown"


class _Listening:
    """This process's listener, and whether the observer is attached."""

    to: Callable[[int, int, int, int], object] | None = None
    attached = False


def _attach() -> None:
    import torch

    built_in: Any = torch._C
    built_in._cuda_attach_out_of_memory_observer(_observe)
    _Listening.attached = True


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    listener = _Listening.to
    if listener is not None:
        listener(device, requested, limit, free)
