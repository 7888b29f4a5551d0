"""What keeps a rank's lock and what drops it: descriptors that a script closes, forks, and locks that are held meanwhile."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests import flights
from tests.faults.closing_rank import MINE, numbers_below
from tests.faults.flight_holder import KEEPING
from tests.support import ROOT, clean_environment, wait_until
from tests.training import recording, train
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig
from torchobs.flight import files, reader
from torchobs.flight.directory import opened
from torchobs.flight.files import lock_name
from torchobs.flight.layout import MIN_SIZE, PHASE_NAMES, Exit
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.ranks.scanner import Scanner
from torchobs.support.after_fork import importing

if TYPE_CHECKING:
    from pathlib import Path

    from torchobs.ranks.snapshot import Rank


class Holder:
    """A process that holds a lock, as seen from outside."""

    def __init__(self, process: subprocess.Popen[str], directory_fd: int) -> None:
        self.process, self._directory_fd = process, directory_fd

    def plays(self, scene: str) -> bool:
        """Let it do the next thing; return whether it holds its lock behind that."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said, self._name = self.process.stdout.readline().split()
        assert said == scene
        return self.holds()

    def holds(self) -> bool:
        """Whether the lock is held."""
        return files.is_locked(self._directory_fd, lock_name(self._name))


@pytest.fixture
def play(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, directory_fd: int) -> Callable[..., Holder]:
    """Start a holder of these scenes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = (sys.executable, "-m", "tests.faults.flight_holder", flight_dir)
    return lambda *scenes: Holder(start(*command, *scenes, cwd=ROOT, **pipes), directory_fd)


def test_a_living_rank_keeps_its_lock(play: Callable[..., Holder]) -> None:
    """Whatever other files it opens and closes, whatever it reads, and however its children begin and end.

    It is gone with the rank: a DataLoader worker that a SIGKILL leaves behind is no living one.
    """
    scenes = [scene.__name__ for scene in KEEPING]
    holder = play(*scenes)
    assert [scene for scene in scenes if not holder.plays(scene)] == []
    holder.process.kill()
    holder.process.wait()
    assert not holder.holds()


def test_exec_drops_the_lock(play: Callable[..., Holder]) -> None:
    """A process that has become another program is no rank any more, though its pid lives."""
    holder = play("become_another_program")
    holder.plays("become_another_program")
    wait_until(lambda: not holder.holds())
    assert holder.process.poll() is None


def test_who_asks_while_another_thread_takes_the_lock_does_not_drop_it(
    flight_dir: Path, directory_fd: int, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """A hundred writers made while two threads ask about every lock there is: seen from outside, each of them is held."""
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            for name in [entry.name for entry in flight_dir.iterdir()]:
                if name.endswith(".lock"):
                    files.is_locked(directory_fd, name)

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


def _held_from_outside(directory: Path, start: Callable[..., subprocess.Popen[str]]) -> list[str]:
    code = (
        "import os, sys; from torchobs.flight import files; fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "print(*[name for name in sorted(os.listdir(fd)) if name.endswith('.lock') and files.is_locked(fd, name)])"
    )
    locked, _ = start(sys.executable, "-c", code, directory, stdout=subprocess.PIPE).communicate(timeout=60)
    return locked.split()


LOGGED = "closed descriptors that it had not opened"


class Training:
    """One that closes descriptors, as it is seen from outside."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]], directory: Path, folder: Path, how: str, log: Path) -> None:
        self.directory, self._folder, self._log = directory, folder, log
        folder.mkdir()
        (directory / "control").mkdir(parents=True, mode=0o700)
        with log.open("w") as errors:
            argv = (sys.executable, "-m", "tests.faults.closing_rank", str(directory), str(folder), how)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = start(*argv, torch=True, env=clean_environment(), **pipes)

    def say(self, word: str) -> str:
        """Have it do something; return what it said to that."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        answer = ""
        while (line := self.process.stdout.readline()) != f"{word}\n":
            assert line, f"it ended: {self._log.read_text()}"
            answer += line
        return answer.strip()

    def steps(self) -> int:
        """The steps in its flight file."""
        with closing(reader.open_path(str(self._file()))) as file:
            return flights.whole(flights.value(file.read(), catalog.STEPS))

    def trains(self) -> None:
        """See that its steps are recorded."""
        before = wait_until(self.steps)
        wait_until(lambda: self.steps() > before + 20)

    def rank(self) -> Rank:
        """The rank, as an exporter that comes now sees it."""
        with closing(Scanner(ExporterConfig(flight_dir=str(self.directory)))) as scanner:
            (rank,) = scanner.scan().ranks
        return rank

    def is_locked(self) -> bool:
        """Whether it holds its lock."""
        with opened(self.directory) as directory_fd:
            return files.is_locked(directory_fd, lock_name(self._file().name))

    def holds_its_own(self) -> bool:
        """Whether its files hold what it has written."""
        return {path.read_bytes() for path in self._folder.iterdir()} == {MINE}

    def log(self) -> list[str]:
        """The lines of its log about descriptors."""
        return [line for line in self._log.read_text().splitlines() if LOGGED in line]

    def failures(self) -> list[str]:
        """The lines of its log about what does not work any more."""
        return [line for line in self._log.read_text().splitlines() if "is off" in line or "deleted" in line]

    def _file(self) -> Path:
        (path,) = wait_until(lambda: list(self.directory.glob("*.flight")))
        return path


@pytest.fixture
def begin(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path) -> Callable[[str, str], Training]:
    """Start a training, with its flight file on tmpfs or on a disk."""

    def one(place: str, how: str) -> Training:
        training = Training(
            start, flight_dir if place == "tmpfs" else tmp_path / "flight", tmp_path / "own", how, tmp_path / "log"
        )
        training.trains()
        return training

    return one


@pytest.mark.parametrize(("place", "how", "end"), [("disk", "at once", signal.SIGSEGV), ("tmpfs", "numbers", signal.SIGTERM)])
def test_its_own_files_stay_its_own(begin: Callable[[str, str], Training], place: str, how: str, end: signal.Signals) -> None:
    """Not a byte is written, read or closed of them: by steps, by the watchdog's stacks, or by the mark of what ends it.

    All that is recorded goes on to be recorded, the rank has its lock again, and one line of its log says what happened.
    """
    training = begin(place, how)
    if how != "at once":
        training.say("close")
    wait_until(training.log)
    training.trains()
    assert training.say("damaged") == ""
    assert training.rank().state == "alive"
    assert training.is_locked()
    training.say("hold")
    (stacks,) = wait_until(lambda: list(training.directory.glob("*.stuck-[1-9]*.txt")))
    assert "closing_rank.py" in stacks.read_text()
    assert training.say("damaged") == ""
    if end == signal.SIGTERM:
        training.process.send_signal(end)
    else:
        assert training.process.stdin
        training.process.stdin.write("crash\n")
        training.process.stdin.flush()
    assert training.process.wait(30) == -end
    assert training.holds_its_own()
    wait_until(lambda: not training.rank().up)
    assert training.rank().view.live.exit_code == (143 if end == signal.SIGTERM else 128 + end)
    assert len(training.log()) == 1
    assert training.failures() == []


def test_what_is_gone_as_well_is_made_anew(begin: Callable[[str, str], Training]) -> None:
    """Deleted and closed: the file comes back under its name with all that it held, and nothing goes to the script's files.

    Neither the end of the recording, nor that of its map, closes one of those.
    """
    training = begin("tmpfs", "numbers")
    before = training.steps()
    for path in training.directory.glob("r0-*"):
        path.unlink()
    training.say("close")
    wait_until(lambda: training.steps() > before + 20)
    assert training.is_locked()
    training.say("shutdown")
    assert training.say("damaged") == ""
    assert training.rank().state == "finished"


def test_every_descriptor_that_torchobs_keeps_is_above_those_of_a_script(begin: Callable[[str, str], Training]) -> None:
    """The script's next file gets the lowest number that is free: none that torchobs could still take for its own.

    So it is when the script closes all numbers that it can think of, as a daemon does.
    """
    training = begin("disk", "range")
    process = str(training.process.pid)
    wait_until(lambda: len(numbers_below(str(training.directory), process)) == 5)  # directories, lock, flight file, watchdog
    assert min(numbers_below(str(training.directory), process)) > 100
    training.say("close")
    wait_until(training.log)
    training.trains()
    assert training.say("damaged") == ""
    assert training.is_locked()
    assert training.failures() == []


METRICS = [catalog.Metric(f"test.{index}", catalog.Kind.COUNTER, "", "", integer=True) for index in range(20)]
CHILD_LIMIT_S = 20.0


@pytest.fixture(params=["tmpfs", "disk"])
def writer(flight_dir: Path, request: pytest.FixtureRequest) -> Iterator[FlightWriter]:
    """A parent that has done some steps, on tmpfs and elsewhere."""
    parent = open_writer(flights.place(flight_dir, in_memory=request.param == "tmpfs"), {"rank": 0}, MIN_SIZE)
    for number in range(1, 11):
        flights.step(parent, number)
    cell = parent.table.cell(METRICS[0], {})
    assert cell
    cell.add(1)
    parent.publish()
    yield parent
    parent.close()


def write_everything(writer: FlightWriter) -> None:
    """Call whatever stores."""
    for number in range(100, 2000):
        flights.step(writer, number)
    for metric in METRICS:
        cell = writer.table.cell(metric, {})
        if cell:
            cell.add(1)
            cell.publish()
    writer.event("test", {"child": True})
    writer.heartbeat()
    writer.phase(len(PHASE_NAMES), 1)
    writer.level(3)
    writer.exit(Exit.FINISHED, 7)
    writer.fold()
    writer.publish()
    writer.check_name()
    writer.close()


def fork(act: Callable[[], None]) -> int:
    """Do it in a forked child; return its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads and forks do not mix is what is tested
        child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child: int, limit_s: float) -> int:
    """Wait for a child; return its exit code, or -SIGKILL if it took too long."""
    deadline = time.monotonic() + limit_s
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_a_child(act: Callable[[], None]) -> int:
    """Do it in a forked child; return its exit code, or -SIGKILL if it took too long."""
    return exit_code(fork(act), CHILD_LIMIT_S)


def state(directory: Path) -> dict[str, bytes]:
    """All files of the directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_nothing_that_a_child_calls_reaches_the_parent_s_file(writer: FlightWriter, flight_dir: Path) -> None:
    """A DataLoader worker with our hooks in it: byte for byte the same file and no other, the parent unharmed."""
    before = state(flight_dir)
    assert in_a_child(lambda: write_everything(writer)) == 0
    assert state(flight_dir) == before
    assert files.is_locked(writer._created.place.fd if writer._created else -1, lock_name(writer.name))
    flights.step(writer, 11)
    writer.fold()
    writer.publish()
    file = reader.open_path(writer.path)
    assert flights.value(file.read(), catalog.STEPS) == 11
    assert flights.value(file.read(), METRICS[0]) == 1
    file.close()


LIMIT_S = 30.0
"""A child takes a tenth of a second; what waits for a lock waits for ever"""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Place(NamedTuple):
    """Where a lock is kept."""

    owner: Any
    attribute: str

    def __str__(self) -> str:
        """Say which."""
        return f"{getattr(self.owner, '__name__', type(self.owner).__qualname__)}.{self.attribute}"


def kept(owner: Any) -> Iterator[Place]:
    """The locks among an object's attributes, those within its events and conditions included."""
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in {*getattr(owner, "__dict__", {}), *slots}:
        value = getattr(owner, name, None)
        if isinstance(value, _LOCKS):
            yield Place(owner, name)
        elif isinstance(value, threading.Event):
            yield Place(value._cond, "_lock")  # type: ignore[attr-defined]  # there is no other way to it


def locks() -> list[Place]:
    """Every lock of ours that there is: in our modules, and in our objects."""
    gc.unfreeze()  # which are not listed
    gc.collect()
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "torchobs"]
    objects = [instance for instance in gc.get_objects() if str(type(instance).__module__).split(".")[0] == "torchobs"]
    gc.freeze()
    return [place for owner in (*modules, *objects) for place in kept(owner)]


def code_of(act: Callable[[], None], *blocking: Any) -> int:
    """Fork while other threads hold these locks; do it in the child and return its exit code, or that of a kill."""
    let_go, holding = threading.Event(), threading.Semaphore(0)

    def hold(lock: Any) -> None:
        with lock:
            holding.release()
            let_go.wait(LIMIT_S)

    threads = [threading.Thread(target=hold, args=(lock,), daemon=True) for lock in blocking]
    for thread in threads:
        thread.start()
    assert all(holding.acquire(timeout=LIMIT_S) for _ in threads)
    child = fork(act)
    let_go.set()
    for thread in threads:
        thread.join()
    return exit_code(child, LIMIT_S)


def test_a_fork_while_any_lock_is_held_leaves_a_child_that_can_be_a_rank(flight_dir: Path) -> None:
    """All locks of ours at once, and those of logging: the child stores nothing by its parent's writer, then trains and ends.

    One by one they are tried to name the one that a child waits for.
    """
    written: list[FlightWriter] = []

    def be_a_rank() -> None:
        write_everything(written[0])
        for run in recording(flight_dir, rank=1):
            train(2)
            run.whole_round()
            assert len(run.steps()) == 2

    for parent in recording(flight_dir):
        assert parent.session.writer is not None
        written.append(parent.session.writer)
        train(2)
        places = locks()
        assert len(places) >= 15
        assert any(isinstance(place.owner, type(sys)) for place in places)
        handlers = [handler.lock for handler in logging.getLogger().handlers if handler.lock is not None]
        by_id = {id(lock): lock for place in places for lock in [getattr(place.owner, place.attribute)]}
        if code_of(be_a_rank, *by_id.values(), *handlers):
            stuck = [str(place) for place in places if code_of(be_a_rank, getattr(place.owner, place.attribute))]
            pytest.fail(f"a child waits for {stuck or 'several of them'}")
        assert len(parent.steps()) == 2
        assert parent.frames("test") == []


def test_a_fork_waits_for_what_our_threads_import(flight_dir: Path) -> None:
    """A module half imported by a thread that is not there could never be imported in the child."""
    order: list[str] = []
    begun = threading.Event()

    def load() -> None:
        with importing():
            begun.set()
            time.sleep(0.05)
            order.append("imported")

    for _ in recording(flight_dir):
        thread = threading.Thread(target=load)
        thread.start()
        begun.wait()
        code = code_of(lambda: None, threading.Lock())
        order.append("forked")
        thread.join()
        assert (code, order) == (0, ["imported", "forked"])
