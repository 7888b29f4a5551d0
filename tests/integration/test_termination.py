"""A SIGTERM that somebody sent: the process ends by it as it always would, and the exporter knows why."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import NEEDS_COMPILER, ROOT, clean_environment, wait_until
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.writer.native import compiled
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.ranks.snapshot import Rank

COMPILED = pytest.mark.skipif(compiled() is None, reason=NEEDS_COMPILER)
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
        (
            f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n{WAITS}",
            signal.SIGTERM,
            143,
            "failed",
            "terminated",
        ),
        (
            f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n{WAITS}",
            signal.SIGTERM,
            3,
            "failed",
            "terminated",
        ),
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
            "crashed",
            marks=COMPILED,
        ),
        pytest.param(WAITS, signal.SIGXCPU, -signal.SIGXCPU, "failed", "crashed", marks=COMPILED),
        (f"{ENDS_CHILDREN.replace('SIGTERM', 'SIGUSR2')}{WAITS}", signal.SIGKILL, -signal.SIGKILL, "lost", "lost"),
        (
            f"import signal, sys\nsignal.signal(signal.SIGHUP, lambda *_: sys.exit(0))\n{WAITS}",
            signal.SIGHUP,
            0,
            "finished",
            "finished",
        ),
        (
            f"torchobs.shutdown()\n{WAITS}",
            signal.SIGUSR1,
            -signal.SIGUSR1,
            "finished",
            "finished",
        ),
    ],
    ids=[
        *("by default", "SIGKILL", "own handler", "own handler, own status", "only a child's", "the GIL is held"),
        *("a closed terminal", "SIGUSR1 while the GIL is held", "out of processor time", "only a child's SIGUSR2"),
        *("own handler of SIGHUP", "after the end"),
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


def test_a_second_session_marks_after_a_handler_has_come_and_gone(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, seen: Callable[[], Rank]
) -> None:
    """A handler for the time of a last checkpoint replaces ours; a session that begins after it leaves a mark again."""
    script = (
        "import signal, torchobs\ntorchobs.init()\nsignal.signal(signal.SIGTERM, print)\ntorchobs.shutdown()\n"
        f"signal.signal(signal.SIGTERM, signal.SIG_DFL)\ntorchobs.init()\n{WAITS}"
    )
    child = begin(start, flight_dir, script)
    child.terminate()
    assert child.wait(timeout=30) == -signal.SIGTERM
    assert seen().reason == "terminated"


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
