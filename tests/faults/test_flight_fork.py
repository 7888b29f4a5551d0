"""Fork: a child's stores never reach the parent's file, whatever it calls and whoever forked."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import flights
from torchobs import catalog
from torchobs.flight.files import lock
from torchobs.flight.files.create import lock_name
from torchobs.flight.format.layout import MIN_SIZE, Exit
from torchobs.flight.format.step_record import PHASE_NAMES
from torchobs.flight.reader import reader
from torchobs.flight.writer.writer import FlightWriter, open_writer

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


def in_a_child(act: Callable[[], None]) -> int:
    """Do it in a forked child; return its exit code, or -SIGKILL if it took too long."""
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
    deadline = time.monotonic() + CHILD_LIMIT_S
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state(directory: Path) -> dict[str, bytes]:
    """All files of the directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_nothing_that_a_child_calls_reaches_the_parent_s_file(writer: FlightWriter, flight_dir: Path) -> None:
    """A DataLoader worker with our hooks in it: byte for byte the same file and no other, the parent unharmed."""
    before = state(flight_dir)
    assert in_a_child(lambda: write_everything(writer)) == 0
    assert state(flight_dir) == before
    assert lock.is_held(writer._created.place.fd if writer._created else -1, lock_name(writer.name))
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
    assert not any(fields.get("attrs", {}).get("child") for _, fields in file.events())
    file.close()
    assert set(state(flight_dir)) == {writer.name, lock_name(writer.name)}


def test_a_child_may_have_a_file_of_its_own(writer: FlightWriter, flight_dir: Path) -> None:
    """A rank that is forked by its launcher: it makes its own, and the parent's stays the parent's."""
    before = (flight_dir / writer.name).read_bytes()

    def be_a_rank() -> None:
        own = open_writer(flights.place(flight_dir), {"rank": 1}, MIN_SIZE)
        flights.step(own, 1)
        own.close()

    assert in_a_child(be_a_rank) == 0
    assert (flight_dir / writer.name).read_bytes() == before
    (name,) = [path.name for path in flight_dir.iterdir() if path.name.startswith("r1-") and path.suffix == ".flight"]
    file = reader.open_path(str(flight_dir / name))
    assert flights.value(file.read(final=True), catalog.STEPS) == 1
    file.close()
