"""Facts of a process outside its environment: host, pid, start time, parent."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache

from torchobs.support.cgroup import read

_START_TICKS = 19


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Facts of a process. ``start_ns``: its start in Unix time (ns), or the time of the first call without /proc.

    ``parent`` identifies the parent among all processes: its pid, start and boot; ``own`` is what the process's children have
    as ``parent``. ``None``: unknown.
    """

    host: str
    pid: int
    start_ns: int
    parent: str | None
    argv0: str
    own: str | None = None


def this_process() -> ProcessInfo:
    """Return the facts of the calling process: the same at every call, new ones in a forked child."""
    return _facts(os.getpid(), sys.argv[0] if sys.argv else "")


def begun_ms() -> int | None:
    """Return when this process began, in Unix time (ms); None in an interactive interpreter, which may have been idle since."""
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    return None if interactive else this_process().start_ns // 1_000_000


def boot_id() -> bytes:
    """Return the 16-byte random id of this boot; zeros where the system has none."""
    try:
        return bytes.fromhex(read("/proc/sys/kernel/random/boot_id").strip().replace("-", "")) or bytes(16)
    except ValueError:
        return bytes(16)


def exit_status(code: object) -> int:
    """Return Python's exit status after ``sys.exit(code)``: 0 for None, 1 for a message on standard error."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def parse_start_ticks(stat: str) -> int:
    """Return the start of a process in clock ticks since boot: field 22 of ``/proc/<pid>/stat`` (proc(5)).

    Raises:
        ValueError: the text is not such a line.
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
    # Ticks and not Unix time: the boot time read before and after a correction of the clock differs, and
    # the ranks of one run read it at different times, restarted ones hours later.
    ticks, boot = _start_ticks(pid), boot_id()
    return f"{pid}-{ticks}-{boot.hex()[:8]}" if ticks is not None and any(boot) else None


def _start_ticks(pid: int) -> int | None:
    stat = read(f"/proc/{pid}/stat")  # nothing on another system, of pid 0, and in a /proc mounted with `hidepid`
    return parse_start_ticks(stat) if stat else None


def _unix_time_ns(ticks: int) -> int:
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    readings = []
    for _ in range(3):  # the quickest one counts: a thread may be preempted between two clocks
        started = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now = time.time_ns()
        ended = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        readings.append((ended - started, now - ended))
    return min(readings)[1] + since_boot_ns
