"""Resources against thresholds: percent of what this container may have, and one call for each time that it is too much."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.test_cgroup import GIB, plant, v2_group
from torchobs import guard
from torchobs.guard.resource_usage import LEAST_CPU_S, ResourceGuard

PROC = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}


def container(root: Path, *, used_s: float, memory_limit: int = 2 * GIB) -> str:
    """A container with half a core, which has used that much of it, and 1.25 GiB that cannot be reclaimed."""
    files = v2_group("", limit=str(memory_limit), cpu="50000 100000")
    stat = files["sys/fs/cgroup/cpu.stat"].replace("5000000", str(int(used_s * 1e6)))
    return plant(root, {**files, **PROC, "sys/fs/cgroup/cpu.stat": stat})


def test_percent_is_of_the_container_s_limits(tmp_path: Path) -> None:
    """Promise: half a core and 2 GiB are what counts, not the machine; a threshold may be in bytes."""
    root = container(tmp_path, used_s=1.0)
    watched = ResourceGuard({"cpu": 90.0, "memory": GIB}, None, ".", 10.0, root)
    container(tmp_path, used_s=1e9)
    time.sleep(LEAST_CPU_S)
    report = watched.check()
    assert (report["cpu"].where, report["cpu"].limit_cores, report["cpu"].ok) == ("container", 0.5, False)
    memory = report["memory"]
    assert (memory.where, memory.percent, memory.threshold, memory.ok) == ("container", 62.5, 50.0, False)
    assert "container: memory is at 62 %, above 50 %" in map(str, report.problems)
    assert ResourceGuard({"memory": 1.5 * GIB}, None, ".", 10.0, root).check().ok


def test_without_a_container_it_is_the_machine() -> None:
    """Promise: on a laptop the figures are psutil's."""
    report = guard.resources(cpu=None).check()
    assert {usage.resource for usage in report.usages} == {"memory", "disk"}
    disk = psutil.disk_usage(".")
    assert report["disk"].percent == pytest.approx(100 * disk.used / (disk.used + disk.free), abs=1)
    assert (report["memory"].limit_bytes or 0) <= psutil.virtual_memory().total


def test_one_call_for_each_time_that_it_is_too_much(tmp_path: Path) -> None:
    """Promise: while it stays above nothing is repeated; after it was below it counts again."""
    calls: list[guard.ResourceReport] = []
    watched = ResourceGuard({"memory": 60.0}, calls.append, ".", 10.0, container(tmp_path, used_s=1.0))
    assert not watched.check()
    assert not watched.check()
    assert len(calls) == 1
    container(tmp_path, used_s=1.0, memory_limit=4 * GIB)
    assert watched.check()
    container(tmp_path, used_s=1.0)
    assert not watched.check()
    assert len(calls) == 2


def test_it_watches_in_a_thread_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Promise: the callback comes while the training goes on; one that raises ends the watch alone, which is logged."""
    called = threading.Event()
    with guard.resources(disk=0, on_exceed=lambda _: called.set(), interval_s=0.01) as watched:
        assert called.wait(30)
        assert watched._thread is not None
        assert watched._thread.is_alive()
    assert not watched._thread.is_alive()

    def fail(_: object) -> None:
        raise KeyError("mine")

    with guard.resources(disk=0, on_exceed=fail, interval_s=0.01) as watched:
        assert watched._thread is not None
        watched._thread.join(30)
    assert "resources are watched no more: KeyError" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cpu": 900}, "from 0 to 100, or None"),
        ({"memory": 900}, r"or bytes, from 1 MiB \(2\*\*20\) on"),
        ({"disk": float("nan")}, "from 0 to 100"),
        ({"gpu_memory": "90"}, "from 0 to 100"),
        ({"cpu": 0.9}, "less than one percent: as a share it is 90 percent"),
        ({"interval_s": 0}, "a time in seconds"),
        ({"interval_s": "soon"}, "a time in seconds"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Promise: a threshold that is no percentage is an error where it is written."""
    with pytest.raises(ValueError, match=message):
        guard.resources(**arguments)
    with pytest.raises(FileNotFoundError):
        guard.resources(path=os.path.join("not", "there"))  # noqa: PTH118  # as users give it


def test_cores_are_those_that_this_process_may_use() -> None:
    """Promise: without a quota a process that is held to one core has one."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        cpu = guard.resources().check()["cpu"]
    finally:
        os.sched_setaffinity(0, allowed)
    assert (cpu.limit_cores or 0.0) <= 1.0
