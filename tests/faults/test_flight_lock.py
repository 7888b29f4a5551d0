"""The lock table: what keeps a rank's lock, what drops it, and when the kernel lets go."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import flights
from tests.support import wait_until
from torchobs.flight.files import lock
from torchobs.flight.files.create import lock_name
from torchobs.flight.files.location import open_directory
from torchobs.flight.format.layout import MIN_SIZE
from torchobs.flight.writer.writer import open_writer

Play = Callable[[str], "Holder"]


class Holder:
    """A process that holds a lock, as seen from outside."""

    def __init__(self, process: subprocess.Popen[str], directory_fd: int) -> None:
        assert process.stdout
        self.process, self._directory_fd = process, directory_fd
        _, self.name = process.stdout.readline().split()

    def holds(self) -> bool:
        """Whether the lock is held."""
        return lock.is_held(self._directory_fd, lock_name(self.name))


@pytest.fixture
def play(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path) -> Play:
    """Start a holder in that scene."""
    directory_fd = open_directory(str(flight_dir))
    paths = os.pathsep.join([os.getcwd(), *sys.path])  # noqa: PTH109  # where `tests` lies

    def one(scene: str) -> Holder:
        command = (sys.executable, "-m", "tests.faults.flight_holder", flight_dir, scene)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return Holder(start(*command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, **pipes), directory_fd)

    return one


@pytest.mark.parametrize(
    "scene",
    [
        "nothing",
        "open_and_close_others",
        "read_own_file",
        "unmap_another",
        "fork_and_exit",
        "fork_in_c_and_exit",
        "fork_in_c_and_exec",
    ],
)
def test_a_living_rank_keeps_its_lock(play: Play, scene: str) -> None:
    """Whatever other files it opens and closes, whatever it reads, and however its children begin and end."""
    holder = play(scene)
    assert holder.holds()
    holder.process.kill()
    holder.process.wait()
    assert not holder.holds()


def test_a_child_that_outlives_the_rank_does_not_hold_its_lock(play: Play) -> None:
    """A DataLoader worker left behind by a SIGKILL is no living rank."""
    holder = play("leave_a_child")
    assert holder.holds()
    holder.process.kill()
    holder.process.wait()
    assert not holder.holds()


def test_exec_drops_the_lock(play: Play) -> None:
    """A process that has become another program is no rank any more, though its pid lives."""
    holder = play("become_another_program")
    wait_until(lambda: not holder.holds())
    assert holder.process.poll() is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGABRT])
def test_the_lock_is_free_only_when_the_kernel_has_let_the_process_go(play: Play, tmp_path: Path, end: signal.Signals) -> None:
    """Teardown of 256 MiB, or their core dump: free means that the memory is given back and the core is written."""
    holder = play("grow_large")
    memory = Path(f"/proc/{holder.process.pid}/statm")
    assert int(memory.read_text().split()[1]) > 10_000
    holder.process.send_signal(end)
    wait_until(lambda: not holder.holds(), timeout_s=60.0, interval_s=0.0)
    assert memory.read_text().split()[1] == "0"
    dumped = [core.stat().st_size for core in tmp_path.glob("core*")]
    holder.process.wait()
    assert dumped == [core.stat().st_size for core in tmp_path.glob("core*")]


def test_who_asks_while_another_thread_takes_the_lock_does_not_drop_it(
    flight_dir: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """A hundred writers made while two threads ask about every lock there is: seen from outside, each of them is held."""
    directory_fd = open_directory(str(flight_dir))
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            for name in [entry.name for entry in flight_dir.iterdir()]:
                if name.endswith(".lock"):
                    lock.is_held(directory_fd, name)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    writers = [open_writer(flights.place(flight_dir), {"rank": rank}, MIN_SIZE) for rank in range(100)]
    done.set()
    for asker in askers:
        asker.join()
    assert _held_from_outside(flight_dir, start) == sorted(lock_name(writer.name) for writer in writers)
    for writer in writers:
        writer.close()
    assert _held_from_outside(flight_dir, start) == []
    os.close(directory_fd)


def _held_from_outside(directory: Path, start: Callable[..., subprocess.Popen[str]]) -> list[str]:
    code = (
        "import os, sys; from torchobs.flight.files import lock; fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "print(*[name for name in sorted(os.listdir(fd)) if name.endswith('.lock') and lock.is_held(fd, name)])"
    )
    held, _ = start(sys.executable, "-c", code, directory, stdout=subprocess.PIPE).communicate(timeout=60)
    return held.split()


def test_a_forked_child_asks_like_anybody_else(flight_dir: Path) -> None:
    """What the parent holds, the child does not hold; asking drops nothing, and the mutex is not left locked."""
    writer = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    directory_fd, name = open_directory(str(flight_dir)), lock_name(writer.name)
    child = os.fork()
    if not child:
        os._exit(10 * lock.held_here(directory_fd, name) + lock.is_held(directory_fd, name))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert lock.is_held(directory_fd, name)
    writer.close()
    os.close(directory_fd)
