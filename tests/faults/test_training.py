"""Training with torchobs: bit for bit the same, no larger after long, its signals its own, its end by the kernel told."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests.cgroups import inside, memory_cgroup
from tests.exporters import Caller, Service
from tests.support import NEEDS_COMPILER, ROOT, wait_until
from torchobs.exporter.config import ExporterConfig
from torchobs.support import error_guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


STEPS = 200


def train(precision: str) -> str:
    """Train with everything that we hook; return a digest of every loss and weight."""
    torch.manual_seed(7)
    digest = hashlib.sha256()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=precision == "fp16")
    data = TensorDataset(torch.randn(320, 16), torch.randint(0, 4, (320,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    done = 0
    while done < STEPS:
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
                loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            torchobs.log(tokens=16)
            with torchobs.phase("other things"):
                digest.update(loss.detach().numpy().tobytes())
            done += 1
        model.eval()
        with torch.no_grad():
            digest.update(model(data.tensors[0]).numpy().tobytes())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_hundred_steps_are_bit_identical(flight_dir: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Losses, evaluations and weights after 200 steps have one digest in all three cases."""
    plain = train(precision)
    with torchobs.init(flight_dir=flight_dir, grad_interval=1) as session:
        assert session.active
        observed = train(precision)
        assert session.context is not None
        assert session.context.recorder.step >= STEPS - 1
    called: list[str] = []
    original = error_guard.CircuitBreaker.guard

    def failing(breaker: error_guard.CircuitBreaker, function: Any) -> Any:
        def fail(*args: Any) -> None:
            del args
            called.append(function.__qualname__)
            raise RuntimeError("a bug of ours")

        guarded = original(breaker, fail)

        def every_time(*args: Any) -> Any:
            breaker.is_open = False  # so that every call raises, not only the first
            return guarded(*args)

        return every_time

    monkeypatch.setattr(error_guard.CircuitBreaker, "guard", failing)
    with torchobs.init(flight_dir=flight_dir, grad_interval=1) as session:
        assert session.active
        broken = train(precision)
    monkeypatch.undo()
    assert len(set(called)) >= 8, "the hooks were not reached"
    assert (observed, broken) == (plain, plain)


LIMIT = 768 * 1024**2
"""Torch fits, twice."""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup."""
    with memory_cgroup(LIMIT) as path:
        yield path


@pytest.fixture
def rank(cgroup: Path, start: Callable[..., subprocess.Popen[str]], flight_dir: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Start a rank in the cgroup."""

    def one(how: str) -> subprocess.Popen[str]:
        command = (*inside(cgroup), sys.executable, "-m", "tests.faults.memory_hog", str(flight_dir), how)
        return start(*command, cwd=ROOT, stdout=subprocess.PIPE)

    return one


@pytest.fixture
def page(flight_dir: Path) -> Iterator[Service]:
    """An exporter of its directory."""
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
        yield service


def reasons(page: Service) -> dict[str, float]:
    """The way a rank ended: one series."""
    names = ("finished", "exception", "exit_code", "interrupted", "lost", "out_of_memory")
    values = {reason: page.value("torchobs_rank_exit", reason=reason) for reason in names}
    return {reason: value for reason, value in values.items() if value is not None}


def said(process: subprocess.Popen[str], word: str) -> None:
    """Wait until the rank has said that word."""
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


def test_a_rank_that_the_kernel_kills_at_its_limit_ran_out_of_memory(
    rank: Callable[[str], subprocess.Popen[str]], page: Service
) -> None:
    """It is lost, since it said nothing; and what it said last of its memory tells why."""
    process = rank("grows")
    assert process.wait(timeout=120) == -signal.SIGKILL
    wait_until(lambda: page.state() == "lost")
    assert reasons(page) == {"out_of_memory": 1}
    assert [run["action"] for run in Caller(page.address).get("/ranks")["ended"]] == ["unknown"]
    assert page.value("torchobs_memory_host_utilization_ratio") is None, "a dead rank has no memory"


def test_a_rank_that_falls_with_a_worker_that_was_killed_ran_out_of_memory(
    rank: Callable[[str], subprocess.Popen[str]], page: Service
) -> None:
    """The kernel takes one process of the cgroup; who takes the others a moment later is not the cause."""
    process = rank("worker")
    said(process, str(-signal.SIGKILL))
    wait_until(lambda: page.value("torchobs_cgroup_memory_oom_kills_total") == 1, timeout_s=30)
    wait_until(lambda: (page.value("torchobs_memory_host_utilization_ratio", limit="cgroup") or 1.0) < 0.8)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: page.state() == "lost")
    assert reasons(page) == {"out_of_memory": 1}
    ended = Caller(page.address).get("/ranks")["ended"]
    assert [(run["action"], run["cause"]) for run in ended] == [("restart", "killed_beside")]


STEPS_GROWTH = 10_000
WARM = 4_000
"""Until rings are full, and the allocator has what it wants."""
MEMORY = 2 * 1024**2
"""Bytes that are allowed: what the arenas of an allocator come to."""
BOUNDED = 5_000
"""Objects in lists of bounded length, which fill and are emptied: over 140,000 steps the count moved between -900 and 3,600."""
BLOCKS = 0.1
"""Objects of Python's for each step that are allowed: one that is forgotten at every step is ten times that."""


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def blocks() -> int:
    """Count Python's objects: the fewest within two seconds without training.

    The sampler thread holds some ten thousand until it has worked them off; they are not forgotten.
    """
    gc.collect()
    fewest = sys.maxsize
    for _ in range(20):
        time.sleep(0.1)
        fewest = min(fewest, sys.getallocatedblocks())
    return fewest


def test_many_steps_leave_nothing_behind(flight_dir: Path) -> None:
    """No more memory and no more objects at the end than soon after the start; the file has its size, every step is counted."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

    with torchobs.init(flight_dir=flight_dir) as session:
        assert session.writer is not None
        path = Path(session.writer.path)
        size = path.stat().st_size
        train(WARM)
        objects, before = blocks(), resident()
        train(STEPS_GROWTH)
        forgotten, grown = blocks() - objects, resident() - before
        assert session.context is not None
        session.context.recorder.flush()
        assert session.context.recorder.step == WARM + STEPS_GROWTH
        assert path.stat().st_size == size
    assert grown < MEMORY, f"{grown} bytes more after {STEPS_GROWTH} steps"
    assert forgotten < BOUNDED + BLOCKS * STEPS_GROWTH, f"{forgotten} objects more after {STEPS_GROWTH} steps"


BUILD = ["-std=c11", "-O1", "-g", "-fPIC", "-shared"]
CHECKS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Werror"]
CALLS = 4_000


@pytest.mark.long
def test_no_call_with_anything_reads_or_writes_beyond(tmp_path: Path, share_of: Callable[[int], int]) -> None:
    """Promise: whatever the writer and the hooks are called with, they leave what Python's leave, and no sanitizer objects."""
    include = Path(sysconfig.get_paths()["include"])
    compiler = shutil.which("gcc")
    if compiler is None or not (include / "Python.h").exists():
        pytest.skip(NEEDS_COMPILER)
    module = tmp_path / "_native.abi3.so"
    command = [compiler, *BUILD, *CHECKS, f"-I{include}", str(ROOT / "torchobs" / "_native.c"), "-o", str(module), "-lm"]
    subprocess.run(command, check=True, timeout=120)
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = {
        **os.environ, "LD_PRELOAD": runtime, "PYTHONMALLOC": "malloc", "PYTHONPATH": str(ROOT),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    }  # fmt: skip
    script = [sys.executable, "-m", "tests.scripts.fuzz_native", str(module), str(share_of(CALLS)), "7"]
    done = subprocess.run(script, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=550)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "properties" in done.stdout
