"""GPUs that this process may use according to ``CUDA_VISIBLE_DEVICES``, parsed as the CUDA driver does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ORDINAL = re.compile(r"\s*([+-]?\d+)")


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
