"""Figures of this process, its children and the machine's memory, read by psutil.

For the sampler thread only. On Linux three are read from ``/proc``: the machine's memory, which is read ten times a second near
a limit (20 µs, psutil 200), the children, for which psutil scans every process of the machine, and the proportional set size.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import psutil

from torchobs.support.cgroup import field, number, read

PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_CHILDREN = 4096
_KIB = 1024


class Resident(NamedTuple):
    """Resident bytes of a process: all, and those that belong to no file (proc(5), ``statm``)."""

    all: int
    anonymous: int


class ChildProcesses(NamedTuple):
    """Descendants of this process. Pages that they share count in each of them."""

    processes: int
    rss: int


class Files(NamedTuple):
    """Open file descriptors, and their limit (``None``: unlimited)."""

    open: int
    limit: int | None


class Machine(NamedTuple):
    """The machine's memory and swap in bytes; ``available`` as the kernel estimates it (proc(5), ``MemAvailable``)."""

    total: int
    available: int
    swap_total: int
    swap_free: int

    @property
    def left(self) -> int:
        """Bytes that can be allocated before the kernel kills."""
        return self.available + self.swap_free


class ProcessStats:
    """Reads the figures of this process."""

    def __init__(self, *, linux: bool = sys.platform == "linux") -> None:
        """``linux``: read ``/proc`` where psutil is slow."""
        self._linux = linux
        self._this = psutil.Process()

    def resident(self) -> Resident:
        """Return the process's resident memory."""
        memory = self._this.memory_info()
        return Resident(memory.rss, memory.rss - getattr(memory, "shared", 0))

    def proportional(self) -> int | None:
        """Return the proportional set size in bytes: 0.1 ms for a small process, 5 ms for one with many mappings."""
        return _kib(read("/proc/self/smaps_rollup"), "Pss:") if self._linux else None

    def threads(self) -> int:
        """Return the number of threads."""
        return self._this.num_threads()

    def files(self) -> Files:
        """Return the open descriptors."""
        import resource  # not on Windows, where this module is imported all the same

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        listing = int(sys.platform == "linux")  # there psutil lists a directory, and counts the descriptor by which it does
        return Files(self._this.num_fds() - listing, None if limit == resource.RLIM_INFINITY else limit)

    def children(self) -> ChildProcesses | None:
        """Return the descendants; ``None`` on a kernel that does not list them (CONFIG_PROC_CHILDREN)."""
        if not self._linux:
            descendants = self._this.children(recursive=True)
            return ChildProcesses(len(descendants), sum(map(_rss_of, descendants)))
        pid = self._this.pid
        if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
            return None
        known: list[int] = []
        waiting = [pid]
        while waiting and len(known) < MAX_CHILDREN:
            fresh = _children_of(waiting.pop())
            known += fresh
            waiting += fresh
        return ChildProcesses(len(known), sum(_rss_in(read(f"/proc/{child}/statm")) for child in known))

    def machine(self) -> Machine | None:
        """Return the machine's memory; ``None`` on a kernel that does not estimate what is available."""
        if not self._linux:
            memory, swap = psutil.virtual_memory(), psutil.swap_memory()
            return Machine(memory.total, memory.available, swap.total, swap.free)
        return parse_machine(read("/proc/meminfo"))


def parse_machine(text: str) -> Machine | None:
    """Parse the text of ``/proc/meminfo``."""
    total, available = _kib(text, "MemTotal:"), _kib(text, "MemAvailable:")
    if total is None or available is None:
        return None
    return Machine(total, available, _kib(text, "SwapTotal:") or 0, _kib(text, "SwapFree:") or 0)


def _kib(text: str, name: str) -> int | None:
    value = field(text, name)
    return None if value is None else value * _KIB


def _rss_in(statm: str) -> int:
    """Return the resident bytes in a line of ``statm``; 0 if the process is gone."""
    fields = statm.split()
    return int(fields[1]) * PAGE if fields else 0


def _children_of(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []  # it has ended
    listed = " ".join(read(f"/proc/{pid}/task/{thread}/children") for thread in threads)
    return [child for word in listed.split() if (child := number(word)) is not None]


def _rss_of(child: psutil.Process) -> int:
    try:
        return int(child.memory_info().rss)
    except psutil.Error:
        return 0  # it has ended
