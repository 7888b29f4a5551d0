"""GPUs that this process uses, by torch, and those that it may use, by ``CUDA_VISIBLE_DEVICES``, parsed as the driver does.

CUDA is never initialized here, and no context created.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.memory.allocators import has_statistics
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ORDINAL = re.compile(r"\s*([+-]?\d+)")


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


def visible(variable: str | None, boards: Sequence[str]) -> list[str]:
    """Return the UUIDs of the GPUs that CUDA would list, in its order, out of those of all GPUs in NVML's order.

    Ordinals are NVML's, which equal CUDA's if all GPUs are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID. The list ends at the first
    invalid name, and a duplicate makes it empty, as in CUDA (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    found: list[str] = []
    for uuid in _named(variable, boards):
        if uuid in found:
            return []
        found.append(uuid)
    return found


def _named(variable: str | None, boards: Sequence[str]) -> Iterator[str]:
    if variable is None:
        yield from boards
        return
    for name in variable.split(","):
        uuid = _by_uuid(name.strip(), boards) if "-" in name[1:] else _by_ordinal(name, boards)
        if uuid is None:
            return
        yield uuid


def _by_ordinal(name: str, boards: Sequence[str]) -> str | None:
    number = _ORDINAL.match(name)  # `2GB` is 2, as for strtol
    index = int(number[1]) if number else -1
    return boards[index] if 0 <= index < len(boards) else None


def _by_uuid(name: str, boards: Sequence[str]) -> str | None:
    """Return the only GPU with this UUID prefix."""
    matches = [uuid for uuid in boards if uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None
