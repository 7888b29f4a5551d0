"""Programs that a person started by mistake leave no run that would be shown as the newest; all that had begun stays."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from tests import fork_server, support

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path

TRAIN = """
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
HELP = "import argparse, torch\nargparse.ArgumentParser().parse_args()\n"
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1"}


def run(
    tmp_path: Path, flight_dir: Path, *words: str, watched: bool = True, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run a command line of Python's, in a directory with `train.py`."""
    environment = {**support.clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(support.ROOT), **variables}
    argv = (sys.executable, *(("-m", "torchobs", "run", "--no-exporter") if watched else ()), *words)
    return fork_server.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("", ("-m", "tarin")),
        ("", ("-m", "tarin.model")),
        ("import torch\nimport not_there\n", ("train.py",)),
        ("from torch import not_there\n", ("train.py",)),
        ("def train(:\n", ("train.py",)),
        (HELP, ("train.py", "--help")),
        (HELP, ("train.py", "--lrr", "1")),
    ],
)
def test_a_mistake_leaves_nothing(tmp_path: Path, flight_dir: Path, script: str, words: tuple[str, ...]) -> None:
    """And what Python says of it, with its status, is Python's own."""
    (tmp_path / "train.py").write_text(script)
    plain, done = run(tmp_path, flight_dir, *words, watched=False), run(tmp_path, flight_dir, *words)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.stderr == plain.stderr
    assert not list(flight_dir.iterdir())


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        (TRAIN + "sys.exit(2)\n", {}),
        (TRAIN + "import not_there\n", {}),
        ("import torch\nraise RuntimeError\n", {}),
        ("import sys, torch\nsys.exit(1)\n", {}),
        ("import sys, torch\nsys.exit('no data')\n", {}),
        ("import torch\ntorch.ones(1)\n", {}),
        ("import torch\nfor _ in torch.utils.data.DataLoader([1]): import not_there\n", {}),
        ("import torch\nimport not_there\n", LAUNCHED),
        ("import torch\nimport not_there\n", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
        ("import torch\nimport not_there\n", {"SLURM_JOB_ID": "1"}),
    ],
)
def test_what_had_begun_or_failed_stays(tmp_path: Path, flight_dir: Path, script: str, variables: dict[str, str]) -> None:
    """A failure of a program, of a rank that others wait for, and of what nobody looks at."""
    (tmp_path / "train.py").write_text(script)
    run(tmp_path, flight_dir, "train.py", variables=variables)
    assert len(list(flight_dir.glob("*.flight"))) == 1
