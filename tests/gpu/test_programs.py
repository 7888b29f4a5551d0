"""Whole programs on a CUDA device: how they begin, fork, end, and what they leave."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests import support
from tests.training import StepFlag, has
from torchobs import catalog
from torchobs.flight import reader

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)

HAS_NCCL = torch.distributed.is_available() and torch.distributed.is_nccl_available()

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


def ended(flight_dir: Path, script: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it. ``more``: variables of its environment."""
    environ = {**support.clean_environment(), "PYTHONPATH": str(support.ROOT), **more}
    command = [sys.executable, "-W", "ignore", "-c", TRAIN + script, str(flight_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, env=environ)


def ends_well(flight_dir: Path, script: str, *, silent: bool = True, **more: str) -> str:
    """Run it; return its output. Nothing is said on stderr."""
    done = ended(flight_dir, script, **more)
    assert (done.returncode, done.stderr if silent else "") == (0, "")
    return done.stdout


def test_the_losses_of_the_last_steps_are_shown_at_the_end(flight_dir: Path) -> None:
    """They are sent ten times a second, and what is left when the program ends."""
    path = ends_well(flight_dir, "print(session.writer.path)\ntrain(20)").strip()
    file = reader.open_path(path)
    losses = {record.step for record in file.steps() if has(record, StepFlag.LOSS)}
    file.close()
    assert losses == set(range(1, 21))


def test_an_error_of_the_user_s_on_the_device_is_raised_to_the_user(flight_dir: Path) -> None:
    """At whichever call comes first; no probe takes it for its own. How the process ends is torch's affair."""
    script = """
train(3)
try:
    torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")]
    train(200)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("device-side assert" in str(error), sum(fuse.errors for fuse in session.context.breakers.values()), flush=True)
"""
    done = ended(flight_dir, script)
    assert done.stdout.split() == ["True", "0"], done.stderr


@pytest.mark.parametrize(("allocator", "absent"), [("backend:cudaMallocAsync", ["oom"]), ("expandable_segments:True", [])])
def test_other_allocators(flight_dir: Path, allocator: str, absent: list[str]) -> None:
    """The asynchronous one has no observers of its end, and all else; its figures are shown."""
    script = """
train(5)
torch.cuda.synchronize()
graph, static = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
with torch.cuda.graph(graph):
    time.sleep(0.3)  # rounds of the sampler
    static += 1
graph.replay()
torch.cuda.synchronize()
print(*[fuse.probe for fuse in session.context.breakers.values() if fuse.errors])
"""
    assert ends_well(flight_dir, script, silent=False, PYTORCH_CUDA_ALLOC_CONF=allocator).split() == absent
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    names = {point.series.name for point in file.read(final=True).points}
    file.close()
    assert catalog.MEMORY_DEVICE_ALLOCATED.name in names


@pytest.mark.skipif(not HAS_NCCL, reason=f"{support.NEEDS_CUDA} and NCCL")
def test_nccl_s_flight_recorder_is_read_and_no_capture_harmed(flight_dir: Path) -> None:
    """It queries the events of collectives in flight: not in the backward pass of a capture, which asks for it first."""
    script = """
distributed, device = torch.distributed, torch.device("cuda", 0)
distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
probe, numbers = session._probe_manager._probes["collectives"], torch.ones(1 << 24, device=device)
static, weight = torch.ones(8, device=device), torch.ones(8, device=device, requires_grad=True)
train(3)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        (weight * static).sum().backward()
torch.cuda.synchronize()
weight.grad = None
probe.observe()
works = [distributed.all_reduce(numbers, async_op=True) for _ in range(50)]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    (weight * static).sum().backward()
graph.replay()
for work in works:
    work.wait()
train(1)
probe.sample()
print(probe._last is not None, sum(fuse.errors for fuse in session.context.breakers.values()))
distributed.destroy_process_group()
"""
    assert ends_well(flight_dir, script, silent=False).split() == ["True", "0"]


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
