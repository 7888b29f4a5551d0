"""Memory of the process, its children, the machine and its container: growth, and distance to the limits.

For the sampler thread only. Figures are psutil's; three are read from Linux's ``/proc``: the machine's memory (20 µs,
psutil 200), the children (psutil scans every process of the machine), and the proportional set size.

A killed process writes nothing, so the flight file's last value has to be recent: near the limit this is read ten times a
second. Otherwise it is read as soon as 2 GB/s, what one thread can touch, could have used up the remaining memory.

An exporter in another container sees neither the trainer's processes nor its cgroup, so the rank's sampler thread reads ten
files every ten seconds.

The sampler thread reads the main values once a second (30 µs; 0.1 ms in a cgroup with a limit), ten times a second near a
limit, and all of them in ``observe`` (0.4 ms, no file longer than 20 µs). The proportional set size, for which the kernel
walks all mappings (8 ms with torch loaded), needs the ``advanced`` level.
"""

from __future__ import annotations

import os
import sys
import time
from math import inf, nan
from typing import TYPE_CHECKING, NamedTuple

import psutil

from torchobs import catalog
from torchobs.detect.growth import FastWindow, MemoryHistory, MemoryPoint, soonest
from torchobs.probes.memory_growth import GrowthGauges, Suspicion
from torchobs.support.cgroup import cpu_of, field, memory_of, number, of_process, pressure, read, tightest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.catalog import Metric
    from torchobs.detect.growth import Growth
    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.context import ProbeContext
    from torchobs.support.cgroup import Memory

    Trends = tuple[Growth | None, Growth | None]


PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_CHILDREN = 4096
_KIB = 1024


class Resident(NamedTuple):
    """Resident bytes of a process: all, and those that belong to no file (proc(5), ``statm``)."""

    all: int
    anonymous: int


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

    def __init__(self) -> None:
        self._this = psutil.Process()

    def resident(self) -> Resident:
        """Return the process's resident memory."""
        memory = self._this.memory_info()
        return Resident(memory.rss, memory.rss - getattr(memory, "shared", 0))

    def files(self) -> tuple[int, int | None]:
        """Return the number of open file descriptors, and their limit (``None``: unlimited)."""
        import resource  # not on Windows, where this module is imported all the same

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        listing = int(sys.platform == "linux")  # there psutil lists a directory, and counts the descriptor by which it does
        return self._this.num_fds() - listing, None if limit == resource.RLIM_INFINITY else limit

    def children(self) -> tuple[int, int] | None:
        """Return the number of descendants and their resident bytes; pages that they share count in each of them.

        ``None`` where the kernel does not list them (macOS, without CONFIG_PROC_CHILDREN).
        """
        pid = self._this.pid
        if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
            return None
        descendants: list[int] = []
        waiting = [pid]
        while waiting and len(descendants) < MAX_CHILDREN:
            fresh = _children_of(waiting.pop())
            descendants += fresh
            waiting += fresh
        return len(descendants), sum(_rss_in(read(f"/proc/{child}/statm")) for child in descendants)

    def machine(self) -> Machine:
        """Return the machine's memory."""
        if sys.platform != "linux":
            memory, swap = psutil.virtual_memory(), psutil.swap_memory()
            return Machine(memory.total, memory.available, swap.total, swap.free)
        return parse_machine(read("/proc/meminfo"))


def parse_machine(text: str) -> Machine:
    """Parse the text of ``/proc/meminfo``."""
    return Machine(*(_kib(text, name) or 0 for name in ("MemTotal:", "MemAvailable:", "SwapTotal:", "SwapFree:")))


def _kib(text: str, name: str) -> int | None:
    value = field(text, name)
    return None if value is None else value * _KIB


def own_limits() -> list[tuple[int, int]]:
    """Return bytes in use and limit of the address space and of data (``ulimit -v``, ``-d``): there allocations fail."""
    import resource  # as above

    kinds = {0: resource.RLIMIT_AS, 5: resource.RLIMIT_DATA}
    limits = {column: resource.getrlimit(kind)[0] for column, kind in kinds.items()}
    fields = read("/proc/self/statm").split() if set(limits.values()) != {resource.RLIM_INFINITY} else []
    return [(int(fields[column]) * PAGE, limit) for column, limit in limits.items() if fields and limit >= 0]


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


NEAR = 0.9
"""Share of a limit above which every round reads the memory"""
MAX_RATE = 2e9
MAX_INTERVAL_S = 1.0


class Group(NamedTuple):
    """A memory cgroup, and its memory at the last reading."""

    path: str
    v2: bool
    memory: Memory


def tightest_group(root: str = "") -> Group | None:
    """Return the tightest memory cgroup of this process; ``None`` without one. Limits change, and processes move."""
    groups = of_process("memory", root)
    result = tightest(groups, root) if groups else None
    return Group(result[0], groups.v2, result[1]) if groups and result else None


class MemoryLimits:
    """Publishes ``torchobs.memory.context.utilization`` and counts OOM kills."""

    def __init__(self, writer: FlightWriter, machine: Callable[[], Machine], root: str = "") -> None:
        self._writer, self._machine, self._root = writer, machine, root
        self._group: Group | None = None
        self._counted: tuple[str, int] | None = None
        self._due = 0.0
        self.left, self.total = inf, inf
        """Bytes to the nearest limit, and that limit"""
        self.grouped: float | None = None
        """Bytes that count towards it, if it is not the machine's"""

    def due(self) -> bool:
        """Return whether it is time to read again."""
        return time.monotonic() >= self._due

    def update(self, *, thorough: bool = False) -> None:
        """Read all limits. ``thorough``: search the tightest cgroup again."""
        machine = self._machine()
        group = self._of_group(machine, thorough=thorough)
        limits = [_Headroom(machine.left, machine.total + machine.swap_total, "machine"), *([group] if group else [])]
        for headroom in limits:
            cell = self._writer.table.cell(catalog.MEMORY_HOST_UTILIZATION, {"limit": headroom.limit})
            if cell is not None:
                cell.set(1.0 - headroom.left / headroom.total)
        limits += [_Headroom(limit - used, limit, "process") for used, limit in own_limits()]
        nearest = min(limits)
        self.left, self.total = nearest.left, nearest.total
        self.grouped = None if nearest.limit == "machine" else nearest.total - nearest.left
        delays = [(headroom.left - (1 - NEAR) * headroom.total) / MAX_RATE for headroom in limits]
        self._due = time.monotonic() + min([MAX_INTERVAL_S, *delays])

    def _of_group(self, machine: Machine, *, thorough: bool) -> _Headroom | None:
        group = self._group
        if thorough:
            group = tightest_group(self._root)
        elif group is not None and group.memory.limit is not None:
            group = group._replace(memory=memory_of(group.path, v2=group.v2, root=self._root) or group.memory)
        self._group = group
        if group is None:
            return None
        self._count(group.path, group.memory.oom_kills)
        return _of_memory(group.memory, machine)

    def _count(self, path: str, kills: int | None) -> None:
        """Count the kills since ``init()``: the group may be older than the process."""
        cell = None if kills is None else self._writer.table.cell(catalog.CGROUP_MEMORY_OOM_KILLS, {})
        if kills is None or cell is None:
            return
        before = self._counted[1] if self._counted is not None and self._counted[0] == path else kills
        self._counted = path, kills
        if kills > before:
            cell.add(kills - before)
            stamp = self._writer.table.cell(catalog.CGROUP_MEMORY_LAST_OOM_KILL, {})
            if stamp is not None:
                stamp.set(self._writer.header.wall_s(time.monotonic_ns()))


class _Headroom(NamedTuple):
    """Bytes left to a limit including usable swap, the limit in bytes, and its name."""

    left: float
    total: float
    limit: str


def _of_memory(memory: Memory, machine: Machine) -> _Headroom | None:
    if memory.limit is None or memory.left is None or not memory.limit:
        return None
    swap_limit = machine.swap_total if memory.swap_limit is None else min(memory.swap_limit, machine.swap_total)
    swap_left = min(max(swap_limit - (memory.swap or 0), 0), machine.swap_free)
    return _Headroom(memory.left + swap_left, memory.limit + swap_limit, "cgroup")


class CgroupProbe:
    """Reads ``/sys/fs/cgroup``. Series are absent outside of any group and where a controller is not in use."""

    name = "cgroup"

    def __init__(self, root: str = "") -> None:
        """``root`` is put before every path."""
        self._root = root
        self._totals: dict[tuple[str, ...], float] = {}

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context
        self._totals.clear()
        self._cpu, unified = of_process("cpu", self._root), of_process("", self._root)
        # only v2's root lacks this file; pressure there is the machine's
        inside = unified and os.path.exists(f"{self._root}{unified.levels[0]}/cgroup.events")
        self._pressure = unified.levels[0] if unified and inside else None
        self.observe()  # counters start at 0 here: earlier events are not this rank's

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`: there are no hooks."""

    def observe(self) -> None:
        """Read and publish all series."""
        group = tightest_group(self._root)
        if group is not None:
            self._context.set_gauge(catalog.CGROUP_MEMORY_WORKING_SET, group.memory.working_set)
            self._context.set_gauge(catalog.CGROUP_MEMORY_LIMIT, group.memory.limit)
            self._context.set_gauge(catalog.CGROUP_MEMORY_PEAK, group.memory.peak)
            self._context.set_gauge(catalog.CGROUP_MEMORY_SWAP, group.memory.swap)
        cpu = cpu_of(self._cpu, self._root) if self._cpu else None
        if cpu is not None:
            self._context.set_gauge(catalog.CGROUP_CPU_LIMIT, cpu.limit)
            self._count(catalog.CGROUP_CPU_PERIODS, cpu.periods)
            self._count(catalog.CGROUP_CPU_THROTTLED_PERIODS, cpu.throttled)
            self._count(catalog.CGROUP_CPU_THROTTLED_TIME, cpu.throttled_s)
        for resource in catalog.RESOURCE.values if self._pressure is not None else ():
            waits = pressure(read(f"{self._root}{self._pressure}/{resource}.pressure"))
            for waiting, seconds in waits.items():
                if waiting in catalog.WAITING.values:
                    self._count(catalog.CGROUP_PRESSURE_TIME, seconds, resource=resource, waiting=waiting)

    def _count(self, metric: Metric, total: float, **attributes: str) -> None:
        """Add the growth of a kernel total; it may restart where another group has become the tightest."""
        key = (metric.name, *attributes.values())
        grown, self._totals[key] = total - self._totals.get(key, total), total
        self._context.count(metric, max(grown, 0), attributes)


SHARED = "/dev/shm"  # noqa: S108  # read only
FULL, REARM_BELOW = 0.9, 0.8
"""Shares of shared memory: an event is written above the first, and another one only after falling below the second."""
_ADVANCED = 2


class MemoryProbe:
    """Reads the process, the machine and the memory cgroup."""

    name = "memory"

    def __init__(
        self,
        root: str = "",
        shared: str = SHARED,
        clock: Callable[[], float] = time.monotonic,
        suspicion: Suspicion | None = None,
    ) -> None:
        """``root`` is put before the paths of ``/proc`` and ``/sys/fs/cgroup`` that describe cgroups.

        ``suspicion``: how the leak probe hears of a leak.
        """
        self._suspicion = suspicion
        self._root, self._shared, self._clock = root, shared, clock
        self._shows_pss = self._full = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context
        self._process = ProcessStats()
        self._limits = MemoryLimits(context.writer, self._process.machine, self._root)
        self._anonymous, self._cgroup_floor, self._fast = MemoryHistory(), MemoryHistory(), FastWindow()
        self._own_trends: Trends = (None, None)
        self._limit_trends: Trends = (None, None)
        self._model = context.recorder.models.changes
        self._gauges = GrowthGauges(context, "host")
        self._shares_memory = sys.platform == "linux" and os.path.ismount(self._shared)
        self._limits.update(thorough=True)  # counters exist at 0 from here on

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`: there are no hooks."""

    def sample(self) -> None:
        """Read fast-changing values when they are due."""
        if self._limits.due():
            self._read(thorough=False)

    def observe(self) -> None:
        """Read and publish all series."""
        process = self._process
        self._read(thorough=True)
        self._context.set_gauge(catalog.MEMORY_HOST_RSS, process.resident().all)
        self._show_pss()
        self._context.yield_gil()
        (children, children_rss), (files, most_files) = process.children() or (None, None), process.files()
        self._context.set_gauge(catalog.MEMORY_HOST_AVAILABLE, process.machine().available)
        self._context.set_gauge(catalog.MEMORY_HOST_CHILDREN_RSS, children_rss)
        self._context.set_gauge(catalog.PROCESS_CHILDREN, children)
        self._context.set_gauge(catalog.PROCESS_THREADS, psutil.Process().num_threads())
        self._context.set_gauge(catalog.PROCESS_OPEN_FILES, files)
        self._context.set_gauge(catalog.PROCESS_MAX_FILES, most_files)
        self._context.yield_gil()
        self._evaluate_growth()

    def _read(self, *, thorough: bool) -> None:
        self._limits.update(thorough=thorough)
        anonymous, limits = self._process.resident().anonymous, self._limits
        self._anonymous.see(anonymous)
        if limits.grouped is not None:
            self._cgroup_floor.see(limits.grouped)
        self._check_fast_growth(anonymous if limits.grouped is None else limits.grouped)
        if self._shares_memory:
            self._read_shared(show=thorough)

    def _check_fast_growth(self, used: float) -> None:
        """Publish growth at once if the limit will be reached soon."""
        recorder, limits = self._context.recorder, self._limits
        if self._model != recorder.models.changes:
            self._model = recorder.models.changes
            for past in (self._anonymous, self._cgroup_floor, self._fast):
                past.begin()
        point = MemoryPoint(recorder.step, self._clock(), used)
        if self._fast.see(point, limits.left, limits.total, caching=self._context.training.epoch == 1):
            self._show_growth()
        if self._fast.is_steep and self._suspicion is not None:
            self._suspicion.is_steep = True

    def _evaluate_growth(self) -> None:
        """Evaluate the trend of the process's own pages, or of the whole cgroup against the cgroup's limit.

        Pages that DataLoader workers copy by touching reference counts show only in the cgroup.
        """
        step, now = self._context.recorder.step, self._clock()
        self._own_trends, grouped = self._anonymous.point(step, now), self._cgroup_floor.point(step, now)
        self._limit_trends = self._own_trends if self._limits.grouped is None else grouped
        self._show_growth()

    def _show_growth(self) -> None:
        fast = self._fast.growth
        left_s = soonest((*self._limit_trends, fast), self._limits.left)
        if self._gauges.show([(fast or self._own_trends[0], left_s)]) and self._suspicion is not None:
            self._suspicion.host = True

    def _show_pss(self) -> None:
        shows, self._shows_pss = self._shows_pss, self._context.hooks.level.value >= _ADVANCED
        if self._shows_pss or shows:
            size = _kib(read("/proc/self/smaps_rollup"), "Pss:") if self._shows_pss else nan  # 0.1 ms, with many mappings 5 ms
            self._context.set_gauge(catalog.MEMORY_HOST_PSS, size)

    def _read_shared(self, *, show: bool) -> None:
        """Check /dev/shm: a container has 64 MiB by default, and DataLoader workers that find it full die of a bus error."""
        usage = os.statvfs(self._shared)
        size, used = usage.f_blocks * usage.f_frsize, (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        if show and size:
            self._context.set_gauge(catalog.MEMORY_SHARED_SIZE, size)
            self._context.set_gauge(catalog.MEMORY_SHARED_USED, used)
        if used >= FULL * size > 0 and not self._full:
            self._full = True
            self._context.event(catalog.EVENT_SHARED_MEMORY_FULL, {"used": used, "size": size})
        self._full = self._full and used >= REARM_BELOW * size
