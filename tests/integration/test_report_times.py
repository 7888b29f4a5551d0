"""All times of one report are since one moment, and it says which; also where `init()` comes late, or twice."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.support import clean_environment

TRAINING = """
import sys
import time
import torch
import torchobs
from torchobs.identity import process

while time.time_ns() - process.this_process().start_ns < 1_500_000_000:
    torch.randn(64, 64) @ torch.randn(64, 64)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for run in sys.argv[1:]:
    torchobs.init(run_id=run)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    torchobs.shutdown()
"""


def said(flight_dir: Path, *arguments: str) -> str:
    """What a command prints about the files."""
    argv = [sys.executable, "-m", "torchobs", *arguments, str(flight_dir)]
    environ = {**clean_environment(), "COLUMNS": "128"}
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120, env=environ).stdout


def rank_of(flight_dir: Path, run: str) -> dict[str, Any]:
    """The rank of a run, as JSON."""
    (rank,) = json.loads(said(flight_dir, "inspect", "--run", run, "--json"))["ranks"]
    return dict(rank)


@pytest.fixture
def files(flight_dir: Path) -> Path:
    """Two recordings of one process, the first of which begins a second and a half after it."""
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir)}
    command = [sys.executable, "-c", TRAINING, "first", "second"]
    fork_server.run(command, env=environ, check=True, timeout=120)
    return flight_dir


def test_a_late_init_is_reported_since_the_process_began(files: Path) -> None:
    """The time that it ran for is no shorter than the time that it started up, and both are since the process began."""
    text = said(files, "inspect", "--run", "first")
    assert re.search(r"it ran for \S+ m?s since the process began", text)
    assert "Time since the process began" in text
    times = sum(rank_of(files, "first")["goodput"].values())
    ran = re.search(r"it ran for ([\d.]+) s ", text)
    assert ran is not None
    assert float(ran[1]) == pytest.approx(times, rel=0.05)
    assert times >= 1.5


def test_a_second_recording_is_reported_since_its_init(files: Path) -> None:
    """What the process did before was another recording, and no start-up."""
    text = said(files, "inspect", "--run", "second")
    assert re.search(r"it ran for \S+ m?s since init\(\)", text)
    assert "Time since init()" in text
    assert rank_of(files, "second")["started"] >= rank_of(files, "first")["started"] + 1.5
