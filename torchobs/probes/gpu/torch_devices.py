"""GPUs that this process uses, according to torch: CUDA is never initialized here, and no context created."""

from __future__ import annotations

from typing import NamedTuple

from torchobs.support.import_hooks import imported


class Used(NamedTuple):
    """A CUDA device of this process, with torch's index and the driver's UUID."""

    device: str
    uuid: str
    in_use: bool
    """True if torch's allocator holds memory on it"""


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
        stats = torch.cuda.memory_stats_as_nested_dict(index)  # empty before the first allocation
        held = stats.get("reserved_bytes", {}).get("all", {}).get("current", 0)
        found.append(Used(f"cuda:{index}", str(uuid), held > 0))
    return found
