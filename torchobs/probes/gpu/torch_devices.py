"""GPUs that this process uses, according to torch: CUDA is never initialized here, and no context created."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchobs.probes.memory.allocators import has_statistics
from torchobs.support.import_hooks import imported


class Used(NamedTuple):
    """A CUDA device of this process, with torch's index and the driver's UUID."""

    device: str
    uuid: str
    in_use: bool
    """True if torch's allocator holds memory on it; where that cannot be asked, if the process has a context there"""


def used() -> list[Used] | None:
    """Return torch's devices; ``None`` before CUDA is initialized, or where torch has no UUIDs (before 2.5, ROCm)."""
    torch = imported("torch")
    if torch is None or torch.version.cuda is None or not torch.cuda.is_initialized():
        return None
    found = []
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is None:
            return None
        found.append(Used(f"cuda:{index}", str(uuid), _is_in_use(torch, index)))
    return found


def _is_in_use(torch: Any, index: int) -> bool:
    if not has_statistics(torch):
        has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        return has_context is not None and bool(has_context(index))
    stats = torch.cuda.memory_stats_as_nested_dict(index)  # empty before the first allocation
    return bool(stats.get("reserved_bytes", {}).get("all", {}).get("current", 0))
