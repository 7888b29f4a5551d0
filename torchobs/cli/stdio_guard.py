"""Handling of output errors for all commands: Ctrl-C, closed pipe, full disk, missing stream, limited encoding."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from torchobs.cli.terminal_style import tolerant

INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE


def guarded(command: Callable[[], int], name: str = "torchobs") -> int:
    """Run a command and return its exit status; on output errors that of standard Unix programs.

    Never used around a user's script.
    """
    _open_missing()
    tolerant(sys.stdout)
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # here, where errors are handled: at exit the interpreter would print them
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _let_go()
        return NO_READER
    except OSError as problem:
        if problem.filename is not None:
            raise  # errors of streams have no filename
        _let_go()
        sys.stderr.write(f"{name}: the output cannot be written: {problem.strerror or problem}\n")
        return 1


def _open_missing() -> None:
    """Open standard streams that the caller has closed (``>&-``), so that no other file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  # stays open


def _let_go() -> None:
    """Redirect standard output to /dev/null: buffered data would raise again at interpreter exit."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
