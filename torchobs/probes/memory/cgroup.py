"""The container, from inside: what the rank's control groups say of memory, CPU and pressure.

An exporter beside the trainer sees neither its processes nor its cgroup, so the rank's own sampler thread reads them, every
ten seconds, ten files. OOM kills and the nearness of the limit are asked for more often (``limits``).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.probes.memory.memory_limits import Groups
from torchobs.support.cgroup import cpu_of, hierarchy, pressure, read

if TYPE_CHECKING:
    from torchobs.catalog import Metric
    from torchobs.probes.core.context import ProbeContext


class CgroupProbe:
    """Reads ``/sys/fs/cgroup``. Outside of any group, and where a controller is not in use, series are absent."""

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
            self._groups = Groups(self._root)
            membership, mounts = (read(f"{self._root}/proc/self/{name}") for name in ("cgroup", "mountinfo"))
            self._cpu = hierarchy(membership, mounts, "cpu", self._root)
            unified = hierarchy(membership, mounts, "", self._root)
            # only v2's root is without it; the pressure there is the machine's
            inside = unified and os.path.exists(f"{self._root}{unified.levels[0]}/cgroup.events")
            self._pressure = unified.levels[0] if unified and inside else None
            self.observe()  # what has happened before is not this rank's: counters begin at 0 here

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: nothing was put anywhere."""

    def observe(self) -> None:
        """Look at everything."""
        if self._found:
            self._show_memory()
            self._show_cpu()
            self._show_pressure()

    def _show_memory(self) -> None:
        self._groups.find()
        memory = self._groups.memory
        if memory is not None:
            self._set(catalog.CGROUP_MEMORY_WORKING_SET, memory.working_set)
            self._set(catalog.CGROUP_MEMORY_LIMIT, memory.limit)
            self._set(catalog.CGROUP_MEMORY_PEAK, memory.peak)
            self._set(catalog.CGROUP_MEMORY_SWAP, memory.swap)

    def _show_cpu(self) -> None:
        cpu = cpu_of(self._cpu, self._root) if self._cpu else None
        if cpu is not None:
            self._set(catalog.CGROUP_CPU_LIMIT, cpu.limit)
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

    def _set(self, metric: Metric, value: float | None) -> None:
        cell = self._context.writer.table.cell(metric, {}) if value is not None else None
        if cell is not None and value is not None:
            cell.set(float(value))

    def _count(self, metric: Metric, total: float, **attributes: str) -> None:
        """Add what a total of the kernel's has grown by; it may begin anew where another group is the tightest now."""
        key = (metric.name, *attributes.values())
        grown, self._totals[key] = total - self._totals.get(key, total), total
        cell = self._context.writer.table.cell(metric, attributes)
        if cell is not None and grown > 0:
            cell.add(grown)
