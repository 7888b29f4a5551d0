"""The kernel kills a rank for its memory: the page says so, by what the rank said last. Other kills stay unexplained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cgroups import inside, memory_cgroup
from tests.exporters import Service
from tests.support import ROOT, wait_until
from torchobs.exporter.config import ExporterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT = 768 * 1024**2
"""Torch fits, twice."""
Start = "Callable[..., subprocess.Popen[str]]"


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
    known = ("finished", "exception", "exit_code", "interrupted", "lost", "out_of_memory")
    values = {reason: page.value("torchobs_rank_exit", reason=reason) for reason in known}
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
    assert page.value("torchobs_memory_host_utilization_ratio") is None, "a dead rank has no memory"


def test_a_rank_that_is_killed_far_from_its_limit_is_lost(rank: Callable[[str], subprocess.Popen[str]], page: Service) -> None:
    """Somebody killed it: nobody knows why."""
    process = rank("waits")
    said(process, "trains")
    share = wait_until(lambda: page.value("torchobs_memory_host_utilization_ratio", limit="cgroup") or 0.0)
    assert 0.1 < share < 0.8
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: page.state() == "lost")
    assert reasons(page) == {"lost": 1}


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
