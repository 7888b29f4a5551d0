"""Processes under a benchmark: what each takes, and a real exporter to ask."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.exporters import Program, start_program
from tests.support import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024**2
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process takes at one moment."""

    rss: int
    """bytes"""
    fds: int
    threads: int


def footprint(pid: int) -> Footprint:
    """Look at a process. Raises ``OSError`` when it is gone."""
    home = Path("/proc", str(pid))
    resident = int((home / "statm").read_text().split()[1]) * _PAGE_BYTES
    return Footprint(resident, sum(1 for _ in (home / "fd").iterdir()), sum(1 for _ in (home / "task").iterdir()))


def rss(pid: int) -> int:
    """Bytes of a process that are in memory. Raises ``OSError`` when it is gone."""
    return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * _PAGE_BYTES


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has taken, to the nanosecond.

    /proc/PID/stat counts ticks of 10 ms, of which an idle exporter takes one in a few seconds. The number of a process's own
    clock is as clock_getcpuclockid(3) of Linux makes it. Raises ``OSError`` when the process is gone.
    """
    return time.clock_gettime((~pid << 3) | 2)


def available() -> int:
    """Bytes of memory that are free, or would be if they were needed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@contextlib.contextmanager
def exporter(directory: Path, *arguments: str) -> Iterator[Program]:
    """Run the real program on a flight directory, until it answers and to the end of the ``with`` block."""
    with tempfile.TemporaryDirectory() as home:
        program = start_program(start, Path(home, "log"), free_port(), "--flight-dir", str(directory), *arguments)
        try:
            yield program
        finally:
            end(program.process)


def leave_in_order() -> None:
    """Have SIGTERM end this program as Ctrl-C does, so that no process that it started stays behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def end(process: subprocess.Popen[str]) -> None:
    """End a process as Ctrl-C does: an exporter then does not wait for its scrapers."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=15)


def start(*argv: str | Path, **options: object) -> subprocess.Popen[str]:
    """Start a program that nobody reads."""
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "text": True, **options}
    return subprocess.Popen(argv, **given)  # type: ignore[call-overload,no-any-return]  # as the tests' fixture does
