"""Somebody deletes the file, its lock or the whole directory while a rank writes: it comes back with all it held."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import flights
from torchobs import catalog
from torchobs.flight.files import lock
from torchobs.flight.files.create import lock_name
from torchobs.flight.files.location import open_directory
from torchobs.flight.format.layout import MIN_SIZE, BadFlightFileError
from torchobs.flight.reader import reader
from torchobs.flight.writer.series_table import USER
from torchobs.flight.writer.writer import FlightWriter, open_writer

METRIC = catalog.Metric("test.count", catalog.Kind.COUNTER, "", "", integer=True)
ROUNDS = 25


@pytest.fixture
def directory(flight_dir: Path) -> Path:
    """A directory that may be deleted."""
    return flight_dir / "own" / "flight"


@pytest.fixture(params=["tmpfs", "disk"])
def writer(directory: Path, request: pytest.FixtureRequest) -> Iterator[FlightWriter]:
    """A rank with some steps, a counter and an event."""
    made = open_writer(flights.place(directory, in_memory=request.param == "tmpfs"), {"rank": 0}, MIN_SIZE)
    for number in range(1, 11):
        flights.step(made, number)
    cell = made.table.cell(METRIC, {}, USER)
    assert cell
    cell.add(7)
    made.event("test", {"n": 1})
    made.level(2)
    made.fold()
    made.publish()
    yield made
    made.close()


def delete_file(directory: Path, name: str) -> None:
    """A tidy user."""
    (directory / name).unlink()


def delete_lock(directory: Path, name: str) -> None:
    """Somebody who thought it stale."""
    (directory / lock_name(name)).unlink()


def delete_directory(directory: Path, _: str) -> None:
    """The end of a login session, which takes the runtime directory along."""
    shutil.rmtree(directory.parent)


def make_directory_anew(directory: Path, _: str) -> None:
    """Deleted, and made again by another rank."""
    shutil.rmtree(directory.parent)
    directory.mkdir(parents=True, mode=0o700)


def put_another_file_there(directory: Path, name: str) -> None:
    """A copy in its place."""
    raw = (directory / name).read_bytes()
    (directory / name).unlink()
    (directory / name).write_bytes(raw)


DELETIONS = [delete_file, delete_lock, delete_directory, make_directory_anew, put_another_file_there]


@pytest.mark.parametrize("delete", DELETIONS)
def test_what_was_deleted_comes_back_with_all_it_held(
    writer: FlightWriter, directory: Path, delete: Callable[[Path, str], None]
) -> None:
    """Counters, steps, events, live words; a lock that is held; and what comes afterwards reaches the new file."""
    name = writer.name
    delete(directory, name)
    assert writer.check_name() is True
    assert writer.check_name() is False
    flights.step(writer, 11)
    cell = writer.table.cell(METRIC, {}, USER)
    assert cell
    cell.add(1)
    writer.fold()
    writer.publish()
    assert {path.name for path in directory.iterdir()} == {name, lock_name(name)}
    file = reader.open_path(str(directory / name))
    view = file.read()
    assert flights.value(view, catalog.STEPS) == 11
    assert flights.value(view, METRIC) == 8
    assert view.live.level == 2
    assert [record.step for record in file.steps()] == list(range(1, 12))
    assert [fields["attrs"] for _, fields in file.events()] == [{"n": 1}]
    assert file.header == writer.header
    file.close()
    fd = open_directory(str(directory))
    assert lock.is_held(fd, lock_name(name))
    os.close(fd)
    writer.close()
    fd = open_directory(str(directory))
    assert not lock.is_held(fd, lock_name(name))
    os.close(fd)


@pytest.mark.parametrize("delete", [delete_file, put_another_file_there])
def test_a_reader_goes_on_with_the_new_file(writer: FlightWriter, directory: Path, delete: Callable[[Path, str], None]) -> None:
    """It follows the name; what it served never steps back."""
    fd = open_directory(str(directory))
    file = reader.open_file(fd, writer.name)
    assert flights.value(file.read(), catalog.STEPS) == 10
    assert file.follow(fd, writer.name) is False
    delete(directory, writer.name)
    writer.check_name()
    flights.step(writer, 11)
    writer.publish()
    assert file.follow(fd, writer.name) is True
    assert flights.value(file.read(), catalog.STEPS) == 11
    assert file.rejected == 0
    file.close()
    os.close(fd)


def test_a_reader_does_not_follow_a_name_to_another_rank_s_file(writer: FlightWriter, directory: Path) -> None:
    """Only to the same incarnation's; what it has stays."""
    fd = open_directory(str(directory))
    file = reader.open_file(fd, writer.name)
    file.read()
    other = open_writer(flights.place(directory), {"rank": 0}, MIN_SIZE)
    (directory / other.name).rename(directory / writer.name)
    with pytest.raises(BadFlightFileError, match="incarnation"):
        file.follow(fd, writer.name)
    assert flights.value(file.read(), catalog.STEPS) == 10
    (directory / writer.name).unlink()
    with pytest.raises(FileNotFoundError):
        file.follow(fd, writer.name)
    other.close()
    file.close()
    os.close(fd)


def test_where_it_cannot_be_made_anew_the_rank_goes_on_and_tries_again(writer: FlightWriter, directory: Path) -> None:
    """The error says why; nothing is lost meanwhile."""
    name = writer.name
    shutil.rmtree(directory.parent)
    directory.parent.write_text("in the way")
    for number in (11, 12):
        with pytest.raises(OSError, match=r"irectory|exists"):
            writer.check_name()
        flights.step(writer, number)
        writer.fold()
        writer.publish()
    directory.parent.unlink()
    assert writer.check_name() is True
    writer.publish()
    file = reader.open_path(str(directory / name))
    assert flights.value(file.read(), catalog.STEPS) == 12
    file.close()


def test_threads_that_write_while_it_is_made_anew_lose_nothing(writer: FlightWriter, directory: Path) -> None:
    """Steps, counts, new series and events go on while the file is deleted 25 times: in the end all of them are there."""
    done = threading.Event()
    counts = {"steps": 10, "series": 0}

    def train() -> None:
        while not done.is_set():
            counts["steps"] += 1
            flights.step(writer, counts["steps"])
            time.sleep(0.0002)  # a loop without a pause would keep the others waiting for the GIL, as no training does

    def count() -> None:
        while not done.is_set() and counts["series"] < 400:
            cell = writer.table.cell(
                catalog.Metric(f"test.{counts['series']}", catalog.Kind.COUNTER, "", "", integer=True), {}, USER
            )
            assert cell
            cell.add(counts["series"])
            cell.publish()
            counts["series"] += 1
            time.sleep(0.0005)

    threads = [threading.Thread(target=train, daemon=True), threading.Thread(target=count, daemon=True)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(ROUNDS):
            delete_file(directory, writer.name)
            assert writer.check_name() is True
            writer.fold()
            writer.publish()
            time.sleep(0.002)
    finally:
        done.set()
    for thread in threads:
        thread.join()
    writer.fold()
    writer.publish()
    file = reader.open_path(str(directory / writer.name))
    shown = flights.values(file.read())
    assert shown[catalog.STEPS.name, ()] == counts["steps"]
    assert [shown[f"test.{index}", ()] for index in range(counts["series"])] == list(range(counts["series"]))
    assert shown[catalog.FLIGHT_DROPPED.name, (("what", "record"),)] == 0
    file.close()
