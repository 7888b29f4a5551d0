"""Signals that end a rank by their default: the exit word says which it was, where the compiled part is there to store it.

Without it, on file systems other than tmpfs, and for the first process of a container (which a default does not end), such a
rank is *lost*. Nothing is marked where a signal has a handler or is ignored, as SIGHUP under nohup; a handler that is installed
later replaces the mark. SIGTERM and crashes have marks of their own (``files.termination``, ``files.crash``).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from torchobs.flight.format.layout import EXIT_SET, Exit

if TYPE_CHECKING:
    from types import ModuleType

SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
"""Not SIGPROF: profilers in C leave a process alone that has an action for it already"""


def mark(native: ModuleType | None, memory_map: object, offset: int) -> None:
    """Have these signals store their exit word at the map's offset, in bytes; again, it replaces the first."""
    if native is None or memory_map is None or os.getpid() == 1:
        return
    words = {int(number): EXIT_SET | Exit.TERMINATED << 32 | 128 + number for number in SIGNALS}
    native.mark_signals(memory_map, offset, words)


def unmark(native: ModuleType | None) -> None:
    """Give the signals their defaults back, unless somebody else has installed a handler."""
    if native is not None:
        native.unmark_signals()


os.register_at_fork(after_in_child=lambda: unmark(sys.modules.get("torchobs._native")))
