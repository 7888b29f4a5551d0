"""Where stores go: into the map at once, or to the file by the sampler, in an order and a size that no crash minds."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import flights
from torchobs import catalog
from torchobs.flight import files, reader, storage
from torchobs.flight.files import CreatedFile, create_flight_file
from torchobs.flight.layout import MIN_SIZE, Region
from torchobs.flight.storage import DeferredStorage
from torchobs.flight.value_blocks import USER
from torchobs.flight.writer import FlightWriter, open_writer

METRIC = catalog.Metric("test.count", catalog.Kind.COUNTER, "", "", integer=True)


@pytest.fixture
def born(flight_dir: Path) -> Iterator[CreatedFile]:
    """A new file."""
    made = create_flight_file(flights.place(flight_dir, in_memory=False), flights.header(16))
    yield made
    files.unlock(made.lock)
    made.place.directory.close()


def test_what_waits_is_bounded_however_long_nobody_flushes(born: CreatedFile) -> None:
    """A sampler that hangs for an hour: memory for one file, and not one series is lost."""
    deferred = DeferredStorage(born)
    writer = FlightWriter(born.header, deferred, None)
    cell = writer.table.cell(METRIC, {}, USER)
    assert cell
    for number in range(1, 3001):
        flights.step(writer, number)
        cell.add(1)
        writer.table.publish()
        writer.event("test", {"number": number})
    ring = born.header.regions[Region.EVENTS].length // 64
    assert len(deferred._dirty) < ring + 500
    deferred.flush()
    file = reader.open_path(f"{born.place.path}/{born.name}")
    view = file.read()
    assert flights.value(view, catalog.STEPS) == 3000
    assert flights.value(view, METRIC) == 3000
    assert [fields["attrs"]["number"] for fields in flights.frames(file)][-1] == 3000
    file.close()
    deferred.detach()


class Interrupted:
    """The module `os`, whose `pwrite` works so many times, then fails once, as a full or a broken disk does."""

    close = staticmethod(os.close)

    def __init__(self, times: int) -> None:
        self.left = times

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Write, or fail."""
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "Input/output error")
        return os.pwrite(fd, data, offset)


def test_killed_in_the_middle_of_a_flush_the_file_is_what_it_was_or_newer(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every single write of every flush: readable, exact, never behind; and what failed is written by the next flush."""
    header = flights.header(16)
    born = create_flight_file(flights.place(flight_dir, in_memory=False), header)
    writer = FlightWriter(header, DeferredStorage(born), None)
    states = list(flights.folded_states(header, [flights.step_record(header, number) for number in range(1, 121)]))
    follower, last, number = reader.open_path(f"{flight_dir}/{born.name}"), 0, 0
    writer.memory.flush()
    while number < 120:
        for _ in range(3):
            number += 1
            flights.step(writer, number)
        writer.fold()
        for times in range(60):
            with monkeypatch.context() as patch, contextlib.suppress(OSError):
                patch.setattr(storage, "os", interrupted := Interrupted(times))
                writer.memory.flush()
            fresh = reader.open_path(f"{flight_dir}/{born.name}")
            shown = [exact_steps(view, states) for view in (follower.read(), fresh.read(final=True))]
            assert last <= shown[0] <= shown[1]
            last = shown[1]
            fresh.close()
            if interrupted.left >= 0:
                break
        assert last == number
    assert follower.rejected == 0
    follower.close()
    writer.memory.detach()


def exact_steps(view: reader.View, states: list[flights.Values]) -> int:
    """The steps of a view, which is the state after as many."""
    steps = flights.whole(flights.value(view, catalog.STEPS))
    assert flights.values(view, folded=True) == states[steps]
    return steps


def test_two_threads_that_flush_at_once_do_not_disturb_each_other(flight_dir: Path) -> None:
    """At the end of a run the training thread may flush beside the sampler: no exception, and nothing older comes last."""
    writer = open_writer(flights.place(flight_dir, in_memory=False), {"rank": 0}, MIN_SIZE)
    done = threading.Event()
    problems: list[BaseException] = []

    def flush() -> None:
        try:
            while not done.is_set():
                writer.publish()
        except OSError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=flush) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 2001):
        flights.step(writer, number)
    done.set()
    for thread in threads:
        thread.join()
    writer.fold()
    writer.publish()
    file = reader.open_path(writer.path)
    assert problems == []
    assert flights.value(file.read(), catalog.STEPS) == 2000
    assert [record.step for record in file.steps(5)] == [1996, 1997, 1998, 1999, 2000]
    file.close()
    writer.close()


def test_a_file_that_is_closed_is_never_written_by_a_late_flush(born: CreatedFile) -> None:
    """Its descriptor's number may be another file's by then: a checkpoint, say."""
    deferred = DeferredStorage(born)
    deferred.store(8192, b"abc")
    assert deferred._file is not None
    number = deferred._file.number()
    deferred.detach()
    checkpoint = Path(born.place.path) / "checkpoint"
    checkpoint.write_bytes(bytes(9000))
    with checkpoint.open("r+b", buffering=0) as file:
        os.dup2(file.fileno(), number)
        deferred.flush()
        os.close(number)
    assert checkpoint.read_bytes() == bytes(9000)


def test_a_file_that_is_closed_while_a_flush_is_stuck_keeps_its_descriptor(born: CreatedFile) -> None:
    """The stuck thread has its number: it is not closed under it."""
    deferred = DeferredStorage(born)
    assert deferred._file is not None
    number = deferred._file.number()
    assert deferred._flushing.acquire(blocking=False)
    deferred.detach()
    os.fstat(number)  # still open
    deferred._flushing.release()
    os.close(number)
