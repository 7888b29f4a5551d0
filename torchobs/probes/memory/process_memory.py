"""Memory of the process, its children, the machine and /dev/shm: growth, and distance to the limits.

The sampler thread reads the main values once a second (30 µs; 90 µs in a cgroup with a limit), ten times a second near a
limit, and all of them in ``observe`` (0.4 ms, no file longer than 20 µs). The proportional set size, for which the kernel
walks all mappings (8 ms with torch loaded), needs the ``advanced`` level.
"""

from __future__ import annotations

import os
import sys
import time
from math import nan
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.growth import FastWindow, MemoryPoint
from torchobs.probes.memory.growth import Floor, GrowthGauges, GrowthVerdict
from torchobs.probes.memory.memory_limits import MemoryLimits
from torchobs.probes.memory.process_stats import ProcessStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.detect.growth import Growth
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.memory.leak import Suspicion

    Trends = tuple[Growth | None, Growth | None]

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

        ``suspicion``: what the leak probe is told by.
        """
        self._suspicion = suspicion
        self._root, self._shared, self._clock = root, shared, clock
        self._shows_pss = self._full = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context = context
        self._process = ProcessStats()
        self._limits = MemoryLimits(context.writer, self._process.machine, self._root)
        self._anonymous, self._cgroup_floor, self._fast = Floor(), Floor(), FastWindow()
        self._own_trends: Trends = (None, None)
        self._limit_trends: Trends = (None, None)
        self._model = context.recorder.models.changes
        self._gauges = GrowthGauges(context, "host")
        self._shares_memory = sys.platform == "linux" and os.path.ismount(self._shared)
        self._limits.update(thorough=True)  # counters exist at 0 from here on

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: there are no hooks."""

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
        machine, children, files = process.machine(), process.children(), process.files()
        self._context.set_gauge(catalog.MEMORY_HOST_AVAILABLE, machine.available if machine else None)
        self._context.set_gauge(catalog.MEMORY_HOST_CHILDREN_RSS, children.rss if children else None)
        self._context.set_gauge(catalog.PROCESS_CHILDREN, children.processes if children else None)
        self._context.set_gauge(catalog.PROCESS_THREADS, process.threads())
        self._context.set_gauge(catalog.PROCESS_OPEN_FILES, files.open)
        self._context.set_gauge(catalog.PROCESS_MAX_FILES, files.limit)
        self._context.yield_gil()
        self._evaluate_growth()

    def _read(self, *, thorough: bool) -> None:
        self._limits.update(thorough=thorough)
        own, limits = self._process.resident().anonymous, self._limits
        self._anonymous.see(own)
        if limits.grouped is not None:
            self._cgroup_floor.see(limits.grouped)
        self._check_fast_growth(own if limits.grouped is None else limits.grouped)
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
        if (
            limits.left is not None
            and limits.total is not None
            and self._fast.see(point, limits.left, limits.total, caching=self._context.training.epoch == 1)
        ):
            self._show_growth()

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
        told = self._gauges.show([GrowthVerdict(fast or self._own_trends[0], (*self._limit_trends, fast), self._limits.left)])
        if told and self._suspicion is not None:
            self._suspicion.host = True

    def _show_pss(self) -> None:
        shows, self._shows_pss = self._shows_pss, self._context.hooks.level.value >= _ADVANCED
        if self._shows_pss or shows:
            self._context.set_gauge(catalog.MEMORY_HOST_PSS, self._process.proportional() if self._shows_pss else nan)

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
