"""The training job: torchrun and its ranks."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import final

from examples._demo import processes

ROOT = Path(__file__).resolve().parents[2]


@final
class Job:
    """`examples/char_gpt.py` under `torchobs run`, on some ranks of this machine, for the length of a `with` block.

    Args:
        home: A private directory for what the ranks print.
        flight_dir: The directory of the flight files, which must exist.
        ranks: How many.
        options: The training script's.
    """

    def __init__(self, home: Path, flight_dir: Path, ranks: int, options: Sequence[str]) -> None:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        self._argv = [*launcher, "torchobs", "run", "--no-exporter", "examples/char_gpt.py", *options]
        self._flight_dir, self._log = flight_dir, home / "job.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return shlex.join(self._argv)

    def __enter__(self) -> Job:
        environment = {
            "OMP_NUM_THREADS": "1",  # torchrun's own choice, without its warning; the model is too small for more
            **os.environ,
            "PATH": processes.programs_path(),
            "TORCHOBS_DIR": str(self._flight_dir),
        }
        self._process = processes.start(self._argv, self._log, environment, ROOT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process:
            processes.end_tree(self._process)

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def output(self) -> list[str]:
        """The lines that launcher and ranks have printed so far."""
        return processes.lines(self._log)
