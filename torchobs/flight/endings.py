"""How a rank ended without a word: the marks of fatal signals and of SIGTERM, which ``faulthandler`` writes into its lock file.

**A crash.** SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT (an exception of C++ that nobody catches, as of NCCL's watchdog after a
timeout) leave no trace: the rank is gone, as after a SIGKILL. So ``faulthandler`` writes the stack of that thread into the
rank's lock file, and then has the signal do what it did before: the process ends as it would have ended, with the same status.
Not those of the other threads: they run on meanwhile, and to read a stack that changes is a crash of its own.

Nothing is installed where ``faulthandler`` is on already (``PYTHONFAULTHANDLER``, pytest): its output is the user's. Nor where
one of these signals has a handler or is ignored: a Java VM in the process meets SIGSEGV all the time, and would not survive the
first one that ``faulthandler`` hands on. What installs handlers later replaces ours.

**A SIGTERM.** A rank that is asked to end (preemption, ``scancel``, a deleted pod, a launcher) has not failed. The default
SIGTERM leaves no trace, and a Python handler would not run while a rank is stuck in a collective. So ``faulthandler`` writes,
in C and without the GIL, the stack of the main thread into the lock file, and then has the signal do what it did before
(``chain``). A lock file that begins with such a stack is the mark. Nothing is registered where SIGTERM has a handler or is
ignored; a handler that is installed later replaces this one.

**Other signals that end a rank by their default** (:data:`EXIT_SIGNALS`). The exit word says which it was, where the compiled
part is there to store it. Without it, on file systems other than tmpfs, and for the first process of a container (which a
default does not end), such a rank is *lost*. Again nothing is marked where a signal has a handler or is ignored, as SIGHUP
under nohup, and a handler that is installed later replaces the mark.
"""

from __future__ import annotations

import faulthandler
import functools
import operator
import os
import re
import signal
import stat
import sys
import weakref
from collections.abc import Iterable
from itertools import islice
from threading import get_ident

from torchobs.flight import files
from torchobs.flight.layout import EXIT_SET, Exit
from torchobs.flight.native import compiled
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


def _read(directory_fd: int, lock_name: str, size: int) -> tuple[bytes, float]:
    """Return the first bytes of a dead rank's lock file, and when it was written last in Unix time; empty if there are none."""
    try:
        status = os.stat(lock_name, dir_fd=directory_fd, follow_symlinks=False)
        if status.st_size and stat.S_ISREG(status.st_mode):
            return files.lock_content(directory_fd, lock_name, size), status.st_mtime
    except OSError:
        pass
    return b"", 0.0


MOST_OF_MARK = 64 << 10
"""Bytes that are read of a mark: a hundred frames, ``faulthandler``'s limit, take less"""

_STACK = "Stack (most recent call first):\n"
_FRAME = re.compile(r'  File "([^"\n]*)", line ([0-9]+|\?\?\?) in ([^\n]*)')
_MOST_FRAMES = 64

_CRASH_HEADING = b"Fatal Python error: "
_TITLES = {
    b"Segmentation fault": signal.SIGSEGV,
    b"Bus error": signal.SIGBUS,
    b"Floating point exception": signal.SIGFPE,
    b"Floating-point exception": signal.SIGFPE,
    b"Illegal instruction": signal.SIGILL,
    b"Aborted": signal.SIGABRT,
}
"""``faulthandler``'s, of all versions of Python"""

_crash_file: weakref.ref[LockFile] | None = None


def mark_crash(lock_fd: int) -> bool:
    """Have a crash leave its mark in the lock file; return True if so. Again with another file, it replaces the first."""
    global _crash_file  # noqa: PLW0603  # as signal handlers are, one for the process
    if not _crash_is_ours() and (faulthandler.is_enabled() or kernel_has_handler(set(_TITLES.values())) is not False):
        return False
    file = LockFile(lock_fd)
    faulthandler.enable(file=file, all_threads=False)
    _crash_file = weakref.ref(file)
    return True


def unmark_crash() -> None:
    """Give the signals their defaults back, unless somebody else has enabled ``faulthandler``."""
    if _crash_is_ours():
        faulthandler.disable()


def crash_signal(directory_fd: int, lock_name: str) -> signal.Signals | None:
    """Return the signal that ended a dead rank; ``None`` without a mark, or without the file."""
    return _signal_of(_read(directory_fd, lock_name, 64)[0])


def crash_frames(directory_fd: int, lock_name: str) -> tuple[str, ...]:
    """Return the frames of the thread that crashed; empty without a mark, or if it ran no Python code."""
    content = _read(directory_fd, lock_name, MOST_OF_MARK)[0]
    return frames_of(content.decode(errors="replace").partition(_STACK)[2]) if _signal_of(content) is not None else ()


def frames_of(stack: str) -> tuple[str, ...]:
    """Return the frames of a stack by ``faulthandler`` as ``file:line in function``, the innermost first; at most 64."""
    return tuple(f"{found[1]}:{found[2]} in {found[3]}" for found in islice(_FRAME.finditer(stack), _MOST_FRAMES))


def _signal_of(content: bytes) -> signal.Signals | None:
    heading, _, rest = content.partition(_CRASH_HEADING)
    return None if heading else _TITLES.get(rest.partition(b"\n")[0])


def _crash_is_ours() -> bool:
    """Return True if ``faulthandler`` still has our file."""
    return faulthandler.is_enabled() and _crash_file is not None and _crash_file() is not None


os.register_at_fork(after_in_child=unmark_crash)


LASTING_S = 900.0
"""A mark counts for this long. A process that survives SIGTERM (the first of a container, which has it ignored) is killed after
a grace: half a minute by default in Kubernetes and Slurm, some minutes where a last checkpoint takes long."""

_TERMINATION_HEADING = b"Stack (most recent call first)"
"""What ``faulthandler`` writes first"""

_termination_file: weakref.ref[LockFile] | None = None
_held_back: set[int] = set()
"""Threads in a fork, during which SIGTERM is held back"""


def mark_termination(lock_fd: int) -> bool:
    """Have SIGTERM leave its mark in the lock file; return True if so. Again with another file, it replaces the first."""
    global _termination_file  # noqa: PLW0603  # as signal handlers are, one for the process
    if not _termination_is_ours():
        if _python_has_handler() or kernel_has_handler([signal.SIGTERM]) is not False:
            return False
        # where ours was replaced, and what replaced it taken back, faulthandler still believes that its own is there
        faulthandler.unregister(signal.SIGTERM)
    file = LockFile(lock_fd)
    faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)
    _termination_file = weakref.ref(file)
    return True


def unmark_termination() -> None:
    """Give SIGTERM its default back, unless somebody else has installed a handler."""
    if _termination_is_ours():
        faulthandler.unregister(signal.SIGTERM)


def terminated_at(directory_fd: int, lock_name: str) -> float | None:
    """Return the Unix time of the mark in a lock file; ``None`` without one, or without the file."""
    content, written_s = _read(directory_fd, lock_name, len(_TERMINATION_HEADING))
    return written_s if content == _TERMINATION_HEADING else None


def _before_fork() -> None:
    """Hold SIGTERM back: a child that gets one before it has let go of the handler would mark its parent's file."""
    if _termination_in_use() and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]):
        _held_back.add(get_ident())


def _after_fork_in_parent() -> None:
    if get_ident() in _held_back:
        _held_back.remove(get_ident())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _after_fork_in_child() -> None:
    unmark_termination()
    _after_fork_in_parent()
    _held_back.clear()  # other threads may have been about to fork


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _termination_in_use() -> bool:
    """Return True if ``faulthandler`` still has our file for SIGTERM."""
    return _termination_file is not None and _termination_file() is not None


def _termination_is_ours() -> bool:
    """Return True if the handler is the one in C that Python does not know of."""
    return _termination_in_use() and not _python_has_handler() and kernel_has_handler([signal.SIGTERM]) is True


def _python_has_handler() -> bool:
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


EXIT_SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
"""Not SIGPROF: profilers in C leave a process alone that has an action for it already"""


def mark_exits(anchor: object, address: int) -> None:
    """Have these signals store their exit word at the address, which ``anchor`` keeps; again, it replaces the first."""
    native = compiled()
    if native is not None and os.getpid() != 1:
        words = {int(number): EXIT_SET | Exit.TERMINATED << 32 | 128 + number for number in EXIT_SIGNALS}
        native.mark_signals(anchor, address, words)


def unmark_exits() -> None:
    """Give the signals their defaults back, unless somebody else has installed a handler."""
    if (native := sys.modules.get("torchobs._native")) is not None and native is compiled():
        native.unmark_signals()


os.register_at_fork(after_in_child=unmark_exits)
