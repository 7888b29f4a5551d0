"""Steps that are made faster than they are folded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests import flights
from tests.support import wait_until
from torchobs import catalog
from torchobs.flight.format.layout import MIN_SIZE
from torchobs.flight.reader import reader
from torchobs.flight.writer.writer import FlightWriter, open_writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RING = 1024
"""Records of the smallest file"""


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """Of the smallest file."""
    made = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    yield made
    made.close()


def folded(writer: FlightWriter) -> int:
    """The steps that are counted, where none is lost."""
    writer.fold()
    file = reader.open_path(writer.path)
    view = file.read()
    file.close()
    assert flights.value(view, catalog.FLIGHT_DROPPED, what="record") == 0
    return flights.whole(flights.value(view, catalog.STEPS))


def test_no_step_overwrites_one_that_is_not_folded(writer: FlightWriter) -> None:
    """While another thread is held up amid a fold the ring gets almost full, and then it is waited for."""
    unfolded: list[int] = []

    def hold_up() -> None:
        with writer._folding:
            held.set()
            wait_until(lambda: len(writer._recent) >= writer._full_at, interval_s=0.001)
            unfolded.append(len(writer._recent))

    held, thread = threading.Event(), threading.Thread(target=hold_up)
    thread.start()
    assert held.wait(30)
    for number in range(1, 3 * RING):
        flights.step(writer, number)
    thread.join()
    assert writer._full_at <= unfolded[0] < RING
    assert folded(writer) == 3 * RING - 1


def test_who_folds_and_does_not_come_forward_holds_nobody_up_for_ever(writer: FlightWriter) -> None:
    """A step has a record all the same, and counts once it is folded."""
    with writer._folding:
        for number in range(1, RING + 1):
            flights.step(writer, number)
    assert folded(writer) == RING
