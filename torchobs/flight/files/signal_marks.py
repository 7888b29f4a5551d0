"""What the marks of signals have in common: ``faulthandler`` writes them, in C and without the GIL, into a rank's lock file."""

from __future__ import annotations

import functools
import operator
import os
import signal
import stat
from collections.abc import Iterable

from torchobs.flight.files import lock
from torchobs.support import cgroup


class LockFile:
    """What ``faulthandler`` writes to. It alone keeps this alive, until somebody gives it another file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the lock file's descriptor."""
        return self._descriptor

    def flush(self) -> None:
        """Nothing is buffered; ``faulthandler`` asks for it."""


def kernel_has_handler(numbers: Iterable[signal.Signals]) -> bool | None:
    """Return whether one of these is caught or ignored; ``None`` where the kernel does not say (macOS)."""
    handled = kernel_handlers()
    return None if handled is None else any(handled >> (number - 1) & 1 for number in numbers)


def kernel_handlers() -> int | None:
    """Return the signals that are caught or ignored, signal 1 in bit 0; ``None`` where the kernel does not say (macOS)."""
    lines = cgroup.read("/proc/self/status").splitlines()
    if not lines:
        return None
    masks = (int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigIgn:")))
    return functools.reduce(operator.or_, masks, 0)


def read(directory_fd: int, lock_name: str, size: int) -> tuple[bytes, float]:
    """Return the first bytes of a dead rank's lock file, and when it was written last in Unix time; empty if there are none."""
    try:
        status = os.stat(lock_name, dir_fd=directory_fd, follow_symlinks=False)
        if status.st_size and stat.S_ISREG(status.st_mode):
            return lock.content(directory_fd, lock_name, size), status.st_mtime
    except OSError:
        pass
    return b"", 0.0
