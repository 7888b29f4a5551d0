"""The processes of a benchmark: a real exporter, and what a process takes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.exporters import Program, start_program
from tests.support import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024**2


def rss(pid: int) -> int:
    """Bytes of a process that are in memory. Raises ``OSError`` when it is gone."""
    return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has taken, to the nanosecond.

    /proc/PID/stat counts ticks of 10 ms: an idle exporter takes one in a few seconds. The number of a process's own
    clock is as clock_getcpuclockid(3) of Linux makes it. Raises ``OSError`` when the process is gone.
    """
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def flight_directory() -> Iterator[Path]:
    """A directory on tmpfs, where there is one, as a rank would choose it; removed at the end of the ``with`` block."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="torchobs-bench-", dir=parent, ignore_cleanup_errors=True) as path:
        yield Path(path)


@contextlib.contextmanager
def exporter(directory: Path, *arguments: str) -> Iterator[Program]:
    """Run the real program on a flight directory, until it answers and to the end of the ``with`` block."""
    with tempfile.TemporaryDirectory() as home:
        program = start_program(start, Path(home, "log"), free_port(), "--flight-dir", str(directory), *arguments)
        try:
            yield program
        finally:
            program.process.kill()
            program.process.wait()


def start(*argv: str | Path, **options: object) -> subprocess.Popen[str]:
    """Start a program and discard its output."""
    null = subprocess.DEVNULL
    return subprocess.Popen(argv, stdin=null, stdout=null, text=True, **options)  # type: ignore[call-overload,no-any-return]


def exit_on_sigterm() -> None:
    """Have SIGTERM end this program as Ctrl-C does, so that no process that it started stays behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
