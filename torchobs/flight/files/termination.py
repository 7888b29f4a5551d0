"""The mark of a SIGTERM: whoever is told to end (preemption, ``scancel``, a deleted pod, a launcher) has not failed.

The default SIGTERM leaves no trace, and a Python handler would not run while a rank is stuck in a collective. So
``faulthandler`` writes, in C and without the GIL, the stack of the main thread into the rank's lock file, and then has the
signal do what it did before (``chain``): the process ends as it would have ended, with the same status. A lock file that
begins with such a stack is the mark.

Nothing is registered where SIGTERM has a handler or is ignored; a handler that is installed later replaces this one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import weakref
from threading import get_ident

from torchobs.flight.files import signal_marks
from torchobs.flight.files.signal_marks import LockFile

LASTING_S = 900.0
"""A mark counts for this long. A process that survives SIGTERM (the first of a container, which has it ignored) is killed after
a grace: half a minute by default in Kubernetes and Slurm, some minutes where a last checkpoint takes long."""

_HEADING = b"Stack (most recent call first)"
"""What ``faulthandler`` writes first"""


_registered: weakref.ref[LockFile] | None = None
_held_back: set[int] = set()
"""Threads of which a fork holds SIGTERM back"""


def mark_in(lock_fd: int) -> bool:
    """Have SIGTERM leave its mark in the lock file; return True if so. Again with another file, it replaces the first."""
    global _registered  # noqa: PLW0603  # as signal handlers are, one for the process
    if not _is_ours():
        if _python_has_handler() or signal_marks.kernel_has_handler([signal.SIGTERM]) is not False:
            return False
        # where ours was replaced, and what replaced it taken back, faulthandler still believes that its own is there
        faulthandler.unregister(signal.SIGTERM)
    file = LockFile(lock_fd)
    faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)
    _registered = weakref.ref(file)
    return True


def unmark() -> None:
    """Give SIGTERM its default back, unless somebody else has installed a handler."""
    if _is_ours():
        faulthandler.unregister(signal.SIGTERM)


def marked_at(directory_fd: int, lock_name: str) -> float | None:
    """Return the Unix time of the mark in a lock file; ``None`` without one, or without the file."""
    content, written_s = signal_marks.read(directory_fd, lock_name, len(_HEADING))
    return written_s if content == _HEADING else None


def _before_fork() -> None:
    """Hold SIGTERM back: a child that gets one before it has let go of the handler would mark its parent's file."""
    if _in_use() and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]):
        _held_back.add(get_ident())


def _after_fork_in_parent() -> None:
    if get_ident() in _held_back:
        _held_back.remove(get_ident())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _after_fork_in_child() -> None:
    unmark()
    _after_fork_in_parent()
    _held_back.clear()  # other threads may have been about to fork


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _in_use() -> bool:
    """Return True if ``faulthandler`` still has our file for SIGTERM."""
    return _registered is not None and _registered() is not None


def _is_ours() -> bool:
    """Return True if the handler is the one in C that Python does not know of."""
    return _in_use() and not _python_has_handler() and signal_marks.kernel_has_handler([signal.SIGTERM]) is True


def _python_has_handler() -> bool:
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
