"""The training job: torchrun and its ranks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import final

from examples._demo.processes import Program, programs_path

ROOT = Path(__file__).resolve().parents[2]


@final
class Job(Program):
    """`examples/char_gpt.py` under `torchobs run`, on some ranks of this machine, for the length of a `with` block.

    Args:
        home: A private directory for what the ranks print.
        flight_dir: The directory of the flight files, which must exist.
        ranks: How many.
        options: The training script's.
    """

    def __init__(self, home: Path, flight_dir: Path, ranks: int, options: Sequence[str]) -> None:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        argv = [*launcher, "torchobs", "run", "--no-exporter", "examples/char_gpt.py", *options]
        environment = {
            "OMP_NUM_THREADS": "1",  # torchrun's own choice, without its warning; the model is too small for more
            **os.environ,
            "PATH": programs_path(),
            "TORCHOBS_DIR": str(flight_dir),
        }
        super().__init__(argv, home / "job.log", environment, ROOT)

    def __str__(self) -> str:
        return shlex.join(self._argv)
