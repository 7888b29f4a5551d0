"""The training job: torchrun, its ranks, and the exporter that `torchobs run` starts beside them."""

from __future__ import annotations

import json
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
        home: A private directory for the flight files and for what the ranks print.
        ranks: How many.
        options: The training script's.
    """

    def __init__(self, home: Path, ranks: int, options: Sequence[str]) -> None:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        self._argv = [*launcher, "torchobs", "run", "examples/char_gpt.py", *options]
        self._flight_dir, self._log = home / "flight", home / "job.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return shlex.join(self._argv)

    def __enter__(self) -> Job:
        self._flight_dir.mkdir(mode=0o700)
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
            processes.end_family(self._process)
        processes.end(processes.naming(self._flight_dir), patience_s=2.0)  # the exporter, announced already or not

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def output(self) -> list[str]:
        """The lines that launcher and ranks have printed so far."""
        return _lines(self._log)

    @property
    def exporter_log(self) -> list[str]:
        """The lines that the exporter has logged so far."""
        return _lines(self._flight_dir / "exporter.log")

    def exporter_address(self) -> str:
        """Return where the exporter listens, `host:port`; empty while it has not said so."""
        try:
            return str(json.loads((self._flight_dir / "exporter.json").read_text("utf-8"))["address"])
        except FileNotFoundError:
            return ""


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
