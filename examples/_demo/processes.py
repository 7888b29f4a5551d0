"""Start the demo's programs, and end them without leaving an orphan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

PATIENCE_S = 10.0


def programs_path() -> str:
    """PATH with this interpreter's own programs (torchrun, torchobs) first, as in an activated environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def start(argv: Sequence[str], log: Path, environment: Mapping[str, str], directory: Path) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own: Ctrl-C reaches the demo alone, which then ends things in order."""
    with log.open("wb") as output:
        return subprocess.Popen(
            argv,
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, and its descendants, and reap it."""
    if process.poll() is None:  # not reaped yet, so the pid is still its own
        parent = psutil.Process(process.pid)
        # Listed while the parent lives: afterwards the kernel does not know whose children they were.
        _end([parent, *parent.children(recursive=True)])
    process.wait()


def lines(log: Path) -> list[str]:
    """Return the lines of a log; none if there is no such file yet."""
    try:
        return log.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _end(processes: Sequence[psutil.Process]) -> None:
    """Terminate processes, and kill those that do not end; psutil makes sure that no reused pid is hit."""
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                send(process)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=PATIENCE_S)
