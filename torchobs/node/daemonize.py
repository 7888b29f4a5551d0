"""Detaches the exporter process from its trainer: resets process state that exec inherits.

Session, descriptors, umask, working directory and environment can only be set by the trainer when it starts the process
(:mod:`.launch`); the rest is reset here, by the process itself.
"""

from __future__ import annotations

import contextlib
import os
import signal

NAME = "torchobs-export"
"""Process name in ``ps`` and ``top``; Linux keeps 15 bytes."""
_NICENESS = 5


def detach() -> None:
    """Reset inherited state: blocked and ignored signals, a pinned rank's CPUs; set the priority and the name."""
    reset_signals()
    widen_affinity()
    os.nice(_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write(NAME)


def reset_signals() -> None:
    """Unblock every signal, and restore the default action of ignored ones.

    SIGPIPE and SIGXFSZ stay ignored, as in every Python: a failing write raises instead of killing the process.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def widen_affinity() -> None:
    """Allow every CPU; the kernel restricts this to the cpuset, which is how a scheduler confines a job."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
