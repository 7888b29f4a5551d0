"""Reads the control groups of this process, v1 and v2, from ``/proc`` and ``/sys/fs/cgroup``.

A group's directory follows from two texts (cgroups(7), proc(5)): ``/proc/self/cgroup`` names its path in each hierarchy,
``/proc/self/mountinfo`` where the hierarchy, or a part of it, is mounted. In a container the path may lead outside the mount;
then the mount's root is the container's own group. On a hybrid system v1 controllers take precedence. Limits nest: all groups
from the process's up to the mount are read, and the one with the least memory left counts.

``root`` is put before every path, so that a recorded tree reads like this machine's.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_NO_LIMIT = 1 << 62
"""v1 expresses "no limit" by a number near 2^63."""
_MAX_NUMBER_LENGTH = 40
"""Characters that a number and the spaces before it take at most."""


class Hierarchy(NamedTuple):
    """One controller's groups of this process, innermost first."""

    v2: bool
    levels: tuple[str, ...]


class Memory(NamedTuple):
    """A group's memory in bytes; ``None``: no limit, or not reported.

    ``working_set`` is the kubelet's: usage without inactive file pages. ``pinned`` cannot be reclaimed without swap: usage
    without any file pages and reclaimable slabs, since a data set that is read repeatedly makes its pages active.
    """

    usage: int
    working_set: int
    pinned: int
    limit: int | None
    swap: int | None
    swap_limit: int | None
    peak: int | None
    oom_kills: int | None

    @property
    def left(self) -> int | None:
        """Bytes left to the limit when everything reclaimable has been reclaimed."""
        return None if self.limit is None else max(self.limit - self.pinned, 0)


class Cpu(NamedTuple):
    """A group's CPU: quota in cores (``None``: none); periods and seconds, throttled and used, since the group exists."""

    limit: float | None
    periods: int
    throttled: int
    throttled_s: float
    used_s: float | None = None
    """``None``: not reported"""


class _Mount(NamedTuple):
    root: str
    point: str
    v2: bool
    controllers: frozenset[str]


def hierarchy(membership: str, mounts: str, controller: str, root: str = "") -> Hierarchy | None:
    """Return the process's groups under ``controller``; ``""`` is v2 itself, which has the pressure files.

    ``membership`` and ``mounts`` are the texts of ``/proc/self/cgroup`` and ``/proc/self/mountinfo``.
    """
    paths = {name: path for names, path in map(_membership, membership.splitlines()) for name in names}
    for mount in filter(None, map(_mount, mounts.splitlines())):
        path = paths.get("" if mount.v2 else controller)
        wanted = mount.v2 and controller not in paths if controller else mount.v2
        if path is not None and (wanted or (not mount.v2 and controller in mount.controllers)):
            levels = tuple(level for level in _levels(mount, path) if os.path.isdir(root + level))
            return Hierarchy(mount.v2, levels) if levels else None
    return None


def of_process(controller: str, root: str = "") -> Hierarchy | None:
    """Return the process's groups under ``controller`` as ``/proc`` has them now."""
    membership, mounts = (read(f"{root}/proc/self/{name}") for name in ("cgroup", "mountinfo"))
    return hierarchy(membership, mounts, controller, root)


def memory_of(level: str, *, v2: bool, root: str = "") -> Memory | None:
    """Read one group's memory, in 0.1 ms; ``None`` for v2's root, and for a group without the controller."""
    names, place = _V2 if v2 else _V1, f"{root}{level}"
    usage = number(read(f"{place}/{names.usage}"))
    if usage is None:
        return None
    stat = read(f"{place}/memory.stat")
    inactive, active, slabs = (field(stat, name) or 0 for name in (names.inactive, names.active, "slab_reclaimable "))
    limits = number(read(f"{place}/{names.limit}")), field(stat, "hierarchical_memory_limit ")
    limit = min((value for value in limits if value is not None and value < _NO_LIMIT), default=None)
    if v2:
        swap, swap_limit = number(read(f"{place}/memory.swap.current")), number(read(f"{place}/memory.swap.max"))
    else:
        swap, both = field(stat, "total_swap "), number(read(f"{place}/memory.memsw.limit_in_bytes"))
        swap_limit = None if both is None or both >= _NO_LIMIT or limit is None else max(both - limit, 0)
    return Memory(
        usage,
        working_set=max(usage - inactive, 0),
        pinned=max(usage - inactive - active - slabs, 0),
        limit=limit,
        swap=swap,
        swap_limit=swap_limit,
        peak=number(read(f"{place}/{names.peak}")),
        oom_kills=field(read(f"{place}/{names.events}"), "oom_kill "),
    )


def tightest(groups: Hierarchy, root: str = "") -> tuple[str, Memory] | None:
    """Return the group with the least memory left, else the innermost one with any figures, and its memory.

    v1's root group without a limit is the machine, which does not count; v2's has no figures.
    """
    entries = [(level, memory) for level in groups.levels if (memory := memory_of(level, v2=groups.v2, root=root)) is not None]
    limited = [entry for entry in entries if entry[1].limit is not None]
    if limited:
        return min(limited, key=lambda entry: entry[1].left or 0)
    inner = [entry for entry in entries if groups.v2 or entry[0] != groups.levels[-1]]
    return inner[0] if inner else None


def cpu_of(groups: Hierarchy, root: str = "") -> Cpu | None:
    """Return the CPU figures of the group with the smallest quota; ``None`` if none has one."""
    quotas = {level: quota for level in groups.levels if (quota := _quota(level, v2=groups.v2, root=root)) is not None}
    if not quotas:
        return None
    level = min(quotas, key=lambda name: quotas[name])
    stat = read(f"{root}{level}/cpu.stat")
    name, unit = ("throttled_usec ", 1e6) if groups.v2 else ("throttled_time ", 1e9)
    throttled_s = (field(stat, name) or 0) / unit
    # v1 has it where cpu and cpuacct are mounted together, as they mostly are
    used = field(stat, "usage_usec ") if groups.v2 else number(read(f"{root}{level}/cpuacct.usage"))
    used_s = None if used is None else used / unit
    return Cpu(quotas[level], field(stat, "nr_periods ") or 0, field(stat, "nr_throttled ") or 0, throttled_s, used_s)


def pressure(text: str) -> dict[str, float]:
    """Return the seconds in which ``some`` and ``full`` of the tasks stalled, from a PSI file (Linux, accounting/psi)."""
    stalled = {}
    for line in text.splitlines():
        share, *fields = line.split()
        total = next((number(field[6:]) for field in fields if field.startswith("total=")), None)
        if total is not None:
            stalled[share] = total / 1e6
    return stalled


def read(path: str) -> str:
    """Return a file's text; ``""`` if it is missing or unreadable (a disabled controller: EOPNOTSUPP)."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def unescaped(path: str) -> str:
    """Undo the octal escapes in a path of ``/proc/self/mountinfo`` (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), path)


def number(text: str) -> int | None:
    """Return a file's number; ``None`` for ``max``, an empty text and anything else."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def field(text: str, name: str) -> int | None:
    """Return the number after ``name`` at the start of a line. Searched: splitting 60 lines for three takes 50 µs."""
    begin = 0 if text.startswith(name) else text.find(f"\n{name}") + 1
    if not begin and not text.startswith(name):
        return None
    words = text[begin + len(name) : begin + len(name) + _MAX_NUMBER_LENGTH].split(None, 1)
    return number(words[0]) if words else None


class _Names(NamedTuple):
    usage: str
    limit: str
    peak: str
    events: str
    inactive: str
    active: str


_V2 = _Names("memory.current", "memory.max", "memory.peak", "memory.events", "inactive_file ", "active_file ")
_V1 = _Names(
    "memory.usage_in_bytes",
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "total_inactive_file ",
    "total_active_file ",
)


def _membership(line: str) -> tuple[list[str], str]:
    """Return a line's controllers (v2's is ``""``) and path."""
    _, names, path = [*line.split(":", 2), "", ""][:3]
    return names.split(","), path


def _mount(line: str) -> _Mount | None:
    left, _, right = line.partition(" - ")
    fields, (kind, _, options) = left.split(), [*right.split(None, 2), "", "", ""][:3]
    if kind not in {"cgroup", "cgroup2"} or len(fields) < 5:  # noqa: PLR2004  # up to the mount point
        return None
    return _Mount(unescaped(fields[3]), unescaped(fields[4]), kind == "cgroup2", frozenset(options.split(",")))


def _levels(mount: _Mount, path: str) -> list[str]:
    """Return the directories from the path's up to the mount's, including ones that may not exist."""
    root = mount.root.rstrip("/")
    inside = path[len(root) :] if path == root or path.startswith(f"{root}/") else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:  # outside this process's cgroup namespace
        parts = []
    return ["/".join([mount.point.rstrip("/"), *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _quota(level: str, *, v2: bool, root: str) -> float | None:
    """Return a group's quota in cores."""
    if v2:
        quota, period = [*map(number, read(f"{root}{level}/cpu.max").split()), None, None][:2]
    else:
        quota, period = (number(read(f"{root}{level}/cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return quota / period if quota and period else None
