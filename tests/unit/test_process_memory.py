"""This process in numbers, and its distance to the limits of its memory."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.rank_files import File
from tests.unit.test_cgroup import GIB, V2_MOUNT, plant, v2_group
from torchobs import catalog
from torchobs.flight.reader import open_path
from torchobs.probes.process_memory import Machine, MemoryLimits, ProcessStats, parse_machine

if TYPE_CHECKING:
    from pathlib import Path


MIB = 1024**2
MEMINFO = """MemTotal:       24682496 kB
MemFree:        19531200 kB
MemAvailable:   23655936 kB
SwapCached:            0 kB
SwapTotal:       2097148 kB
SwapFree:        1048576 kB
"""
GRANDCHILD = """
import subprocess, sys
code = "held = b'x' * (40 << 20); print(flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(flush=True)
input()
child.communicate(b"\\n")
"""


def test_children_of_children_are_found() -> None:
    """A worker that a fork server started holds memory as any other does; beside them there may be a server of the tests."""
    process = ProcessStats()

    def family() -> tuple[int, int]:
        children = process.children()
        assert children is not None
        return children

    before, before_bytes = family()
    with subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        number, size = family()
        child.communicate(b"\n")
    assert number - before == 2
    assert size - before_bytes > 40 * MIB
    assert family()[0] == before


def test_meminfo_is_read_in_bytes() -> None:
    """Available is what the kernel estimates."""
    machine = parse_machine(MEMINFO)
    assert machine == Machine(24682496 * 1024, 23655936 * 1024, 2097148 * 1024, 1048576 * 1024)
    assert machine.left == (23655936 + 1048576) * 1024
    assert parse_machine("MemTotal: 1 kB\nMemAvailable: 1 kB\n") == Machine(1024, 1024, 0, 0)


MACHINE = Machine(total=64 * GIB, available=48 * GIB, swap_total=0, swap_free=0)


class Rank:
    """A flight file and a recorded tree."""

    def __init__(self, tmp_path: Path, flight_dir: Path, machine: Machine = MACHINE, *, container: bool = True) -> None:
        self.tree, self.file = tmp_path / "tree", File(flight_dir)
        self.membership("/" if container else None)
        self.machine = machine
        self.limits = MemoryLimits(self.file.writer, lambda: self.machine, str(self.tree))

    def membership(self, path: str | None) -> None:
        """Set which group the process is in."""
        plant(self.tree, {"proc/self/cgroup": f"0::{path}\n" if path else "", "proc/self/mountinfo": V2_MOUNT.format(root="/")})

    def group(self, **files: object) -> None:
        """Set the group's files; 1.75 GiB of its usage can be given back."""
        plant(self.tree, v2_group("", **files))  # type: ignore[arg-type]

    def look(self, *, thorough: bool = True) -> dict[str, float]:
        """Look, and return what the file holds of it."""
        self.limits.update(thorough=thorough)
        with closing(open_path(str(self.file.save().path))) as file:
            points = file.read().points
        names = {catalog.MEMORY_HOST_UTILIZATION.name, catalog.CGROUP_MEMORY_OOM_KILLS.name}
        names.add(catalog.CGROUP_MEMORY_LAST_OOM_KILL.name)
        shown = [(series, value) for series, value in points if series.name in names]
        return {str(dict(series.attributes).get("limit", series.name)): float(value) for series, value in shown}  # type: ignore[arg-type]


SWAPPING = Machine(64 * GIB, 16 * GIB, swap_total=8 * GIB, swap_free=4 * GIB)
KILLS = {"torchobs.cgroup.memory.oom_kills": 0.0}


@pytest.mark.parametrize(
    ("machine", "usage", "shares", "left"),
    [
        (MACHINE, 5.75, {"cgroup": 0.5, "machine": 0.25, **KILLS}, (4, 4)),
        (MACHINE, None, {"machine": 0.25}, (48, None)),
        (MACHINE, 0.0, {"machine": 0.25, **KILLS}, (48, None)),
        (SWAPPING, 9.75, {"cgroup": 0.75, "machine": 1 - 20 / 72, **KILLS}, (4, 12)),
    ],
    ids=["file pages can be given back", "no cgroup", "a group without a limit", "swap is room"],
)
def test_the_share_of_each_limit(
    tmp_path: Path, flight_dir: Path, machine: Machine, usage: float | None, shares: object, left: tuple[int | None, ...]
) -> None:
    """Promise: what cannot be given back counts, what may be swapped out is room; no series speaks of what there is not."""
    rank = Rank(tmp_path, flight_dir, machine, container=usage is not None)
    if usage is not None:
        rank.group(**({"limit": str(8 * GIB), "usage": int(usage * GIB)} if usage else {}))
    assert rank.look() == pytest.approx(shares)
    assert [size and size / GIB for size in (rank.limits.left, rank.limits.grouped)] == [*left]


def test_kills_are_counted_from_the_start_on_and_dated(tmp_path: Path, flight_dir: Path) -> None:
    """The two kills before are not this rank's; the next one is, even in a quick look."""
    rank = Rank(tmp_path, flight_dir)
    rank.group(limit=str(8 * GIB))
    first = rank.look()
    assert first["torchobs.cgroup.memory.oom_kills"] == 0
    assert "torchobs.cgroup.memory.last_oom_kill.timestamp" not in first
    plant(rank.tree, {"sys/fs/cgroup/memory.events": "oom 3\noom_kill 3\n"})
    second = rank.look(thorough=False)
    assert second["torchobs.cgroup.memory.oom_kills"] == 1
    assert second["torchobs.cgroup.memory.last_oom_kill.timestamp"] > 0
