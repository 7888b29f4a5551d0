"""The mark of a crash: the signal that ended a rank, and where the thread was that got it.

SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT (an exception of C++ that nobody catches, as of NCCL's watchdog after a timeout)
leave no trace: the rank is gone, as after a SIGKILL. So ``faulthandler`` writes the stack of that thread into the rank's lock
file, and then has the signal do what it did before: the process ends as it would have ended, with the same status. Not those of
the other threads: they run on meanwhile, and to read a stack that changes is a crash of its own.

Nothing is installed where ``faulthandler`` is on already (``PYTHONFAULTHANDLER``, pytest): its output is the user's. Nor where
one of these signals has a handler or is ignored: a Java VM in the process meets SIGSEGV all the time, and would not survive the
first one that ``faulthandler`` hands on. What installs handlers later replaces ours.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import weakref

from torchobs.flight.files import signal_marks
from torchobs.flight.files.signal_marks import LockFile

MOST = 64 << 10
"""Bytes that are read of a mark: a hundred frames, ``faulthandler``'s limit, take less"""

_HEADING = b"Fatal Python error: "
_TITLES = {
    b"Segmentation fault": signal.SIGSEGV,
    b"Bus error": signal.SIGBUS,
    b"Floating point exception": signal.SIGFPE,
    b"Floating-point exception": signal.SIGFPE,
    b"Illegal instruction": signal.SIGILL,
    b"Aborted": signal.SIGABRT,
}
"""``faulthandler``'s, of all versions of Python"""

_enabled: weakref.ref[LockFile] | None = None


def mark_in(lock_fd: int) -> bool:
    """Have a crash leave its mark in the lock file; return True if so. Again with another file, it replaces the first."""
    global _enabled  # noqa: PLW0603  # as signal handlers are, one for the process
    if not _is_ours() and (faulthandler.is_enabled() or signal_marks.kernel_has_handler(set(_TITLES.values())) is not False):
        return False
    file = LockFile(lock_fd)
    faulthandler.enable(file=file, all_threads=False)
    _enabled = weakref.ref(file)
    return True


def unmark() -> None:
    """Give the signals their defaults back, unless somebody else has enabled ``faulthandler``."""
    if _is_ours():
        faulthandler.disable()


def signal_in(directory_fd: int, lock_name: str) -> signal.Signals | None:
    """Return the signal that ended a dead rank; ``None`` without a mark, or without the file."""
    return _signal(signal_marks.read(directory_fd, lock_name, 64)[0])


def stack_in(directory_fd: int, lock_name: str) -> str:
    """Return the stack of a mark; empty without one."""
    content = signal_marks.read(directory_fd, lock_name, MOST)[0]
    return content.decode(errors="replace") if _signal(content) is not None else ""


def _signal(content: bytes) -> signal.Signals | None:
    heading, _, rest = content.partition(_HEADING)
    return None if heading else _TITLES.get(rest.partition(b"\n")[0])


def _is_ours() -> bool:
    """Return True if ``faulthandler`` still has our file."""
    return faulthandler.is_enabled() and _enabled is not None and _enabled() is not None


os.register_at_fork(after_in_child=unmark)
