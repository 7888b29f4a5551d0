"""Reads figures of this process, its children and the machine's memory: from ``/proc`` on Linux, through psutil elsewhere.

For the sampler thread only. A small file of ``/proc`` takes 6 to 14 µs to open, read and close; psutil takes ten times as
long, and scans every process of the machine for the children.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

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
        """``linux``: read ``/proc``. Raises ``ImportError`` if psutil is needed and missing."""
        self._linux = linux
        self._pid = os.getpid()
        if not linux:
            import psutil  # heavy, and needed on macOS only

            self._psutil, self._this = psutil, psutil.Process()

    def resident(self) -> Resident:
        """Return the process's resident memory."""
        if not self._linux:
            rss = self._this.memory_info().rss
            return Resident(rss, rss)
        return _resident(read("/proc/self/statm"))

    def proportional(self) -> int | None:
        """Return the proportional set size in bytes: 0.1 ms for a small process, 5 ms for one with many mappings."""
        return _kib(read("/proc/self/smaps_rollup"), "Pss:") if self._linux else None

    def threads(self) -> int:
        """Return the number of threads."""
        return len(os.listdir("/proc/self/task")) if self._linux else self._this.num_threads()

    def files(self) -> Files:
        """Return the open descriptors."""
        import resource  # not on Windows, where this module is imported all the same

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        opened = _open_files() if self._linux else self._this.num_fds()
        return Files(opened, None if limit == resource.RLIM_INFINITY else limit)

    def children(self) -> ChildProcesses | None:
        """Return the descendants; ``None`` on a kernel that does not list them (CONFIG_PROC_CHILDREN)."""
        if not self._linux:
            found = self._this.children(recursive=True)
            return ChildProcesses(len(found), sum(_rss_of(child) for child in found))
        if not os.path.exists(f"/proc/{self._pid}/task/{self._pid}/children"):
            return None
        known: list[int] = []
        waiting = [self._pid]
        while waiting and len(known) < MAX_CHILDREN:
            fresh = _children_of(waiting.pop())
            known += fresh
            waiting += fresh
        return ChildProcesses(len(known), sum(_resident(read(f"/proc/{pid}/statm")).all for pid in known))

    def machine(self) -> Machine | None:
        """Return the machine's memory; ``None`` on a kernel that does not estimate what is available."""
        if not self._linux:
            memory, swap = self._psutil.virtual_memory(), self._psutil.swap_memory()
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


def _resident(statm: str) -> Resident:
    """Parse a line of ``statm``; zeros if the process is gone."""
    fields = statm.split()
    if len(fields) < 3:  # noqa: PLR2004  # size, resident, shared
        return Resident(0, 0)
    resident, shared = int(fields[1]), int(fields[2])
    return Resident(resident * PAGE, (resident - shared) * PAGE)


def _open_files() -> int:
    # since Linux 6.2 the directory's size is their number, before it is 0; listing takes 1 µs each and counts its own
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1


def _children_of(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []  # it has ended
    listed = " ".join(read(f"/proc/{pid}/task/{thread}/children") for thread in threads)
    return [child for word in listed.split() if (child := number(word)) is not None]


def _rss_of(child: object) -> int:
    import psutil

    try:
        return int(child.memory_info().rss) if isinstance(child, psutil.Process) else 0
    except psutil.Error:
        return 0  # it has ended
