"""The moment the device allocator gives up: recorded before the exception exists, which its user gets untouched.

torch calls an observer with the allocator's lock released (``CUDACachingAllocator.cpp``, ``malloc``), so that it may ask for
statistics and a snapshot. An observer cannot be detached, and attaching wants CUDA initialised: one function is attached once
in the process's life, by CUDA's own initialisation, and does nothing while no session listens.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.memory.allocators import of_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchobs.probes.core.context import ProbeContext

MOST_PLACES = 8
APART_S = 1.0
"""One event a second: who halves the batch until it fits gets here often, and the ring has room for so many."""


class OomObserver:
    """Writes ``torchobs.memory.out_of_memory``. A part of the device memory probe."""

    def __init__(self) -> None:
        self._attach: Callable[[], object] | None = None
        self._last = -APART_S

    def install(self, context: ProbeContext) -> None:
        """Listen, and attach when CUDA is initialised: at once, if it is."""
        import torch

        if not hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
            return  # a build without CUDA
        self._context, self._torch = context, torch
        breaker = context.breaker(
            "oom"
        )  # of its own: an allocator that has no observers (cudaMallocAsync) has statistics all the same
        _Listening.to = breaker.guard(self.note)
        if not _Listening.attached:
            self._attach = breaker.guard(_attach)
            lazily: Any = torch.cuda._lazy_call
            lazily(self._attach)

    def remove(self) -> None:
        """Stop listening; take back what CUDA's initialisation was asked to call."""
        if self._attach is None and _Listening.to is None:
            return
        _Listening.to = None
        queue = self._torch.cuda._queued_calls
        queue[:] = [entry for entry in queue if entry[0] is not self._attach]

    def note(self, device: int, requested: int, limit: int, free: int) -> None:
        """Write the event. In the thread that ran out of memory, before the exception is raised."""
        now = time.monotonic()
        if now - self._last < APART_S:
            return
        self._last = now
        stats = self._torch.cuda.memory_stats_as_nested_dict(device)
        attributes = {"device": f"cuda:{device}", "requested": requested, "limit": limit, "free": free, **numbers(stats)}
        if self._remembers():
            package = os.path.dirname(self._torch.__file__)
            attributes["largest"] = largest(self._torch.cuda.memory._snapshot(), device, package)
        self._context.writer.event(catalog.EVENT_OUT_OF_MEMORY.name, attributes, self._context.recorder.step)

    def _remembers(self) -> bool:
        """Return True if torch keeps where each block was allocated."""
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return bool(enabled is not None and enabled())


def numbers(stats: Mapping[str, Any]) -> dict[str, int]:
    """Abridge the allocator's nested statistics: what ``torch.cuda.memory_summary`` shows, in one line."""
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


def largest(snapshot: Mapping[str, Any], device: int, package: str) -> list[str]:
    """Return the places that hold most of a device's memory, as ``file:line size B in n blocks``.

    ``snapshot`` is that of ``torch.cuda.memory._snapshot``; a block's place is its innermost Python frame outside of torch's
    ``package``.
    """
    sizes, blocks = Counter[str](), Counter[str]()
    for segment in snapshot["segments"]:
        if segment.get("device", device) != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                place = _place(block.get("frames", ()), package)
                sizes[place] += block["size"]
                blocks[place] += 1
    return [f"{place} {size} B in {blocks[place]} blocks" for place, size in sizes.most_common(MOST_PLACES)]


def _place(frames: Iterable[Mapping[str, Any]], package: str) -> str:
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    own = next((frame for frame in python if not frame["filename"].startswith(f"{package}/")), None)
    frame = own or (python[0] if python else None)
    return f"{frame['filename']}:{frame['line']}" if frame else "unknown"


class _Listening:
    """Who is told, in this process, and whether the observer is attached."""

    to: Callable[[int, int, int, int], object] | None = None
    attached = False


def _attach() -> None:
    import torch

    built_in: Any = torch._C
    built_in._cuda_attach_out_of_memory_observer(_observe)
    _Listening.attached = True


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    told = _Listening.to
    if told is not None:
        told(device, requested, limit, free)
