"""Fork: a child's stores never reach the parent's file, and whatever lock is held, a child can be a rank of its own."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests import flights
from tests.training import recording, train
from torchobs import catalog
from torchobs.flight import files, reader
from torchobs.flight.files import lock_name
from torchobs.flight.layout import MIN_SIZE, PHASE_NAMES, Exit
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.support.after_fork import importing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


METRICS = [catalog.Metric(f"test.{index}", catalog.Kind.COUNTER, "", "", integer=True) for index in range(20)]
CHILD_LIMIT_S = 20.0


@pytest.fixture(params=["tmpfs", "disk"])
def writer(flight_dir: Path, request: pytest.FixtureRequest) -> Iterator[FlightWriter]:
    """A parent that has done some steps, on tmpfs and elsewhere."""
    made = open_writer(flights.place(flight_dir, in_memory=request.param == "tmpfs"), {"rank": 0}, MIN_SIZE)
    for number in range(1, 11):
        flights.step(made, number)
    cell = made.table.cell(METRICS[0], {})
    assert cell
    cell.add(1)
    made.publish()
    yield made
    made.close()


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


def test_a_fork_from_a_thread_while_others_write_ends_and_stores_nothing(writer: FlightWriter, flight_dir: Path) -> None:
    """Whatever locks the parent's threads held at that moment are nobody's in the child: it does not wait for them."""
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            writer.heartbeat()
            writer.fold()
            writer.publish()
            writer.event("test", {"child": False})

    def train() -> None:
        number = 100
        while not done.is_set():
            flights.step(writer, number)
            number += 1

    threads = [threading.Thread(target=sample), threading.Thread(target=train)]
    codes: list[int] = []
    forker = threading.Thread(target=lambda: codes.extend(in_a_child(lambda: write_everything(writer)) for _ in range(15)))
    for thread in (*threads, forker):
        thread.start()
    forker.join()
    done.set()
    for thread in threads:
        thread.join()
    assert codes == [0] * 15
    writer.fold()
    writer.publish()
    file = reader.open_path(writer.path)
    view = file.read()
    assert (view.live.level, view.live.exit_reason) == (0, None)
    assert flights.value(view, METRICS[1]) is None
    assert not any(fields.get("attrs", {}).get("child") for fields in flights.frames(file))
    file.close()
    assert set(state(flight_dir)) == {writer.name, lock_name(writer.name)}


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
    objects = [each for each in gc.get_objects() if str(type(each).__module__).split(".")[0] == "torchobs"]
    gc.freeze()
    return [place for owner in (*modules, *objects) for place in kept(owner)]


def code_of(act: Callable[[], None], *held: Any) -> int:
    """Fork while other threads hold these locks; do it in the child and return its exit code, or that of a kill."""
    let_go, holding = threading.Event(), threading.Semaphore(0)

    def hold(lock: Any) -> None:
        with lock:
            holding.release()
            let_go.wait(LIMIT_S)

    threads = [threading.Thread(target=hold, args=(lock,), daemon=True) for lock in held]
    for thread in threads:
        thread.start()
    assert all(holding.acquire(timeout=LIMIT_S) for _ in threads)
    child = fork(act)
    let_go.set()
    for thread in threads:
        thread.join()
    return exit_code(child, LIMIT_S)


def test_a_fork_while_any_lock_is_held_leaves_a_child_that_can_be_a_rank(flight_dir: Path) -> None:
    """All locks of ours at once, and those of logging: the child begins, trains, is seen by its sampler, and ends.

    One by one they are tried to name the one that a child waits for.
    """

    def be_a_rank() -> None:
        for run in recording(flight_dir, rank=1):
            train(2)
            run.whole_round()
            assert len(run.steps()) == 2

    for _ in recording(flight_dir):
        train(2)
        found = locks()
        assert len(found) >= 15
        assert any(isinstance(place.owner, type(sys)) for place in found)
        handlers = [handler.lock for handler in logging.getLogger().handlers if handler.lock is not None]
        held = {id(lock): lock for place in found for lock in [getattr(place.owner, place.attribute)]}
        if code_of(be_a_rank, *held.values(), *handlers):
            stuck = [str(place) for place in found if code_of(be_a_rank, getattr(place.owner, place.attribute))]
            pytest.fail(f"a child waits for {stuck or 'several of them'}")


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
