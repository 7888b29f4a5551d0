"""How a rank ended without a word: the marks that fatal signals, and those that ask it to end, leave in its lock file.

**A crash.** SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT (an uncaught exception of C++, as of NCCL's watchdog after a
timeout) leave no trace: the rank is gone, as after a SIGKILL. So ``faulthandler`` writes the stack of that thread into the
rank's lock file, and then has the signal do what it did before: the process ends as it would have ended, with the same status.
Not those of the other threads: they run on meanwhile, and to read a stack that changes is a crash of its own.

Nothing is installed where ``faulthandler`` is on already (``PYTHONFAULTHANDLER``, pytest): its output is the user's. Nor where
one of these signals has a handler or is ignored: a Java VM in the process meets SIGSEGV all the time, and would not survive the
first one that ``faulthandler`` hands on. What installs handlers later replaces ours.

**A signal that ends a rank by its default** (:data:`EXIT_SIGNALS`: preemption, ``scancel``, a deleted pod, a launcher, a closed
terminal). Such a rank has not failed, and the default leaves no trace; a handler in Python would not run while a rank is stuck
in a collective. So the compiled part has one in C: it writes one line into the lock file, and then has the signal do what it
did before. Nothing is marked where a signal has a handler or is ignored, as SIGHUP under nohup; a handler that is installed
later replaces ours. Without the compiled part (as in a pod that the exporter's image injects torchobs into) ``faulthandler``
writes a stack there, of SIGTERM alone: of 8,000 processes in the midst of Python code one died of SIGSEGV in that, for the
stack changed under its eyes. By the other signals such a rank is *lost*.
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
from itertools import islice

from torchobs.flight import files
from torchobs.flight.native import compiled
from torchobs.support import cgroup


class LockFile:
    """The file of ``faulthandler``, which alone keeps this alive, until it gets another file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the lock file's descriptor."""
        return self._descriptor

    def flush(self) -> None:
        """Nothing is buffered; ``faulthandler`` asks for it."""


def kernel_handlers() -> int | None:
    """Return the signals that are caught or ignored, signal 1 in bit 0; ``None`` where the kernel has no such list (macOS)."""
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


def mark_crash(lock_fd: int) -> None:
    """Have a crash leave its mark in the lock file, if that is for us to do. With another file it replaces the first."""
    global _crash_file  # noqa: PLW0603  # as signal handlers are, one for the process
    if not _crash_is_ours():
        taken = kernel_handlers()
        if faulthandler.is_enabled() or taken is None or any(taken >> (number - 1) & 1 for number in _TITLES.values()):
            return
    file = LockFile(lock_fd)
    faulthandler.enable(file=file, all_threads=False)
    _crash_file = weakref.ref(file)


def unmark_crash() -> None:
    """Give the signals their defaults back, unless other code has enabled ``faulthandler``."""
    if _crash_is_ours():
        faulthandler.disable()


def crash(directory_fd: int, lock_name: str) -> tuple[signal.Signals | None, tuple[str, ...]]:
    """Return the signal that ended a dead rank, and the frames of the thread that crashed; nothing without a mark."""
    content = _read(directory_fd, lock_name, MOST_OF_MARK)[0]
    heading, _, rest = content.partition(_CRASH_HEADING)
    number = None if heading else _TITLES.get(rest.partition(b"\n")[0])
    return number, frames_of(content.decode(errors="replace").partition(_STACK)[2]) if number is not None else ()


def frames_of(stack: str) -> tuple[str, ...]:
    """Return the frames of a stack by ``faulthandler`` as ``file:line in function``, the innermost first; at most 64."""
    return tuple(f"{match[1]}:{match[2]} in {match[3]}" for match in islice(_FRAME.finditer(stack), _MOST_FRAMES))


def _crash_is_ours() -> bool:
    """Return whether ``faulthandler`` still has our file."""
    return faulthandler.is_enabled() and _crash_file is not None and _crash_file() is not None


os.register_at_fork(after_in_child=unmark_crash)


EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
"""Not SIGPROF: profilers in C leave a process alone that has an action for it already"""
LASTING_S = 900.0
"""A mark counts for this long. A process that survives SIGTERM (the first of a container, which has it ignored) is killed after
a grace: half a minute by default in Kubernetes and Slurm, some minutes where a last checkpoint takes long."""

_stack_file: weakref.ref[LockFile] | None = None
_ENDED_BY = re.compile(rb"Ended by signal ([0-9]{2})\n")


def mark_exits(lock_fd: int) -> None:
    """Have these signals leave their mark in the lock file; again with another file, it replaces the first."""
    global _stack_file  # noqa: PLW0603  # as signal handlers are, one for the process
    if (native := compiled()) is not None:
        # other signals do not ask the first process of a container to end
        numbers = EXIT_SIGNALS if os.getpid() != 1 else (signal.SIGTERM,)
        native.mark_signals(lock_fd, {int(number): b"Ended by signal %02d\n" % number for number in numbers})
        return
    unmark_exits()
    if _handler_of_sigterm() is False:
        faulthandler.unregister(signal.SIGTERM)  # where ours was replaced, and that taken back, it believes in ours
        file = LockFile(lock_fd)
        faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)
        _stack_file = weakref.ref(file)


def unmark_exits() -> None:
    """Give the signals their defaults back, unless other code has installed a handler."""
    if (native := sys.modules.get("torchobs._native")) is not None and native is compiled():
        native.unmark_signals()
    elif _stack_file is not None and _stack_file() is not None and _handler_of_sigterm() is True:
        faulthandler.unregister(signal.SIGTERM)


def _handler_of_sigterm() -> bool | None:
    """Return whether C code handles the signal; ``None`` if Python code does, or if that is unknown."""
    handlers = kernel_handlers() if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else None
    return None if handlers is None else bool(handlers >> (signal.SIGTERM - 1) & 1)


def ended_by(directory_fd: int, lock_name: str) -> tuple[int, float] | None:
    """Return the signal of the mark in a lock file, and its Unix time; ``None`` without one, or without the file."""
    content, written_s = _read(directory_fd, lock_name, 64)
    if content.startswith(_STACK.encode()[:-2]):
        return int(signal.SIGTERM), written_s
    match = _ENDED_BY.fullmatch(content)
    return None if match is None else (int(match[1]), written_s)


os.register_at_fork(after_in_child=unmark_exits)
