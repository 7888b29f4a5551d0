"""Stacks of a data loader's workers, by `py-spy <https://github.com/benfred/py-spy>`_ where it is on the path.

It reads another process's memory and needs the kernel's permission for that, and nothing of the worker: it neither stops it
nor runs in it. Everything here is for a thread of its own, which may wait.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from inspect import getclosurevars
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.probes.data.worker_states import LoaderWorker

PROGRAM = "py-spy"
PATIENCE_S = 3.0
"""For all workers together; ``torchobs stacks`` waits for five seconds"""
_MAX_WORKERS = 4
_MAX_OUTPUT = 64 << 10
_COMMAND = re.compile(r"^(Process [0-9]+):[^\n]*", re.MULTILINE)
"""A line with the command, which may hold secrets"""
_TORCH = "torch.utils.data._utils.signal_handling"


def stacks(workers: Sequence[LoaderWorker]) -> str:
    """Return the stacks of the first workers, as py-spy writes them; empty without it."""
    program = _program()
    if program is None:
        return ""
    deadline_s, found = monotonic() + PATIENCE_S, []
    for worker in workers[:_MAX_WORKERS]:
        left_s = deadline_s - monotonic()
        if left_s > 0:
            found.append(f"# {worker.name}\n{_dump(program, worker.pid, left_s)}\n")
    return "".join(found)


def _program() -> str | None:
    """Return the program's path; ``None`` if it is missing, or if a handler of the script's would see that it has ended.

    Its file is read before: until it has been executed the interpreter's lock is held, also where a file system hangs.
    """
    path = shutil.which(PROGRAM)
    if path is None or not _is_unheard(signal.getsignal(signal.SIGCHLD)):
        return None
    try:
        Path(path).read_bytes()
    except OSError:
        return None
    return path


def _is_unheard(handler: Any) -> bool:
    """Return whether a child's end runs no code but torch's, which looks after the workers alone."""
    if getattr(handler, "__module__", "") == _TORCH:
        handler = getclosurevars(handler).nonlocals.get("previous_handler")
    return handler in {None, signal.SIG_DFL, signal.SIG_IGN}


def _dump(program: str, pid: int, timeout_s: float) -> str:
    command = (program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, start_new_session=True
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as problem:
        return f"# {PROGRAM}: {type(problem).__name__}\n"
    if done.returncode:
        return f"# {PROGRAM}: {done.stderr.decode(errors='replace').strip().partition(chr(10))[0][:200]}\n"
    return _COMMAND.sub(r"\1:", done.stdout[:_MAX_OUTPUT].decode(errors="replace"))
