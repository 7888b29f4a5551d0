"""The writer of a flight file: records, cells of series, and where stores go: into the map, or to the file by the sampler."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import flights, otel
from tests.support import wait_until
from torchobs import catalog
from torchobs.catalog import Kind
from torchobs.flight import files, reader, storage, writer
from torchobs.flight.files import CreatedFile, create_flight_file, lock_name
from torchobs.flight.layout import MIN_SIZE, Exit, Region
from torchobs.flight.reader import Distribution
from torchobs.flight.storage import DeferredStorage
from torchobs.flight.value_blocks import LAYERS, USER, Cell
from torchobs.flight.writer import FlightWriter, open_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


RECORDS = 16
METRIC = catalog.Metric("test.count", catalog.Kind.COUNTER, "", "", integer=True)


@pytest.fixture
def image(flight_dir: Path) -> Iterator[flights.Image]:
    """A file with a ring of 16 records."""
    image = flights.Image(flight_dir, flights.header(RECORDS))
    yield image
    image.close()


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that stays away is passed over at once, not after a second."""
    monkeypatch.setattr(writer, "_GAP_NS", 0)


@pytest.fixture
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine holds the test up, no number is passed over for that."""
    monkeypatch.setattr(writer, "_GAP_NS", 3_600_000_000_000)


def view(image: flights.Image | FlightWriter, *, final: bool = False) -> reader.View:
    """What a reader sees who opens the file now."""
    with contextlib.closing(image.open() if isinstance(image, flights.Image) else reader.open_path(image.path)) as file:
        return file.read(final=final)


def steps(image: flights.Image | FlightWriter, *, final: bool = False, lost: int | None = None) -> int:
    """The steps that it sees; ``lost``: and so many records that it counts as lost."""
    shown = view(image, final=final)
    assert lost in {None, flights.value(shown, catalog.FLIGHT_DROPPED, what="record")}
    return flights.whole(flights.value(shown, catalog.STEPS))


class Stalled:
    """A thread that has taken a number and is stopped before it stores its record."""

    def __init__(self, writer: FlightWriter, memory: flights.ImageMemory, number: int) -> None:
        self._go, self._stopped = threading.Event(), threading.Event()
        first = writer.header.regions[Region.STEPS].offset
        memory.before = lambda offset: self._stop() if offset >= first else None
        self._thread = threading.Thread(target=flights.step, args=(writer, number))
        self._thread.start()
        assert self._stopped.wait(10)
        memory.before = lambda _: None

    def _stop(self) -> None:
        self._stopped.set()
        assert self._go.wait(10)

    def finish(self) -> None:
        """Let it store its record."""
        self._go.set()
        self._thread.join()


@pytest.mark.usefixtures("long_wait")
def test_a_record_waits_for_its_predecessor_that_another_thread_is_writing(image: flights.Image) -> None:
    """Steps are folded in the order of their numbers: the sampler's late record does not overtake the step before it."""
    writer, memory = flights.written(image)
    flights.step(writer, 1)
    stalled = Stalled(writer, memory, 2)
    flights.step(writer, 3)
    writer.fold()
    assert steps(image) == 1
    stalled.finish()
    assert steps(image) == 3
    writer.fold()
    assert steps(image, lost=0) == 3


@pytest.mark.usefixtures("no_wait")
def test_a_number_that_stays_away_is_passed_over_and_still_counts_when_it_comes(image: flights.Image) -> None:
    """Nobody waits for ever; the record is counted as lost, then as a step, and no reader ever counts one twice."""
    writer, memory = flights.written(image)
    follower = image.open()
    flights.step(writer, 1)
    stalled = Stalled(writer, memory, 2)
    for number in (3, 4, 5):
        flights.step(writer, number)
    writer.fold()
    assert steps(image, lost=1) == 4
    assert flights.value(follower.read(), catalog.STEPS) == 4
    stalled.finish()
    flights.step(writer, 6)
    writer.fold()
    writer.fold()
    assert steps(image) == steps(image, final=True) == 6
    assert flights.value(follower.read(), catalog.STEPS) == 6
    assert follower.rejected == 0
    follower.close()


def test_a_number_that_stays_away_does_not_let_the_ring_wrap(image: flights.Image) -> None:
    """A second is long at 100,000 steps a second: half a ring later the gap is passed over."""
    writer, memory = flights.written(image)
    stalled = Stalled(writer, memory, 1)
    for number in range(2, 5 * RECORDS):
        flights.step(writer, number)
        assert steps(image, final=True) == number - 1
    stalled.finish()
    writer.fold()
    assert steps(image) == 5 * RECORDS - 1


@contextlib.contextmanager
def repeated(act: Callable[[], object], threads: int = 1, pause_s: float = 0.0005) -> Iterator[None]:
    """Have other threads do it over and over until the block ends; none of them may raise."""
    done, problems = threading.Event(), list[BaseException]()

    def repeat() -> None:
        try:
            while not done.wait(pause_s):
                act()
        except OSError as problem:
            problems.append(problem)

    started = [threading.Thread(target=repeat) for _ in range(threads)]
    for thread in started:
        thread.start()
    yield
    done.set()
    for thread in started:
        thread.join()
    assert problems == []


def test_two_threads_append_and_a_third_folds_and_nothing_is_lost(image: flights.Image) -> None:
    """1,200 records through a ring of 16: every one counted, once, and a reader never sees fewer than before."""
    writer, _ = flights.written(image)
    follower, counts = image.open(), [0]
    with repeated(writer.fold):
        threads = [threading.Thread(target=lambda: [flights.step(writer, step) for step in range(1, 601)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            counts.append(flights.whole(flights.value(follower.read(), catalog.STEPS)))
    writer.fold()
    assert counts == sorted(counts)
    assert steps(image) == flights.value(follower.read(), catalog.STEPS) == 1200
    follower.close()


def test_records_that_were_overwritten_before_anybody_folded_them_are_counted(image: flights.Image) -> None:
    """Only when folding itself stands still for half a ring: then the file says how many are missing."""
    writer, _ = flights.written(image)
    assert writer._folding.acquire(blocking=False)
    for number in range(1, 41):
        flights.step(writer, number)
    assert steps(image, final=True, lost=40 - RECORDS) == RECORDS
    writer._folding.release()
    writer.fold()
    assert steps(image, lost=0) == 40  # the writer had them all along


class Interruption(Exception):  # noqa: N818  # as KeyboardInterrupt is
    """What a signal handler raises."""


class Bell:
    """Interrupts the main thread by a signal, over and over at random moments, once for each time it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ring, args=(threading.get_ident(),))
        self._before = signal.signal(signal.SIGUSR1, self._interrupt)
        self._thread.start()

    def stop(self) -> None:
        """End. Idempotent."""
        self.armed = False
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        if self.armed:
            self.armed = False  # so that the handler of the exception is not interrupted, too
            raise Interruption

    def _ring(self, thread: int) -> None:
        chance = random.Random(1)
        while not self._ended.wait(chance.uniform(0.0002, 0.002)):
            signal.pthread_kill(thread, signal.SIGUSR1)


@pytest.fixture
def bell() -> Iterator[Bell]:
    """A bell that rings until the test ends."""
    bell = Bell()
    yield bell
    bell.stop()


@pytest.mark.usefixtures("no_wait")
def test_an_exception_between_any_two_lines_loses_no_acknowledged_record(image: flights.Image, bell: Bell) -> None:
    """Ctrl-C, or a handler that raises, anywhere in an append, a fold, a count: what returned is there, the rest works."""
    writer, _ = flights.written(image)
    cell = writer.table.cell(METRIC, {})
    assert cell
    acknowledged = interrupted = number = counted = 0
    deadline = time.monotonic() + 2.0
    with repeated(writer.fold):
        while time.monotonic() < deadline or interrupted <= 100:
            try:
                bell.armed = True
                while True:
                    number += 1
                    flights.step(writer, number)
                    acknowledged += 1
                    cell.add(1)
                    cell.publish()
                    counted += 1
                    writer.event("test", {})
            except Interruption:
                interrupted += 1
        bell.stop()
    assert acknowledged <= steps(image, final=True) <= number
    flights.step(writer, number + 1)
    cell.add(1)
    writer.fold()
    writer.publish()
    writer.event("last", {})
    assert steps(image) > acknowledged
    file = image.open()
    assert flights.whole(flights.value(file.read(), METRIC)) > counted
    assert [fields["name"] for fields in flights.frames(file)][-1] == "last"
    file.close()


@pytest.mark.usefixtures("long_wait")
def test_a_signal_handler_may_write_too(flight_dir: Path) -> None:
    """In the middle of an append, a fold or a publication of the same thread: no deadlock, nothing lost, nothing twice."""
    image = flights.Image(flight_dir, flights.header())  # half its ring is more than handlers write during one append
    writer, _ = flights.written(image)
    counts = {"handler": 0, "main": 0}
    cell = writer.table.cell(METRIC, {})
    assert cell

    def write(who: str) -> None:
        flights.step(writer, 1)
        cell.add(1)
        writer.event("test", {})
        writer.fold()
        writer.publish()
        counts[who] += 1

    otel.interrupted(lambda: write("main"), lambda: write("handler"), 300)
    writer.fold()
    writer.publish()
    assert steps(image, lost=0) == sum(counts.values())
    assert flights.value(view(image), METRIC) == sum(counts.values())
    image.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file of /proc that was just being read
def test_an_interrupt_while_the_file_is_made_leaves_nothing(flight_dir: Path, bell: Bell) -> None:
    """Ctrl-C at any moment of a birth: no temporary file of the full size."""
    place, births, cut = flights.place(flight_dir), 0, 0
    while births + cut < 300 or births <= 10 or cut <= 10:
        try:
            bell.armed = True
            born = create_flight_file(place, flights.header())
            bell.armed = False
            files.unlock(born.lock)
            births += 1
        except Interruption:
            cut += 1
    bell.stop()
    assert [path.name for path in flight_dir.iterdir() if path.name.startswith(".tmp-")] == []
    os.close(place.fd)


def test_a_closed_writer_stores_nowhere_and_its_file_stays(flight_dir: Path) -> None:
    """For the exporter, which serves the end; closing twice is once."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    writer = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    name = writer.name
    flights.step(writer, 1)
    writer.exit(Exit.EXCEPTION, -9)
    writer.close()
    writer.close()
    raw = (flight_dir / name).read_bytes()
    flights.step(writer, 2)
    writer.heartbeat()
    writer.event("test", {})
    writer.fold()
    writer.publish()
    assert writer.check_name() is False
    assert (flight_dir / name).read_bytes() == raw
    assert {path.name for path in flight_dir.iterdir()} == {name, lock_name(name)}
    with contextlib.closing(reader.open_path(str(flight_dir / name))) as file:
        last = file.read(final=True)
    assert flights.value(last, catalog.STEPS) == 1
    assert (last.live.exit_reason, last.live.exit_code) == (Exit.EXCEPTION, -9)
    del writer
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # an earlier test's thread may close its own meanwhile


def cell(
    writer: FlightWriter, kind: Kind, *, integer: bool = False, bounds: tuple[float, ...] = (), either: bool = False
) -> Cell:
    """The cell of a metric x of that kind."""
    opened = writer.table.open(catalog.Metric("x", kind, "", "", bounds=bounds, integer=integer), {}, LAYERS, either=either)
    assert opened
    return opened


def shown(image: flights.Image) -> object:
    """What a reader sees of x."""
    return flights.values(view(image)).get(("x", ()))


NUMBERS = [
    # what is done to a cell of which kind ("either": a user's, which takes whole numbers and others), with what
    ("add", "integer", Kind.COUNTER, [1.0, 2.9], 3),
    ("add", "integer", Kind.COUNTER, [1, nan, inf], 1),
    ("add", "float", Kind.COUNTER, [0.5, 0.25], 0.75),
    ("add", "float", Kind.COUNTER, [1e308, 1e308], 1.7976931348623157e308),
    ("add", "integer", Kind.COUNTER, [2**62, 2**62, 2**62], 2**63 - 1),
    ("add", "integer", Kind.UPDOWN, [1, -3], -2),
    ("add", "either", Kind.COUNTER, [1, 0.5], 1.5),
    ("add", "either", Kind.UPDOWN, [-1, -(2**40)], -1 - 2**40),
    ("set", "float", Kind.GAUGE, [1.5, nan], None),
    ("set", "float", Kind.GAUGE, [nan, 2], 2.0),
    ("set", "integer", Kind.COUNTER, [5, inf], 5),
    ("set", "integer", Kind.COUNTER, [2**80], 2**63 - 1),
]


@pytest.mark.parametrize(("change", "numbers", "kind", "amounts", "expected"), NUMBERS)
def test_numbers_of_any_size(
    image: flights.Image, change: str, numbers: str, kind: Kind, amounts: list[float], expected: float | None
) -> None:
    """Whole or not, finite or not: the total is right or at its range's end; a gauge that is not finite is absent."""
    writer, _ = flights.written(image)
    opened = cell(writer, kind, integer=numbers == "integer", either=numbers == "either")
    for value in amounts:
        getattr(opened, change)(value)
    opened.publish()
    assert shown(image) == expected
    assert type(shown(image)) is type(expected)


def test_a_histogram_s_value_on_a_bound_is_within_it_and_no_infinity_is_observed(image: flights.Image) -> None:
    """Buckets, sum, least and greatest."""
    writer, _ = flights.written(image)
    histogram = cell(writer, Kind.HISTOGRAM, bounds=(1.0, 2.0))
    assert shown(image) == Distribution((0, 0, 0), 0.0, None, None)
    for value in (1.0, 1.5, 2.0, 2.5, nan, inf, -inf):
        histogram.observe(value)
    histogram.publish()
    assert shown(image) == Distribution((1, 2, 1), 7.0, 1.0, 2.5)


RING = 1024
"""Records of the smallest file"""


@pytest.fixture
def small_writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """Of the smallest file."""
    opened = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    yield opened
    opened.close()


def test_no_step_overwrites_one_that_is_not_folded(small_writer: FlightWriter) -> None:
    """While another thread is held up amid a fold the ring gets almost full, and then it is waited for, but not for ever."""
    unfolded: list[int] = []

    def hold_up() -> None:
        with small_writer._folding:
            locked.set()
            wait_until(lambda: len(small_writer._recent) >= small_writer._full_at, interval_s=0.001)
            unfolded.append(len(small_writer._recent))

    locked, thread = threading.Event(), threading.Thread(target=hold_up)
    thread.start()
    assert locked.wait(30)
    for number in range(1, 3 * RING):
        flights.step(small_writer, number)
    thread.join()
    assert small_writer._full_at <= unfolded[0] < RING
    small_writer.fold()
    assert steps(small_writer, lost=0) == 3 * RING - 1
    with small_writer._folding:
        for number in range(3 * RING, 4 * RING):
            flights.step(small_writer, number)
    small_writer.fold()
    assert steps(small_writer, lost=0) == 4 * RING - 1


@pytest.fixture
def born(flight_dir: Path) -> Iterator[CreatedFile]:
    """A new file."""
    file = create_flight_file(flights.place(flight_dir, in_memory=False), flights.header(16))
    yield file
    files.unlock(file.lock)
    file.place.directory.close()


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
    """The module `os` with a `pwrite` that works so many times, then fails once, as on a full or a broken disk."""

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
    born: CreatedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every single write of every flush: readable, exact, never behind; and what failed is written by the next flush."""
    header, path = born.header, f"{born.place.path}/{born.name}"
    writer = FlightWriter(header, DeferredStorage(born), None)
    states = list(flights.folded_states(header, [flights.step_record(header, number) for number in range(1, 121)]))
    follower, last, number = reader.open_path(path), 0, 0
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
            fresh = reader.open_path(path)
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
    with repeated(writer.publish, threads=3, pause_s=0.0):
        for number in range(1, 2001):
            flights.step(writer, number)
    writer.fold()
    writer.publish()
    file = reader.open_path(writer.path)
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
