"""Programs that the demo starts, and how to be rid of them without leaving an orphan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


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


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, and its descendants, and reap it."""
    if process.poll() is None:  # not reaped yet, so the pid is still its own
        parent = psutil.Process(process.pid)
        # Listed while the parent lives: afterwards nobody knows whose children they were.
        end([parent, *parent.children(recursive=True)])
    process.wait()


def end(processes: Sequence[psutil.Process], patience_s: float = 10.0) -> None:
    """Ask processes to end, and end those that do not; psutil sees to it that no reused pid is hit."""
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=patience_s)


def naming(path: Path) -> list[psutil.Process]:
    """Return the processes that were given a path as an argument: those that are nobody's children, by design."""
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if str(path) in (process.info["cmdline"] or ())]
