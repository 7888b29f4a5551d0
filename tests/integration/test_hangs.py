"""Real trainings that hang in different ways, soon and late, are found with the default settings."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT, clean_environment, free_port, wait_until
from torchobs.exporter.config import ExporterConfig
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HANGS = {
    "sleep-early": "hung", "sleep-late": "hung", "spin-early": "hung", "backtrack-early": "unresponsive",
    "loader-early": "hung", "loader-late": "hung", "worker-early": "hung", "collective-early": "hung",
}  # fmt: skip
STEPS = {"early": 4, "late": 150}
LONGEST_S = 240
"""For all: a minute without a step, and the time to get there on a busy machine"""


@pytest.mark.long
def test_hangs_of_all_kinds_are_found(start: Callable[..., object], flight_dir: Path) -> None:
    """In Python, in C with the GIL held, at a lock, in a collective; a step that took eight seconds hides none."""
    for run in HANGS:
        kind, when = run.split("-")
        world, port = (2 if kind == "collective" else 1), free_port()
        for rank in range(world):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = {"TORCHOBS_DIR": os.fspath(flight_dir), "TORCHOBS_RUN_ID": run, "OMP_NUM_THREADS": "1"}
            environment = {**clean_environment(), **own, **{name: str(value) for name, value in place.items()}}
            command = (sys.executable, "-m", "torchobs", "run", "--no-exporter", "-m", "tests.scripts.hanging", kind)
            start(*command, str(STEPS[when]), torch=True, env=environment, cwd=ROOT)
    with closing(Scanner(ExporterConfig(flight_dir=os.fspath(flight_dir)))) as scanner:
        seen: dict[str, str] = {}

        def all_found() -> bool:
            time.sleep(0.5)
            for rank in scanner.scan().ranks:
                aged = (rank.progress_age_s or 0.0) > 60  # a GIL hold while a model loads is no hang yet
                seen[f"{rank.run_id}/{rank.rank}"] = rank.state if aged else "young"
            states = {run: {state for name, state in seen.items() if name.startswith(f"{run}/")} for run in HANGS}
            return all(states[run] == {expected} for run, expected in HANGS.items())

        wait_until(all_found, timeout_s=LONGEST_S)
