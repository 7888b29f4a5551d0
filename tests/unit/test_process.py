"""This process in numbers: /proc and psutil say the same, children are found however deep, and what is gone is nothing."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import wait_until
from torchobs.probes.process import Machine, Process, parse_machine

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1024**2
MEMINFO = """MemTotal:       24682496 kB
MemFree:        19531200 kB
MemAvailable:   23655936 kB
SwapCached:            0 kB
SwapTotal:       2097148 kB
SwapFree:        1048576 kB
"""
GRANDCHILD = """
import subprocess, sys
code = "held = b'x' * (40 << 20); print(flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(flush=True)
input()
child.communicate(b"\\n")
"""


@pytest.fixture
def process() -> Process:
    """This process, by the means of this system."""
    return Process()


def test_both_ways_say_the_same(process: Process) -> None:
    """What macOS gets from psutil is what Linux reads itself."""
    other = Process(linux=False)
    assert process.resident().all == pytest.approx(other.resident().all, rel=0.05, abs=4 * MIB)
    assert process.threads() == other.threads()
    assert abs(process.files().open - other.files().open) <= 1
    assert process.files().limit == other.files().limit
    machine, same = process.machine(), other.machine()
    assert machine is not None
    assert same is not None
    assert machine.total == same.total
    assert machine.available == pytest.approx(same.available, rel=0.1)
    assert machine.swap_total == same.swap_total
    assert machine.swap_free == pytest.approx(same.swap_free, rel=0.1, abs=MIB)


def test_memory_that_is_touched_is_resident_and_anonymous(process: Process) -> None:
    """And no longer when it was given back."""
    gc.collect()  # lest anything else is given back meanwhile
    before = process.resident()
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, 64 * MIB, mmap.PAGESIZE):
        held[page] = 1
    after = process.resident()
    assert after.all - before.all == pytest.approx(64 * MIB, abs=4 * MIB)
    assert after.anonymous - before.anonymous == pytest.approx(64 * MIB, abs=4 * MIB)
    assert 0 < after.anonymous <= after.all
    held.close()
    assert process.resident().all < after.all - 32 * MIB


def test_threads_and_files_are_counted(process: Process) -> None:
    """One more of each is one more."""
    release = threading.Event()
    threads, files = process.threads(), process.files()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        with open(os.devnull) as _:  # noqa: PTH123  # a descriptor
            assert process.threads() == threads + 1
            assert process.files().open == files.open + 1
    finally:
        release.set()
        thread.join()
    assert process.files() == files


def test_children_of_children_are_found(process: Process, start: Callable[..., subprocess.Popen[str]]) -> None:
    """A worker that a fork server started holds memory as any other does."""
    before = process.children()
    assert before is not None
    child = start(sys.executable, "-c", GRANDCHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found = process.children()
    assert found is not None
    assert found.processes - before.processes == 2
    assert found.rss - before.rss > 40 * MIB
    reference = sum(one.memory_info().rss for one in psutil.Process().children(recursive=True))
    assert found.rss == pytest.approx(reference, rel=0.1)
    child.communicate("\n")
    wait_until(lambda: process.children() == before)


def test_the_proportional_set_is_within_the_resident_one(process: Process) -> None:
    """Pages that others have, too, count by their share."""
    share = process.proportional()
    assert share is not None
    assert 0 < share <= process.resident().all * 1.02


def test_meminfo_is_read_in_bytes() -> None:
    """Available is what the kernel estimates; one that does not is an old one."""
    machine = parse_machine(MEMINFO)
    assert machine == Machine(24682496 * 1024, 23655936 * 1024, 2097148 * 1024, 1048576 * 1024)
    assert machine is not None
    assert machine.left == (23655936 + 1048576) * 1024
    assert parse_machine(MEMINFO.replace("MemAvailable", "MemAvail")) is None
    assert parse_machine("") is None
    assert parse_machine("MemTotal: 1 kB\nMemAvailable: 1 kB\n") == Machine(1024, 1024, 0, 0)
