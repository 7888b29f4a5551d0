"""Runs of two real gloo ranks that a timeout of torch.distributed ends: `inspect` says which rank did not come."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests import support
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.ranks.runs import load

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

place, seconds = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
rank = dist.get_rank()
model = torch.nn.Linear(4, 1)

def crunch():
    while True:
        pass

def hook(module, inputs, output):
    if place == "hook" and rank == 1 and number == 20:
        output.register_hook(lambda _: time.sleep(600))

model.register_forward_hook(hook)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(30):
    if number == 20 and rank == 1:
        if place in {"sleep", "barrier"}:
            time.sleep(600)
        if place == "loop":
            crunch()
    if number == 20 and place == "barrier":
        dist.monitored_barrier(timeout=timedelta(seconds=seconds))
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)

def save():
    if rank == 0:
        dist.barrier()

def finish():
    dist.barrier()

save()
finish()
time.sleep(600)
"""
TIMEOUT_S = 5.0


def ended(start: Any, flight_dir: Path, tmp_path: Path, place: str) -> list[str]:
    """Run both ranks until rank 0 has ended, end rank 1 as torchrun does, and return what is said of both together."""
    script, port, ranks = tmp_path / "waiting.py", support.free_port(), []
    script.write_text(SCRIPT)
    for rank in range(2):
        given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        own = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TORCHOBS_RUN_ID": "waited", "TORCHOBS_DIR": str(flight_dir)}
        environment = {**support.clean_environment(), **own, **{name: str(value) for name, value in given.items()}}
        command = (sys.executable, "-m", "torchobs", "run", "--no-exporter", str(script), place, str(TIMEOUT_S))
        ranks.append(start(*command, torch=True, env=environment, cwd=support.ROOT))
    assert ranks[0].wait(timeout=120) == 1
    ranks[1].terminate()
    ranks[1].wait(timeout=30)
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    diagnosis = diagnose_run(reports)
    assert reports[diagnosis.principal].rank == "1"
    (of_rank_0,) = (found for report, found in zip(reports, diagnosis.by_rank, strict=True) if report.rank == "0")
    step = 30 if place == "save" else 20
    assert f"after step {step}: a timeout after 5 s, it waited for " in of_rank_0[0].long
    return [finding.long for finding in diagnosis.together]


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("sleep", "Rank 1 stays between two phases of step 21, and the other rank waits in backward of step 21. "),
        ("loop", "Rank 1 stays between two phases of step 21, and the other rank waits in backward of step 21. "),
        ("hook", ""),
        ("save", ""),
    ],
)
def test_the_rank_that_did_not_come_is_named(start: Any, flight_dir: Path, tmp_path: Path, place: str, told: str) -> None:
    """And not rank 0, whose exception ended the run, as the one that failed first; it has called one collective more."""
    found = ended(start, flight_dir, tmp_path, place)
    begin, _, counts = found[0].partition("Rank 0 called 1 collective more than rank 1 ")
    assert begin == f"A collective timed out after 5 s on rank 0. {told}"
    assert re.match(r"\(\d+ and \d+ of group default \(gloo\)\)", counts)
    assert not any("failed first" in text or "Only rank" in text for text in found)


def test_a_monitored_barrier_says_itself_who_did_not_come(start: Any, flight_dir: Path, tmp_path: Path) -> None:
    """Its message has the rank."""
    text = ended(start, flight_dir, tmp_path, "barrier")[0]
    assert text.startswith(
        "A monitored barrier timed out after 5 s on rank 0. Rank 1 stays between two phases of step 21, and "
    )
