"""Is there room for a flight file? Asked before allocating: at a full memory cgroup the allocation would be the trainer's end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HEADROOM = 16
"""Times the file's size that must be free in the memory cgroup: allocation at its limit got the trainer OOM-killed."""


def shortage(directory_fd: int, size: int) -> str | None:
    """Return why a file of ``size`` bytes should not be allocated there, or ``None`` when there is room."""
    usage = os.fstatvfs(directory_fd)
    if usage.f_bavail * usage.f_frsize < size:
        return f"the file system has {usage.f_bavail * usage.f_frsize} bytes left, {size} are needed"
    free = cgroup_headroom(_read("/proc/self/cgroup"), _read)
    if free is not None and free < HEADROOM * size:
        return f"the memory cgroup has {free} bytes left, {HEADROOM * size} must be free before {size} are taken"
    return None


def cgroup_headroom(membership: str, read: Callable[[str], str]) -> int | None:
    """Return the bytes left in the tightest memory cgroup, v1 or v2; ``None`` without a limit.

    ``membership`` is the text of ``/proc/self/cgroup``. In a container the path in it may not exist below the mount, whose
    root is then the container's own cgroup.
    """
    found = []
    for line in membership.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            found += _levels("/sys/fs/cgroup", path, "memory.max", "memory.current", read)
        elif "memory" in controllers.split(","):
            found += _levels("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", read)
    return min(found, default=None)


def _levels(root: str, path: str, limit_name: str, usage_name: str, read: Callable[[str], str]) -> list[int]:
    parts = [part for part in path.split("/") if part and part != ".."]
    found = []
    for depth in range(len(parts) + 1):
        directory = "/".join([root, *parts[:depth]])
        limit, usage = _number(read(f"{directory}/{limit_name}")), _number(read(f"{directory}/{usage_name}"))
        if limit is not None and usage is not None and limit < 1 << 62:  # v1 says "no limit" by a number near 2^63
            found.append(max(limit - usage, 0))
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None
