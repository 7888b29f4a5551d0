"""Make a started process one of its own: nothing that a trainer may have set for itself stays in force.

What only the trainer can decide (session, descriptors, umask, working directory, environment) it decides when it starts the
process (``start``); the rest is undone here, by the process itself.
"""

from __future__ import annotations

import contextlib
import os
import signal

NAME = "torchobs-export"
"""What ``ps`` and ``top`` show; Linux keeps 15 bytes."""
_NICER = 5


def detach() -> None:
    """Undo what an exec inherits: blocked and ignored signals, a pinned rank's CPUs, its priority and name."""
    reset_signals()
    widen_affinity()
    os.nice(_NICER)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write(NAME)


def reset_signals() -> None:
    """Unblock every signal, and let those that were ignored do what they do by default.

    SIGPIPE and SIGXFSZ stay ignored, as in every Python: a write that fails raises instead of killing the process.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def widen_affinity() -> None:
    """Ask for every CPU; the kernel keeps to those of the cpuset, which is how a scheduler confines a job."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
