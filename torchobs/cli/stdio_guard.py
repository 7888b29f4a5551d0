"""What every command's output may meet: Ctrl-C, a reader that has gone, a full disk, no stream at all, few characters."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from torchobs.cli.terminal_style import tolerant

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE


def guarded(command: Callable[[], int], name: str = "torchobs") -> int:
    """Run a command of ours, and return its exit status: that of a shell's own programs where its output cannot be had.

    Never around what ``torchobs run`` runs of the user's.
    """
    _open_missing()
    tolerant(sys.stdout)
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # here, where what it raises is told: at the interpreter's end it would be shown by that
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _let_go()
        return NO_READER
    except OSError as problem:
        if problem.filename is not None:
            raise  # a stream's error has no file's name
        _let_go()
        sys.stderr.write(f"{name}: the output cannot be written: {problem.strerror or problem}\n")
        return 1


def _open_missing() -> None:
    """Open what the caller has closed (``>&-``), so that nothing else gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  # as long as the program lives


def _let_go() -> None:
    """Point standard output at nothing: what is still buffered would raise once more at the interpreter's end."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
