"""Is there room for a flight file? Asked before allocating: at a full memory cgroup that would be the trainer's end."""

from __future__ import annotations

import os
import resource
import signal
from typing import TYPE_CHECKING

from torchobs.support.cgroup import memory_of, of_process

if TYPE_CHECKING:
    from torchobs.support.cgroup import Memory

HEADROOM = 16
"""Times the file's size that must be free in the memory cgroup: allocation at its limit got the trainer OOM-killed."""


def shortage(directory_fd: int, size: int) -> str | None:
    """Return why a file of ``size`` bytes should not be allocated there, or ``None`` when there is room."""
    if deadly_limit(size):
        return f"files of this process may have {_size_limit()} bytes, and the signal that would tell it of more ends it"
    usage = os.fstatvfs(directory_fd)
    if usage.f_bavail * usage.f_frsize < size:
        return f"the file system has {usage.f_bavail * usage.f_frsize} bytes left, {size} are needed"
    free = cgroup_headroom()
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


def cgroup_headroom(root: str = "") -> int | None:
    """Return the bytes left in the tightest memory cgroup, v1 or v2; ``None`` without a limit.

    Left is the limit less the working set, as the kubelet counts it: usage without inactive file pages. Whoever reads a
    data set larger than the limit has the cgroup full of those, and the kernel takes them back before it kills anybody.
    ``root`` is put before every path.
    """
    return min((max(limit - memory.working_set, 0) for limit, memory in _limited(root)), default=None)


def cgroup_limit(root: str = "") -> int | None:
    """Return the bytes that the tightest memory cgroup of this process may take, v1 or v2; ``None`` without a limit."""
    return min((limit for limit, _ in _limited(root)), default=None)


def _limited(root: str) -> list[tuple[int, Memory]]:
    """Return the limit and the memory of each group that has one."""
    groups = of_process("memory", root)
    found = [memory_of(level, v2=groups.v2, root=root) for level in groups.levels] if groups else []
    return [(memory.limit, memory) for memory in found if memory is not None and memory.limit is not None]
