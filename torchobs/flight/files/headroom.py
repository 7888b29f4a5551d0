"""Check for space before a flight file is allocated: in a full memory cgroup the allocation gets the trainer killed."""

from __future__ import annotations

import os
import resource
import signal

from torchobs.support.cgroup import Memory, memory_of, of_process

HEADROOM = 16
"""Multiple of the file's size that must be free in the memory cgroup: allocation at its limit got the trainer OOM-killed."""


def shortage(directory_fd: int, size: int) -> str | None:
    """Return why a file of ``size`` bytes should not be allocated there; ``None`` when there is room."""
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
    """Return True if writing ``size`` bytes would kill this process by SIGXFSZ (``ulimit -f``).

    Python ignores the signal, so that the write fails with an error; an application may have restored the default.
    """
    return size > _size_limit() and signal.getsignal(signal.SIGXFSZ) == signal.SIG_DFL


def survive_limits() -> None:
    """Block SIGXFSZ in this thread, so that exceeding ``ulimit -f`` is an error whatever handler the application sets.

    The kernel sends the signal to the writing thread, where it then stays pending.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXFSZ])


def _size_limit() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def cgroup_headroom(root: str = "") -> int | None:
    """Return the bytes left in the tightest memory cgroup, v1 or v2; ``None`` without a limit.

    That is the limit minus the working set as the kubelet counts it: usage without inactive file pages. Reading a data set
    larger than the limit fills the cgroup with those, and the kernel reclaims them before it kills a process.
    ``root`` is prefixed to every path.
    """
    return min((max(limit - memory.working_set, 0) for limit, memory in _limited(root)), default=None)


def cgroup_limit(root: str = "") -> int | None:
    """Return the bytes that the tightest memory cgroup of this process may take, v1 or v2; ``None`` without a limit."""
    return min((limit for limit, _ in _limited(root)), default=None)


def _limited(root: str) -> list[tuple[int, Memory]]:
    """Return limit and memory use of each group with a limit."""
    groups = of_process("memory", root)
    found = [memory_of(level, v2=groups.v2, root=root) for level in groups.levels] if groups else []
    return [(memory.limit, memory) for memory in found if memory is not None and memory.limit is not None]
