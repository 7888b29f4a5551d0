"""Run the demo's programs, and end them without leaving an orphan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_S = 10.0


class Program:
    """A program that runs for the length of a `with` block.

    Args:
        argv: Its command line.
        log: The file that its output goes to.
        environment: Its variables.
        directory: Where it starts.
    """

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str], directory: Path) -> None:
        self._argv, self._log, self._environment, self._directory = argv, log, environment, directory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._argv,
                cwd=self._directory,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends things in order
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:  # not reaped yet, so the pid is still its own
            parent = psutil.Process(self._process.pid)
            # Listed while the parent lives: afterwards the kernel does not know whose children they were.
            _end([parent, *parent.children(recursive=True)])
        self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def output(self) -> list[str]:
        """The lines that it and its children have printed so far; none before it is started."""
        return self._log.read_text("utf-8", errors="replace").splitlines() if self._process else []


def programs_path() -> str:
    """PATH with this interpreter's own programs (torchrun, torchobs) first, as in an activated environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _end(processes: Sequence[psutil.Process]) -> None:
    """Terminate processes, and kill those that do not end; psutil makes sure that no reused pid is hit."""
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                send(process)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=PATIENCE_S)
