"""This process in numbers: /proc says what psutil says, children are found however deep, and what is gone is nothing."""

from __future__ import annotations

import gc
import json
import mmap
import subprocess
import sys

import pytest

from tests.support import wait_until
from torchobs.probes.memory.process_stats import Machine, ProcessStats, parse_machine

MIB = 1024**2
MEMINFO = """MemTotal:       24682496 kB
MemFree:        19531200 kB
MemAvailable:   23655936 kB
SwapCached:            0 kB
SwapTotal:       2097148 kB
SwapFree:        1048576 kB
"""
COUNTED = """
import os, threading
from torchobs.probes.memory.process_stats import ProcessStats
process, release = ProcessStats(), threading.Event()
threads, files = process.threads(), process.files()
thread = threading.Thread(target=release.wait)
thread.start()
with open(os.devnull):
    assert process.threads() == threads + 1
    assert process.files().open == files.open + 1
release.set()
thread.join()
assert process.files() == files
"""
FAMILY = """
import json, subprocess, sys
import psutil
from torchobs.probes.memory.process_stats import ProcessStats
process = ProcessStats()
before = process.children()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
found = process.children()
reference = sum(one.memory_info().rss for one in psutil.Process().children(recursive=True))
child.communicate(b"\\n")
print(json.dumps([before, found, process.children(), reference]))
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
def process() -> ProcessStats:
    """This process, by the means of this system."""
    return ProcessStats()


def test_the_machine_is_what_psutil_says(process: ProcessStats) -> None:
    """What macOS gets from psutil is what Linux reads itself, since it is read ten times a second near a limit."""
    other = ProcessStats(linux=False)
    machine, same = process.machine(), other.machine()
    assert machine is not None
    assert same is not None
    assert machine.total == same.total
    assert machine.swap_total == same.swap_total
    wait_until(lambda: are_left_the_same(process.machine(), other.machine()))  # unless somebody took some in between


def are_left_the_same(one: Machine | None, other: Machine | None) -> bool:
    """Whether both say about the same of what other processes take and give back."""
    assert one is not None
    assert other is not None
    swap_free = pytest.approx(other.swap_free, rel=0.1, abs=MIB)
    return bool(one.available == pytest.approx(other.available, rel=0.1) and one.swap_free == swap_free)


def test_memory_that_is_touched_is_resident_and_anonymous(process: ProcessStats) -> None:
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


def test_threads_and_files_are_counted() -> None:
    """One more of each is one more, where nothing of another test's is ending."""
    subprocess.run([sys.executable, "-c", COUNTED], check=True, timeout=60)


def test_children_of_children_are_found() -> None:
    """A worker that a fork server started holds memory as any other does; no other test's child is there."""
    done = subprocess.run([sys.executable, "-c", FAMILY, GRANDCHILD], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    before, found, after, reference = json.loads(done.stdout)
    assert before == after == [0, 0]
    assert found[0] == 2
    assert found[1] > 40 * MIB
    assert found[1] == pytest.approx(reference, rel=0.1)


def test_the_proportional_set_is_within_the_resident_one(process: ProcessStats) -> None:
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
