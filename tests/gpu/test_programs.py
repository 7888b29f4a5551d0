"""Whole programs on a CUDA device: how they begin, fork, end, and what they leave."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests import support

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)

TRAIN = """
import multiprocessing, os, sys, time, torch, torchobs
from torch.utils.data import DataLoader

def train(steps, device="cuda"):
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 64, device=device)).square().mean().backward()
        optimizer.step()
    return model

session = torchobs.init(flight_dir=sys.argv[1], grad_interval=1)
"""


def ends_well(flight_dir: Path, script: str, *, silent: bool = True) -> str:
    """Run it; return its output. Nothing is said on stderr."""
    environ = {**support.clean_environment(), "PYTHONPATH": str(support.ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", TRAIN + script, str(flight_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, env=environ)
    assert (done.returncode, done.stderr if silent else "") == (0, "")
    return done.stdout


def test_a_program_that_just_ends(flight_dir: Path) -> None:
    """With work still queued and numbers on their way; pinned memory and events go with the interpreter."""
    ends_well(flight_dir, "train(20)")


def test_workers_that_are_forked_leave_the_device_alone(flight_dir: Path) -> None:
    """Their parent has trained before, and goes on."""
    script = """
train(5)
for _ in DataLoader(torch.zeros(64, 8), batch_size=4, num_workers=2, multiprocessing_context="fork", pin_memory=True):
    train(1)
torch.cuda.synchronize()
print(not [fuse for fuse in session.context.breakers.values() if fuse.errors])
"""
    assert ends_well(flight_dir, script).split() == ["True"]


def test_a_forked_child_that_is_a_rank_of_its_own(flight_dir: Path) -> None:
    """Its parent has pinned memory, which must not be freed in it: torch would record events there."""
    script = """
import gc
train(5)
torch.cuda.synchronize()
def child():
    own = torchobs.init(flight_dir=sys.argv[1], rank=1, run_id="child")
    gc.collect()
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)  # autograd itself does not work in such a child
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(5):
        optimizer.step()
    assert own.context.recorder.ended == 5
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
train(5)
print(process.exitcode)
"""
    assert ends_well(flight_dir, script).split() == ["0"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"{support.NEEDS_CUDA} more")
def test_a_device_that_is_not_the_current_one(flight_dir: Path) -> None:
    """Where nobody calls ``set_device`` nothing of ours makes a context on device 0 (half a gigabyte)."""
    script = """
train(5, "cuda:1")
torch.cuda.synchronize("cuda:1")
time.sleep(1.5)
print(torch._C._cuda_hasPrimaryContext(0), session.context.recorder.ended)
"""
    assert ends_well(flight_dir, script).split() == ["False", "5"]


def test_a_profile_has_the_device_s_kernels_in_it(flight_dir: Path) -> None:
    """What the profiler's own library has to say is its business."""
    script = """
import gzip, json, pathlib
from torchobs.runtime.profiler import Profiles
profiles = Profiles(session.context)
train(3)
profiles.request(3, 1)
train(8)
for _ in range(300):
    found = [path for path in pathlib.Path(sys.argv[1]).iterdir() if path.name.endswith(".json.gz")]
    if found:
        break
    time.sleep(0.1)
events = json.loads(gzip.decompress(found[0].read_bytes()))["traceEvents"]
print(any(event.get("cat") == "kernel" for event in events))
"""
    assert ends_well(flight_dir, script, silent=False).split() == ["True"]
