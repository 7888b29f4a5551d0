"""A rank that a signal ends: it ends as it would without torchobs, and the signal is named, and of a crash the place."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from signal import SIGABRT, SIGFPE, SIGKILL, SIGSEGV
from typing import TYPE_CHECKING

import pytest

from tests.support import NEEDS_COMPILER, ROOT, clean_environment, wait_until
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.exporter.config import ExporterConfig
from torchobs.flight import endings
from torchobs.flight.native import compiled
from torchobs.ranks.runs import load
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchobs.ranks.snapshot import Rank


native = compiled()
COMPILED = pytest.mark.skipif(native is None, reason=NEEDS_COMPILER)
FROM_A_TERMINAL = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""Where the tests themselves run under nohup"""
WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"
ENDS_CHILDREN = """
import os, signal
for _ in range(50):
    child = os.fork()
    if not child: signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
"""


@pytest.fixture
def seen(flight_dir: Path) -> Iterator[Callable[[], Rank]]:
    """The one rank of the directory, once it is dead, as the exporter sees it."""
    scanner = Scanner(ExporterConfig(flight_dir=str(flight_dir)))

    def look() -> Rank:
        (dead,) = wait_until(lambda: [rank for rank in scanner.scan().ranks if not rank.up], timeout_s=15)
        return dead

    yield look
    scanner.close()


def begin(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, script: str) -> subprocess.Popen[str]:
    """Start the script, and wait for its first line."""
    environment = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    child = start(sys.executable, "-c", script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize(
    ("script", "number", "status", "state", "reason"),
    [
        (WAITS, signal.SIGTERM, -signal.SIGTERM, "failed", "terminated"),
        (WAITS, signal.SIGKILL, -signal.SIGKILL, "lost", "lost"),
        # children are ended by the same signal, as multiprocessing ends its own, however young they are
        (
            f"{ENDS_CHILDREN}{WAITS}",
            signal.SIGKILL,
            -signal.SIGKILL,
            "lost",
            "lost",
        ),
        (
            "import re\nprint('ready', flush=True)\nre.match('(a|aa)+$' , 'a' * 200 + 'b')\n",
            signal.SIGTERM,
            -signal.SIGTERM,
            "failed",
            "terminated",
        ),
        pytest.param(WAITS, signal.SIGHUP, -signal.SIGHUP, "failed", "terminated", marks=COMPILED),
        pytest.param(
            "import re\nprint('ready', flush=True)\nre.match('(a|aa)+$' , 'a' * 200 + 'b')\n",
            signal.SIGUSR1,
            -signal.SIGUSR1,
            "failed",
            "terminated",
            marks=COMPILED,
        ),
        (f"{ENDS_CHILDREN.replace('SIGTERM', 'SIGUSR2')}{WAITS}", signal.SIGKILL, -signal.SIGKILL, "lost", "lost"),
        (
            f"torchobs.shutdown()\n{WAITS}",
            signal.SIGUSR1,
            -signal.SIGUSR1,
            "finished",
            "finished",
        ),
    ],
    ids=[
        *("by default", "SIGKILL", "only a child's", "the GIL is held"),
        *("a closed terminal", "SIGUSR1 while the GIL is held", "only a child's SIGUSR2", "after the end"),
    ],
)
def test_who_was_told_to_end_says_so(  # noqa: PLR0913, PLR0917  # one row of the table
    start: Callable[..., subprocess.Popen[str]],
    flight_dir: Path,
    seen: Callable[[], Rank],
    script: str,
    number: int,
    status: int,
    state: str,
    reason: str,
) -> None:
    """The exit status is the one without torchobs, and a rank is terminated only by a signal of its own."""
    child = begin(start, flight_dir, f"{FROM_A_TERMINAL}import torchobs\ntorchobs.init()\n{script}")
    child.send_signal(number)
    assert child.wait(timeout=30) == status
    rank = seen()
    assert (rank.state, rank.reason) == (state, reason)


def open_files(pid: int) -> list[str]:
    """Return the targets of the process's descriptors; one that is closed meanwhile is left out."""
    return [target for path in Path(f"/proc/{pid}/fd").iterdir() if (target := read_link(path))]


def read_link(path: Path) -> str | None:
    """Return the link's target, ``None`` where it is gone."""
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return None


def test_the_mark_moves_with_the_lock(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, seen: Callable[[], Rank]
) -> None:
    """A lock file that somebody deleted is made again, and SIGTERM leaves its mark in the new one."""
    child = begin(start, flight_dir, f"import torchobs\ntorchobs.init()\n{WAITS}")
    (lock,) = flight_dir.glob("*.lock")
    lock.unlink()
    # the old descriptor is closed last
    wait_until(lambda: lock.exists() and f"{lock} (deleted)" not in open_files(child.pid), timeout_s=30)
    child.terminate()
    assert child.wait(timeout=30) == -signal.SIGTERM
    assert lock.stat().st_size > 0
    assert seen().reason == "terminated"


def test_nothing_is_left_of_it_after_the_end(flight_dir: Path) -> None:
    """After shutdown() SIGTERM is what it was, and a handler that somebody installed is still theirs."""
    look = "print(int(next(l for l in open('/proc/self/status') if l.startswith('SigCgt')).split()[1], 16) >> 14 & 1)"
    script = (
        "import signal, torchobs\n"
        f"{look}\ntorchobs.init(); {look}\ntorchobs.shutdown(); {look}\n"
        "torchobs.init(); signal.signal(signal.SIGTERM, print); torchobs.shutdown(); "
        f"{look}\nprint(signal.getsignal(signal.SIGTERM) is print)"
    )
    environment = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "0", "1", "True"], done.stderr
    assert all(not path.stat().st_size for path in flight_dir.glob("*.lock"))


def run(flight_dir: Path, script: str) -> str:
    """Return what the script prints."""
    environment = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_stacks_that_the_user_wants_on_sigterm_stay_theirs(flight_dir: Path) -> None:
    """``faulthandler.register`` of one's own writes where it was told to and survives, during the session and after it."""
    script = (
        "import faulthandler, os, signal, torchobs\ntorchobs.init()\n"
        "stacks = open(os.environ['TORCHOBS_DIR'] + '/stacks', 'w+')\n"
        "faulthandler.register(signal.SIGTERM, file=stacks)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntorchobs.shutdown()\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "stacks.seek(0)\nprint(stacks.read().count('Current thread'))"
    )
    assert run(flight_dir, script) == "2\n"
    assert all(not path.stat().st_size for path in flight_dir.glob("*.lock"))


def test_forks_of_several_threads_leave_sigterm_deliverable(flight_dir: Path) -> None:
    """Neither a child nor a thread that forks beside another one keeps SIGTERM blocked."""
    script = """
import os, signal, sys, threading, torchobs, warnings
warnings.simplefilter("ignore")  # since Python 3.12 os.fork() warns of threads
torchobs.init()
blocked = []
def is_blocked():
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
def fork():
    for _ in range(50):
        child = os.fork()
        if not child: os._exit(is_blocked())
        blocked.append(os.waitpid(child, 0)[1] != 0 or is_blocked())
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=fork) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(blocked), sum(blocked))
"""
    assert run(flight_dir, script) == "200 0\n"


def mark_signals() -> None:
    """Mark the signals that end a process by their default."""
    memory = ctypes.create_string_buffer(64)
    assert native is not None
    endings.mark_exits(native, native.Map(memory, ctypes.addressof(memory), 64), 8)


def caught() -> int:
    """Return the signals that have a handler, of Python's or not."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)


@COMPILED
def test_handlers_come_and_go_without_python_s_knowledge() -> None:
    """What others ask Python for is as it was, and a handler that somebody installed later stays."""
    before, bit = caught(), 1 << signal.SIGUSR2 - 1
    mark_signals()
    try:
        assert caught() & ~before & bit
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        signal.signal(signal.SIGUSR1, lambda *_: None)
        endings.unmark_exits(native)
        assert caught() == before | 1 << signal.SIGUSR1 - 1
    finally:
        endings.unmark_exits(native)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@COMPILED
def test_a_signal_with_a_handler_is_left_alone() -> None:
    """Somebody handles or ignores it: it will not end the process."""
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        mark_signals()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        endings.unmark_exits(native)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@COMPILED
def test_a_child_of_fork_has_the_defaults() -> None:
    """What ends it is nobody's exit but its own."""
    before = caught()
    mark_signals()
    try:
        child = os.fork()
        if not child:
            os._exit(int(caught() != before))
        assert os.waitpid(child, 0)[1] == 0
        assert caught() != before
    finally:
        endings.unmark_exits(native)


SCRIPT = """
import ctypes, faulthandler, os, signal, sys, threading, time
import torchobs
class Crash:
    def read(self):
        ctypes.string_at(0)
crash = Crash().read
def native():
    # a thread of its own that knows nothing of Python
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    signal.pause()
"""
READ = "in read (SIGSEGV, a segmentation fault), before its first step was complete."


def crash_in(flight_dir: Path, body: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script: a process of its own, for the fork server's have handlers of their own."""
    environment = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), **(more or {})}
    return subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}\n{body}\n"], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def said(flight_dir: Path) -> list[str]:
    """What is said of the one rank."""
    (report,), _ = load(list(flight_dir.glob("*.flight")))
    return [finding.long for finding in diagnose(report)]


@pytest.mark.parametrize(
    ("body", "number", "told"),
    [
        ("torchobs.init(); crash()", SIGSEGV, READ),
        ("torchobs.init(); thread = threading.Thread(target=crash); thread.start(); thread.join()", SIGSEGV, READ),
        ("torchobs.init(); os.kill(os.getpid(), signal.SIGFPE)", SIGFPE, "(SIGFPE, an arithmetic error"),
        ("torchobs.init(); native()", SIGABRT, "crashed in a thread that ran no Python code (SIGABRT, "),
        ("torchobs.init(); torchobs.shutdown(); torchobs.init(); crash()", SIGSEGV, READ),
    ],
    ids=["main thread", "another thread", "sent", "native thread", "second session"],
)
def test_the_signal_and_the_place_are_told(flight_dir: Path, body: str, number: int, told: str) -> None:
    """By `inspect` and by the exporter; the script's own output and its status stay as they are."""
    plain, done = (
        crash_in(flight_dir, body.replace("torchobs.init()", "0").replace("torchobs.shutdown()", "0")),
        crash_in(flight_dir, body),
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, plain.stdout, plain.stderr)
    for path in sorted(flight_dir.glob("*.flight"), key=lambda one: one.stat().st_mtime_ns)[:-1]:
        path.unlink()  # the first session
    assert told in said(flight_dir)[0]
    scanner = Scanner(ExporterConfig(flight_dir=str(flight_dir)))
    try:
        (rank,) = wait_until(lambda: [rank for rank in scanner.scan().ranks if not rank.up])
        assert (rank.state, rank.reason) == ("failed", "crashed")
    finally:
        scanner.close()


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("torchobs.init(); os.kill(os.getpid(), signal.SIGKILL)", SIGKILL),
        ("faulthandler.enable(); torchobs.init(); crash()", SIGSEGV),
        ("torchobs.init(); faulthandler.enable(); crash()", SIGSEGV),
        ("torchobs.init(); faulthandler.disable(); crash()", SIGSEGV),
    ],
    ids=["no mark of SIGKILL", "the user's before", "the user's later", "switched off"],
)
def test_faulthandler_is_the_user_s(flight_dir: Path, body: str, number: int) -> None:
    """What it writes goes where it would go, and the rank is gone without a word."""
    done = crash_in(flight_dir, body)
    assert done.returncode == -number
    assert ("Segmentation fault" in done.stderr) is ("enable()" in body)
    assert "vanished without a word" in said(flight_dir)[0]


def test_handlers_of_others_are_left_alone(flight_dir: Path) -> None:
    """A virtual machine in the process lives on SIGSEGV; with one signal taken none is."""
    look = "print(faulthandler.is_enabled())"
    done = crash_in(flight_dir, f"signal.signal(signal.SIGBUS, print); torchobs.init(); {look}")
    assert (done.stdout, done.returncode) == ("False\n", 0)
    done = crash_in(flight_dir, f"torchobs.init(); {look}; torchobs.shutdown(); {look}")
    assert (done.stdout.split(), done.returncode) == (["True", "False"], 0)


def test_children_and_what_comes_after_the_session_leave_no_mark(flight_dir: Path) -> None:
    """A worker that crashes, and an interpreter that crashes at its very end, are not the rank."""
    body = "torchobs.init()\nif not os.fork(): crash()\nassert os.wait()[1] == signal.SIGSEGV\ntorchobs.shutdown()\ncrash()"
    assert crash_in(flight_dir, body).returncode == -SIGSEGV
    assert "finished in order" in said(flight_dir)[0]
    assert [path.stat().st_size for path in flight_dir.glob("*.lock")] == [0]
