"""What the processes of a data loader's workers do, from ``/proc``: no privileges, no signal, nothing that a worker runs.

A worker can wait for a lock that was held at its fork, for a file system, or compute. State, wait channel and system call are
files (proc(5)); its stack is another process's to read.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchobs.support.cgroup import read

_STATES = {
    "R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "t": "stopped by a debugger",
    "Z": "ended", "X": "ended", "I": "idle",
}  # fmt: skip
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 17: "pread64", 23: "select", 35: "nanosleep", 42: "connect", 45: "recvfrom",
        47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 202: "futex", 230: "clock_nanosleep",
        232: "epoll_wait", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 63: "read", 64: "write", 67: "pread64", 72: "pselect6",
        73: "ppoll", 79: "newfstatat", 82: "fsync", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 203: "connect",
        207: "recvfrom", 212: "recvmsg", 260: "wait4",
    },
}  # fmt: skip
"""System calls in which a process waits, by machine and number (``asm/unistd.h``)"""
_OF_FILES = frozenset({"read", "pread64", "write", "fsync", "flock"})
_LONGEST = 200


class LoaderWorker(NamedTuple):
    """A worker process of a data loader that is being iterated."""

    number: int
    pid: int
    awaited: bool
    """whether the next batch is its"""

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"worker {self.number} (pid {self.pid})"


def state_of(pid: int) -> str:
    """Return what a process does, as far as it may be read: ``sleeping in futex_do_wait, system call futex``."""
    base = f"/proc/{pid}"
    stat, wchan, syscall = (read(f"{base}/{name}") for name in ("stat", "wchan", "syscall"))
    call, argument = parse_call(syscall)
    file = ""
    if call in _OF_FILES:
        with suppress(OSError):
            file = str(Path(f"{base}/fd/{argument}").readlink())
    return in_words(parse_state(stat), parse_channel(wchan), call, file)


def parse_state(stat: str) -> str:
    """Return the state in ``/proc/PID/stat``; empty if unknown. The program's name, in parentheses, may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return _STATES.get(fields[0], "") if fields else ""


def parse_channel(wchan: str) -> str:
    """Return the kernel's function in which it waits; empty if it does not, or if that is not to be read."""
    return "" if wchan.strip() == "0" else wchan.strip()


def parse_call(syscall: str, machine: str = platform.machine()) -> tuple[str, int]:
    """Return the open system call, and its first argument; empty if there is none, or if that is not to be read."""
    words = syscall.split()
    if len(words) < 2 or not words[0].isdecimal():  # noqa: PLR2004  # "running", or "-1" in a signal's handler
        return "", 0
    try:
        return _CALLS.get(machine, {}).get(int(words[0]), words[0]), int(words[1], 16)
    except ValueError:
        return "", 0


def in_words(state: str, channel: str, call: str, file: str) -> str:
    """Return a worker's state in words."""
    if not state:
        return "unknown"
    waits = f" in {channel}" if channel and state != "running" else ""
    called = f", system call {call}{f' of {file}' if file else ''}" if call and state != "running" else ""
    return f"{state}{waits}{called}"[:_LONGEST]
