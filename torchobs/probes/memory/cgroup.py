"""Memory, CPU and pressure of the rank's control groups, read from inside the container.

An exporter in another container sees neither the trainer's processes nor its cgroup, so the rank's sampler thread reads ten
files every ten seconds. OOM kills and memory near the limit are checked more often (:mod:`.memory_limits`).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.probes.memory.memory_limits import MemoryCgroup
from torchobs.support.cgroup import cpu_of, hierarchy, pressure, read

if TYPE_CHECKING:
    from torchobs.catalog import Metric
    from torchobs.probes.core.context import ProbeContext


class CgroupProbe:
    """Reads ``/sys/fs/cgroup``. Series are absent outside of any group and where a controller is not in use."""

    name = "cgroup"

    def __init__(self, root: str = "") -> None:
        """``root`` is put before every path."""
        self._root = root
        self._totals: dict[tuple[str, ...], float] = {}

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context = context
        self._totals.clear()
        self._found = sys.platform == "linux"
        if self._found:
            self._cgroup = MemoryCgroup(self._root)
            membership, mounts = (read(f"{self._root}/proc/self/{name}") for name in ("cgroup", "mountinfo"))
            self._cpu = hierarchy(membership, mounts, "cpu", self._root)
            unified = hierarchy(membership, mounts, "", self._root)
            # only v2's root lacks this file; pressure there is the machine's
            inside = unified and os.path.exists(f"{self._root}{unified.levels[0]}/cgroup.events")
            self._pressure = unified.levels[0] if unified and inside else None
            self.observe()  # counters start at 0 here: earlier events are not this rank's

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: there are no hooks."""

    def observe(self) -> None:
        """Read and publish all series."""
        if self._found:
            self._show_memory()
            self._show_cpu()
            self._show_pressure()

    def _show_memory(self) -> None:
        self._cgroup.find()
        memory = self._cgroup.memory
        if memory is not None:
            self._context.set_gauge(catalog.CGROUP_MEMORY_WORKING_SET, memory.working_set)
            self._context.set_gauge(catalog.CGROUP_MEMORY_LIMIT, memory.limit)
            self._context.set_gauge(catalog.CGROUP_MEMORY_PEAK, memory.peak)
            self._context.set_gauge(catalog.CGROUP_MEMORY_SWAP, memory.swap)

    def _show_cpu(self) -> None:
        cpu = cpu_of(self._cpu, self._root) if self._cpu else None
        if cpu is not None:
            self._context.set_gauge(catalog.CGROUP_CPU_LIMIT, cpu.limit)
            self._count(catalog.CGROUP_CPU_PERIODS, cpu.periods)
            self._count(catalog.CGROUP_CPU_THROTTLED_PERIODS, cpu.throttled)
            self._count(catalog.CGROUP_CPU_THROTTLED_TIME, cpu.throttled_s)

    def _show_pressure(self) -> None:
        if self._pressure is None:
            return
        for resource in catalog.RESOURCE.values:
            found = pressure(read(f"{self._root}{self._pressure}/{resource}.pressure"))
            for waiting, seconds in found.items():
                if waiting in catalog.WAITING.values:
                    self._count(catalog.CGROUP_PRESSURE_TIME, seconds, resource=resource, waiting=waiting)

    def _count(self, metric: Metric, total: float, **attributes: str) -> None:
        """Add the growth of a kernel total; it may restart where another group has become the tightest."""
        key = (metric.name, *attributes.values())
        grown, self._totals[key] = total - self._totals.get(key, total), total
        self._context.count(metric, max(grown, 0), attributes)
