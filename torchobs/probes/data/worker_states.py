"""What the processes of a data loader's workers do, from ``/proc``: no privileges, no signal, nothing that a worker runs.

A worker can wait for a lock that was held at its fork, for a file system, or compute. State and wait channel are files
(proc(5)); its stack is another process's to read.
"""

from __future__ import annotations

from typing import NamedTuple

from torchobs.support.cgroup import read

_STATES = {
    "R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "t": "stopped by a debugger",
    "Z": "ended", "X": "ended", "I": "idle",
}  # fmt: skip
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
    """Return what a process does, as far as it may be read: ``sleeping in futex_do_wait``."""
    stat, channel = (read(f"/proc/{pid}/{name}") for name in ("stat", "wchan"))
    return in_words(parse_state(stat), channel.strip())


def parse_state(stat: str) -> str:
    """Return the state in ``/proc/PID/stat``; empty if unknown. The program's name, in parentheses, may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return _STATES.get(fields[0], "") if fields else ""


def in_words(state: str, channel: str) -> str:
    """Return a worker's state in words. ``channel``: the kernel's function in which it waits; "0" where it may not be read."""
    waits = f" in {channel}" if channel not in {"", "0"} and state != "running" else ""
    return f"{state}{waits}"[:_LONGEST] if state else "unknown"
