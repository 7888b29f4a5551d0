"""Distance to an out-of-memory kill: by the limit of the cgroup, or of the machine.

A killed process writes nothing, so the flight file's last value has to be recent: near the limit this is read ten times a
second. Otherwise it is read as soon as 2 GB/s, what one thread can touch, could have used up the remaining memory.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.support.cgroup import hierarchy, read, reread_memory, tightest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.writer.series_table import Cell
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.memory.process_stats import Machine
    from torchobs.support.cgroup import Hierarchy, Memory

NEAR = 0.9
"""Share of a limit above which every round reads."""
MAX_RATE = 2e9
MAX_INTERVAL_S = 1.0


class MemoryCgroup:
    """Tightest memory cgroup of this process; searched again on request, since limits change and processes move."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        self._mounts = read(f"{root}/proc/self/mountinfo")
        self._membership = ""
        self._found: Hierarchy | None = None
        self.path = ""
        self.memory: Memory | None = None
        """Its memory at the last reading; ``None`` outside of any cgroup"""

    def find(self) -> None:
        """Find this process's cgroups and the tightest of them."""
        membership = read(f"{self._root}/proc/self/cgroup")
        if membership != self._membership:
            self._membership = membership
            self._found = hierarchy(membership, self._mounts, "memory", self._root)
        self.path, self.memory = (tightest(self._found, self._root) if self._found else None) or ("", None)

    def read_again(self) -> None:
        """Read the same group again."""
        if self._found and self.memory is not None:
            self.memory = reread_memory(self.path, self.memory, v2=self._found.v2, root=self._root)


class MemoryLimits:
    """Publishes ``torchobs.memory.context.utilization`` and counts OOM kills."""

    def __init__(self, writer: FlightWriter, machine: Callable[[], Machine | None], root: str = "") -> None:
        self._writer, self._machine = writer, machine
        self._cgroup = MemoryCgroup(root) if sys.platform == "linux" else None
        self._cells: dict[str, Cell | None] = {}
        self._counted: tuple[str, int] | None = None
        self._due = 0.0
        self.left: float | None = None
        """Bytes to the nearest limit"""
        self.total: float | None = None
        """That limit in bytes"""
        self.grouped: float | None = None
        """Bytes that count towards it, if it is the cgroup's limit"""

    def due(self) -> bool:
        """Return True if it is time to read again."""
        return time.monotonic() >= self._due

    def update(self, *, thorough: bool = False) -> None:
        """Read both limits. ``thorough``: search the tightest cgroup again."""
        machine = self._machine()
        limits = [
            headroom for headroom in (self._of_group(machine, thorough=thorough), _of_machine(machine)) if headroom is not None
        ]
        for headroom in limits:
            self._show(headroom)
        nearest = min(limits, default=None)
        self.left, self.total = (nearest.left, nearest.total) if nearest else (None, None)
        self.grouped = nearest.total - nearest.left if nearest and nearest.limit == "cgroup" else None
        delays = [(headroom.left - (1 - NEAR) * headroom.total) / MAX_RATE for headroom in limits]
        self._due = time.monotonic() + min([MAX_INTERVAL_S, *delays])

    def _of_group(self, machine: Machine | None, *, thorough: bool) -> _Headroom | None:
        cgroup = self._cgroup
        if cgroup is None:
            return None
        if thorough:
            cgroup.find()
        elif cgroup.memory is not None and cgroup.memory.limit is not None:
            cgroup.read_again()
        if cgroup.memory is None:
            return None
        self._count(cgroup.path, cgroup.memory.oom_kills)
        return _of_memory(cgroup.memory, machine)

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

    def _show(self, headroom: _Headroom) -> None:
        if headroom.limit not in self._cells:
            self._cells[headroom.limit] = self._writer.table.cell(catalog.MEMORY_HOST_UTILIZATION, {"limit": headroom.limit})
        cell = self._cells[headroom.limit]
        if cell is not None:
            cell.set(1.0 - headroom.left / headroom.total)


class _Headroom(NamedTuple):
    """Bytes left to a limit including usable swap, the limit in bytes, and its name."""

    left: float
    total: float
    limit: str


def _of_machine(machine: Machine | None) -> _Headroom | None:
    return None if machine is None else _Headroom(machine.left, machine.total + machine.swap_total, "machine")


def _of_memory(memory: Memory, machine: Machine | None) -> _Headroom | None:
    if memory.limit is None or memory.left is None or not memory.limit:
        return None
    swap_total, swap_free = (machine.swap_total, machine.swap_free) if machine is not None else (0, 0)
    swap_limit = swap_total if memory.swap_limit is None else min(memory.swap_limit, swap_total)
    swap_left = min(max(swap_limit - (memory.swap or 0), 0), swap_free)
    return _Headroom(memory.left + swap_left, memory.limit + swap_limit, "cgroup")
