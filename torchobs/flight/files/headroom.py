"""Is there room for a flight file? Asked before allocating: at a full memory cgroup that would be the trainer's end."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

HEADROOM = 16
"""Times the file's size that must be free in the memory cgroup: allocation at its limit got the trainer OOM-killed."""


def shortage(directory_fd: int, size: int) -> str | None:
    """Return why a file of ``size`` bytes should not be allocated there, or ``None`` when there is room."""
    if deadly_limit(size):
        return f"files of this process may have {_size_limit()} bytes, and the signal that would tell it of more ends it"
    usage = os.fstatvfs(directory_fd)
    if usage.f_bavail * usage.f_frsize < size:
        return f"the file system has {usage.f_bavail * usage.f_frsize} bytes left, {size} are needed"
    free = cgroup_headroom(_read("/proc/self/cgroup"), _read)
    if free is not None and free < HEADROOM * size:
        return f"the memory cgroup has {free} bytes left, {HEADROOM * size} must be free before {size} are taken"
    return None


def deadly_limit(size: int) -> bool:
    """Return True if a file of ``size`` bytes would be this process' end, by ``ulimit -f``.

    Python ignores the signal, so that writing on is an error as any other; but an application may have its default back.
    """
    return size > _size_limit() and signal.getsignal(signal.SIGXFSZ) == signal.SIG_DFL


def survive_limits() -> None:
    """Have too long a file be an error in this thread, whatever the application makes of the signal meanwhile.

    The kernel sends it to the thread that writes, and there it stays pending.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXFSZ])


def _size_limit() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def cgroup_headroom(membership: str, read: Callable[[str], str]) -> int | None:
    """Return the bytes left in the tightest memory cgroup, v1 or v2; ``None`` without a limit.

    Left is the limit less the working set, as the kubelet counts it: usage without inactive file pages. Whoever reads a
    data set larger than the limit has the cgroup full of those, and the kernel takes them back before it kills anybody.

    ``membership`` is the text of ``/proc/self/cgroup``. In a container the path in it may not exist below the mount, whose
    root is then the container's own cgroup.
    """
    return min((level.left for level in _all_levels(membership, read)), default=None)


def cgroup_limit() -> int | None:
    """Return the bytes that the tightest memory cgroup of this process may take, v1 or v2; ``None`` without a limit."""
    found = [level.limit for level in _all_levels(_read("/proc/self/cgroup"), _read)]
    return min(found, default=None)


class _Level(NamedTuple):
    limit: int
    left: int


class _Names(NamedTuple):
    root: str
    limit: str
    usage: str
    inactive: str


_V2 = _Names("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file ")
_V1 = _Names("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


def _all_levels(membership: str, read: Callable[[str], str]) -> list[_Level]:
    found = []
    for line in membership.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if line.startswith("0::"):
            found += _levels(_V2, path, read)
        elif "memory" in controllers.split(","):
            found += _levels(_V1, path, read)
    return found


def _levels(names: _Names, path: str, read: Callable[[str], str]) -> list[_Level]:
    parts = [part for part in path.split("/") if part and part != ".."]
    found = []
    for depth in range(len(parts) + 1):
        directory = "/".join([names.root, *parts[:depth]])
        limit, usage = _number(read(f"{directory}/{names.limit}")), _number(read(f"{directory}/{names.usage}"))
        if limit is not None and usage is not None and limit < 1 << 62:  # v1 says "no limit" by a number near 2^63
            left = max(limit - usage + _inactive(read(f"{directory}/memory.stat"), names.inactive), 0)
            found.append(_Level(limit, left))
    return found


def _inactive(statistics: str, name: str) -> int:
    lines = (line.removeprefix(name) for line in statistics.splitlines() if line.startswith(name))
    return next((number for line in lines if (number := _number(line)) is not None), 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None
