"""What a process knows of itself besides its environment: the reading half of :mod:`torchobs.identity`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["ProcessInfo", "exit_status", "parse_start_ticks", "this_process"]

_START_TICKS = 19


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The facts. ``start_ns`` is the process's start in Unix time (ns), and its first call's where there is no /proc.

    ``parent`` is the same for all children of one parent and for no child of another: the parent's pid, start and boot;
    ``own`` is what its children have as ``parent``. ``None`` where it cannot be known.
    """

    host: str
    pid: int
    start_ns: int
    parent: str | None
    argv0: str
    own: str | None = None


def this_process() -> ProcessInfo:
    """Return the facts of the process that asks: the same ones whenever it asks, new ones in a forked child."""
    return _facts(os.getpid(), sys.argv[0] if sys.argv else "")


def exit_status(code: object) -> int:
    """Return the status with which Python ends after ``sys.exit(code)``: 0 for None, 1 for a message on standard error."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def parse_start_ticks(stat: str) -> int:
    """Return the start of a process in clock ticks since boot: field 22 of ``/proc/<pid>/stat`` (proc(5)).

    Raises:
        ValueError: the text is no such line.
    """
    # The second field is the program's name in parentheses, and the name may hold spaces and parentheses itself.
    after_name = stat.rpartition(")")[2].split()
    if len(after_name) <= _START_TICKS:
        raise ValueError(f"no line of /proc/<pid>/stat: {stat[:40]!r}")
    return int(after_name[_START_TICKS])


@lru_cache(maxsize=1)
def _facts(pid: int, argv0: str) -> ProcessInfo:
    ticks = _start_ticks(pid)
    start_ns = time.time_ns() if ticks is None else _unix_time_ns(ticks)
    return ProcessInfo(os.uname().nodename, pid, start_ns, _key(os.getppid()), argv0, _key(pid))


def _key(pid: int) -> str | None:
    # Ticks and not Unix time: who reads the time of boot twice, around a correction of the clock, gets two answers, and
    # the ranks of one run read it at different times, restarted ones hours later.
    ticks = _start_ticks(pid)
    boot = _read("/proc/sys/kernel/random/boot_id")
    return None if ticks is None or boot is None else f"{pid}-{ticks}-{boot[:8]}"


def _start_ticks(pid: int) -> int | None:
    stat = _read(f"/proc/{pid}/stat")
    return None if stat is None else parse_start_ticks(stat)


def _read(path: str) -> str | None:
    """Return a file's text; ``None`` where there is none: another system, pid 0, a /proc mounted with ``hidepid``."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def _unix_time_ns(ticks: int) -> int:
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    looks = []
    for _ in range(3):  # the quickest counts: a thread may lose the processor between two clocks
        begun = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now = time.time_ns()
        ended = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        looks.append((ended - begun, now - ended))
    return min(looks)[1] + since_boot_ns
