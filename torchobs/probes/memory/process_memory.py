"""The process's memory, its children, the machine's and the shared memory: what grows, what is near its limit.

The sampler thread looks once a second (30 µs, 90 µs in a cgroup with a limit), ten times a second near a limit, and at
everything in ``observe`` (0.4 ms, no file longer than 20 µs). The proportional set, for which the kernel walks all mappings
(8 ms with torch loaded), is for the ``advanced`` level.
"""

from __future__ import annotations

import os
import sys
import time
from math import nan
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.growth import FastWindow, MemoryPoint
from torchobs.probes.memory.growth import Floor, GrowthGauges, Judged
from torchobs.probes.memory.memory_limits import MemoryLimits
from torchobs.probes.memory.process_stats import ProcessStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.catalog import Metric
    from torchobs.detect.growth import Growth
    from torchobs.probes.core.context import ProbeContext

    Trends = tuple[Growth | None, Growth | None]

SHARED = "/dev/shm"  # noqa: S108  # looked at, not written to
FULL, ROOM_AGAIN = 0.9, 0.8
"""Shares of the shared memory from which on an event tells, and below which the next one may."""
_ADVANCED = 2


class MemoryProbe:
    """Reads ``/proc`` and the memory cgroup, or psutil."""

    name = "memory"

    def __init__(self, root: str = "", shared: str = SHARED, clock: Callable[[], float] = time.monotonic) -> None:
        """``root`` is put before the paths of ``/proc`` and ``/sys/fs/cgroup`` in which cgroups are described."""
        self._root, self._shared, self._clock = root, shared, clock
        self._shows_pss = self._full = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context = context
        self._process = ProcessStats()
        self._limits = MemoryLimits(context.writer, self._process.machine, self._root)
        self._anonymous, self._grouped, self._fast = Floor(), Floor(), FastWindow()
        self._own: Trends = (None, None)
        self._against: Trends = (None, None)
        self._model = context.recorder.models.changes
        self._gauges = GrowthGauges(context, "host")
        self._shares_memory = sys.platform == "linux" and os.path.ismount(self._shared)
        self._limits.look(thorough=True)  # counters exist at 0 from here on

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: nothing was put anywhere."""

    def sample(self) -> None:
        """Look at what changes fast, when it is due."""
        if self._limits.due():
            self._look(thorough=False)

    def observe(self) -> None:
        """Look at everything."""
        process = self._process
        self._look(thorough=True)
        self._show(catalog.MEMORY_HOST_RSS, process.resident().all)
        self._show_pss()
        self._context.yield_gil()
        machine, children, files = process.machine(), process.children(), process.files()
        self._show(catalog.MEMORY_HOST_AVAILABLE, machine.available if machine else None)
        self._show(catalog.MEMORY_HOST_CHILDREN_RSS, children.rss if children else None)
        self._show(catalog.PROCESS_CHILDREN, children.processes if children else None)
        self._show(catalog.PROCESS_THREADS, process.threads())
        self._show(catalog.PROCESS_OPEN_FILES, files.open)
        self._show(catalog.PROCESS_MAX_FILES, files.limit)
        self._context.yield_gil()
        self._judge()

    def _look(self, *, thorough: bool) -> None:
        self._limits.look(thorough=thorough)
        own, limits = self._process.resident().anonymous, self._limits
        self._anonymous.see(own)
        if limits.grouped is not None:
            self._grouped.see(limits.grouped)
        self._look_ahead(own if limits.grouped is None else limits.grouped)
        if self._shares_memory:
            self._look_at_shared(show=thorough)

    def _look_ahead(self, used: float) -> None:
        """Say at once if what is in use will soon be all there is."""
        recorder, limits = self._context.recorder, self._limits
        if self._model != recorder.models.changes:
            self._model = recorder.models.changes
            for past in (self._anonymous, self._grouped, self._fast):
                past.begin()
        point = MemoryPoint(recorder.step, self._clock(), used)
        if limits.left is not None and limits.total is not None and self._fast.see(point, limits.left, limits.total):
            self._show_growth()

    def _judge(self) -> None:
        """Judge the trend of the process's own pages; against a cgroup's limit, that of the whole cgroup.

        Pages that a DataLoader's worker copies, because it counted a reference in them, show in the cgroup alone.
        """
        step, now = self._context.recorder.step, self._clock()
        self._own, grouped = self._anonymous.point(step, now), self._grouped.point(step, now)
        self._against = self._own if self._limits.grouped is None else grouped
        self._show_growth()

    def _show_growth(self) -> None:
        fast = self._fast.growth
        self._gauges.show([Judged(fast or self._own[0], (*self._against, fast), self._limits.left)])

    def _show_pss(self) -> None:
        shows, self._shows_pss = self._shows_pss, self._context.level >= _ADVANCED
        if self._shows_pss or shows:
            self._show(catalog.MEMORY_HOST_PSS, self._process.proportional() if self._shows_pss else nan)

    def _look_at_shared(self, *, show: bool) -> None:
        """64 MiB is what a container has by default, and a DataLoader's worker that finds it full dies of a bus error."""
        usage = os.statvfs(self._shared)
        size, used = usage.f_blocks * usage.f_frsize, (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        if show and size:
            self._show(catalog.MEMORY_SHARED_SIZE, size)
            self._show(catalog.MEMORY_SHARED_USED, used)
        if used >= FULL * size > 0 and not self._full:
            self._full = True
            self._context.writer.event(
                catalog.EVENT_SHARED_MEMORY_FULL.name, {"used": used, "size": size}, self._context.recorder.step
            )
        self._full = self._full and used >= ROOM_AGAIN * size

    def _show(self, metric: Metric, value: float | None) -> None:
        cell = self._context.writer.table.cell(metric, {}) if value is not None else None
        if cell is not None and value is not None:
            cell.set(float(value))
