"""How near this process is to being killed for the memory it takes: by its cgroup's limit, or by the machine's.

Who is killed for it writes nothing any more, so what the flight file said last has to do: near the limit this is asked ten
times a second. Until then a look is due as soon as 2 GB/s could have used up the room, which is what one thread touches.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.support.cgroup import again, hierarchy, read, tightest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.writer.series_table import Cell
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.memory.process_stats import Machine
    from torchobs.support.cgroup import Hierarchy, Memory

NEAR = 0.9
"""Share of a limit from which on every round looks."""
FASTEST = 2e9
LONGEST_S = 1.0


class Groups:
    """The tightest memory cgroup of this process: found anew when it is asked to, for limits change and processes move."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        self._mounts = read(f"{root}/proc/self/mountinfo")
        self._membership = ""
        self._found: Hierarchy | None = None
        self.path = ""
        self.memory: Memory | None = None
        """Its memory when it was looked at last; ``None`` outside of any"""

    def find(self) -> None:
        """Find out where this process is now, and which of its groups is the tightest."""
        membership = read(f"{self._root}/proc/self/cgroup")
        if membership != self._membership:
            self._membership = membership
            self._found = hierarchy(membership, self._mounts, "memory", self._root)
        self.path, self.memory = (tightest(self._found, self._root) if self._found else None) or ("", None)

    def look(self) -> None:
        """Look at the same group again."""
        if self._found and self.memory is not None:
            self.memory = again(self.path, self.memory, v2=self._found.v2, root=self._root)


class MemoryLimits:
    """Keeps ``torchobs.memory.context.utilization`` and the OOM kills."""

    def __init__(self, writer: FlightWriter, machine: Callable[[], Machine | None], root: str = "") -> None:
        self._writer, self._machine = writer, machine
        self._groups = Groups(root) if sys.platform == "linux" else None
        self._cells: dict[str, Cell | None] = {}
        self._counted: tuple[str, int] | None = None
        self._due = 0.0
        self.left: float | None = None
        """Bytes to the nearest limit"""
        self.total: float | None = None
        """That limit"""
        self.grouped: float | None = None
        """Bytes that count towards it, if it is the cgroup's"""

    def due(self) -> bool:
        """Return True if it is time to look again."""
        return time.monotonic() >= self._due

    def look(self, *, thorough: bool = False) -> None:
        """Look at both limits. ``thorough``: find out, too, which cgroup is the tightest now."""
        machine = self._machine()
        rooms = [room for room in (self._of_group(machine, thorough=thorough), _of_machine(machine)) if room is not None]
        for room in rooms:
            self._show(room)
        nearest = min(rooms, default=None)
        self.left, self.total = (nearest.left, nearest.total) if nearest else (None, None)
        self.grouped = nearest.total - nearest.left if nearest and nearest.limit == "cgroup" else None
        delays = [(room.left - (1 - NEAR) * room.total) / FASTEST for room in rooms]
        self._due = time.monotonic() + min([LONGEST_S, *delays])

    def _of_group(self, machine: Machine | None, *, thorough: bool) -> _Room | None:
        groups = self._groups
        if groups is None:
            return None
        if thorough:
            groups.find()
        elif groups.memory is not None and groups.memory.limit is not None:
            groups.look()
        if groups.memory is None:
            return None
        self._count(groups.path, groups.memory.oom_kills)
        return _of_memory(groups.memory, machine)

    def _count(self, path: str, kills: int | None) -> None:
        """Count the kills since the start: the group may be older than the process."""
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

    def _show(self, room: _Room) -> None:
        if room.limit not in self._cells:
            self._cells[room.limit] = self._writer.table.cell(catalog.MEMORY_HOST_UTILIZATION, {"limit": room.limit})
        cell = self._cells[room.limit]
        if cell is not None:
            cell.set(1.0 - room.left / room.total)


class _Room(NamedTuple):
    """Bytes left to a limit, with the swap that may be used; the limit; whose it is."""

    left: float
    total: float
    limit: str


def _of_machine(machine: Machine | None) -> _Room | None:
    return None if machine is None else _Room(machine.left, machine.total + machine.swap_total, "machine")


def _of_memory(memory: Memory, machine: Machine | None) -> _Room | None:
    if memory.limit is None or memory.left is None or not memory.limit:
        return None
    swap_total, swap_free = (machine.swap_total, machine.swap_free) if machine is not None else (0, 0)
    swap_limit = swap_total if memory.swap_limit is None else min(memory.swap_limit, swap_total)
    swap_left = min(max(swap_limit - (memory.swap or 0), 0), swap_free)
    return _Room(memory.left + swap_left, memory.limit + swap_limit, "cgroup")
