"""The processes of a benchmark: a real exporter, programs that answer line by line, and what a process takes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.exporters import Program, start_program
from tests.support import clean_environment, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024**2


def rss(pid: int) -> int:
    """Bytes of a process that are in memory. Raises ``OSError`` when it is gone."""
    return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has taken, to the nanosecond.

    /proc/PID/stat counts ticks of 10 ms, of which an idle exporter takes one in a few seconds. The number of a process's own
    clock is as clock_getcpuclockid(3) of Linux makes it. Raises ``OSError`` when the process is gone.
    """
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def flight_directory() -> Iterator[Path]:
    """A directory on tmpfs, where there is one, as a rank would choose it; removed at the end of the ``with`` block."""
    path = Path(tempfile.mkdtemp(prefix="torchobs-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def exporter(directory: Path, *arguments: str) -> Iterator[Program]:
    """Run the real program on a flight directory, until it answers and to the end of the ``with`` block."""
    with tempfile.TemporaryDirectory() as home:
        program = start_program(start, Path(home, "log"), free_port(), "--flight-dir", str(directory), *arguments)
        try:
            yield program
        finally:
            end(program.process)


def start(*argv: str | Path, **options: object) -> subprocess.Popen[str]:
    """Start a program whose output nobody reads."""
    defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(argv, **{**defaults, **options})  # type: ignore[call-overload,no-any-return]  # as the tests' fixture


def end(process: subprocess.Popen[str]) -> None:
    """End a process as Ctrl-C does: an exporter then does not wait for its scrapers."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=15)


class Answering:
    """A program of ours, ``python -m MODULE``, that answers each line of its input with one, and leaves when its input ends."""

    def __init__(self, module: str, *arguments: str) -> None:
        argv, pipe = [sys.executable, "-m", module, *arguments], subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=clean_environment())

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def tell(self, line: str) -> None:
        """Ask something."""
        self._pipes[0].write(line + "\n")
        self._pipes[0].flush()

    def answer(self) -> str:
        """Return the next line."""
        return self._pipes[1].readline().strip() or sys.exit("a process of the benchmark ended")

    def end(self) -> None:
        """Have it leave."""
        self._pipes[0].close()
        self._process.wait(timeout=60)
        self._pipes[1].close()


def exit_on_sigterm() -> None:
    """Have SIGTERM end this program as Ctrl-C does, so that no process that it started stays behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
