"""Cells and blocks: every kind of value as it was given, whoever publishes."""

import threading
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path

import pytest

from tests import flights
from tests.support import finish
from torchobs import catalog
from torchobs.catalog import Kind
from torchobs.flight.format.layout import BLOCK_WORDS
from torchobs.flight.reader.decode import Distribution
from torchobs.flight.writer.series_table import LAYERS, USER, Cell
from torchobs.flight.writer.writer import FlightWriter


@pytest.fixture
def image(flight_dir: Path) -> Iterator[flights.Image]:
    """A file with a ring of 16 records."""
    made = flights.Image(flight_dir, flights.header(16))
    yield made
    made.close()


def metric(kind: Kind, *, integer: bool = False, bounds: tuple[float, ...] = (), name: str = "x") -> catalog.Metric:
    """A metric of that kind."""
    return catalog.Metric(name, kind, "", "", bounds=bounds, integer=integer)


def cell(writer: FlightWriter, of: catalog.Metric, *, either: bool = False) -> Cell:
    """Its cell."""
    made = writer.table.open(of, {}, LAYERS, either=either)
    assert made
    return made


def shown(image: flights.Image) -> object:
    """What a reader sees of x."""
    file = image.open()
    try:
        return flights.values(file.read()).get(("x", ()))
    finally:
        file.close()


def test_counters_are_there_at_zero_and_gauges_are_not_there(image: flights.Image) -> None:
    """Before the first change."""
    writer, _ = flights.written(image)
    cell(writer, metric(Kind.COUNTER, integer=True))
    assert shown(image) == 0
    writer.table.cell(metric(Kind.GAUGE, name="g"), {}, USER)
    writer.table.open(metric(Kind.GAUGE, name="e"), {}, USER, either=True)
    file = image.open()
    assert {"g", "e"} & {name for name, _ in flights.values(file.read())} == set()
    file.close()


@pytest.mark.parametrize(
    ("kind", "integer", "amounts", "expected"),
    [
        (Kind.COUNTER, True, [1, 2], 3),
        (Kind.COUNTER, True, [1.0, 2.9], 3),
        (Kind.COUNTER, True, [1, nan, inf], 1),
        (Kind.COUNTER, False, [0.5, 0.25], 0.75),
        (Kind.COUNTER, False, [1, nan, -inf], 1.0),
        (Kind.COUNTER, False, [1e308, 1e308], 1.7976931348623157e308),
        (Kind.COUNTER, True, [2**62, 2**62, 2**62], 2**63 - 1),
        (Kind.UPDOWN, True, [1, -3], -2),
        (Kind.UPDOWN, False, [1.0, -3.0], -2.0),
    ],
)
def test_additions_of_any_number(
    image: flights.Image, kind: Kind, amounts: list[float], expected: float, *, integer: bool
) -> None:
    """Whole or not, finite or not, however large: the total is right, or at its range's end, and never wraps around."""
    writer, _ = flights.written(image)
    made = cell(writer, metric(kind, integer=integer))
    for amount in amounts:
        made.add(amount)
    made.publish()
    assert shown(image) == expected
    assert type(shown(image)) is type(expected)


@pytest.mark.parametrize(
    ("kind", "integer", "given", "expected"),
    [
        (Kind.GAUGE, False, [1.5], 1.5),
        (Kind.GAUGE, False, [1.5, nan], None),
        (Kind.GAUGE, False, [nan, 2], 2.0),
        (Kind.COUNTER, True, [5], 5),
        (Kind.COUNTER, True, [5, inf], 5),
        (Kind.COUNTER, True, [5, nan], 5),
        (Kind.COUNTER, True, [2**80], 2**63 - 1),
    ],
)
def test_values_that_are_set(image: flights.Image, kind: Kind, given: list[float], expected: object, *, integer: bool) -> None:
    """A gauge that is not finite is absent; a counter that was observed is what it was before."""
    writer, _ = flights.written(image)
    made = cell(writer, metric(kind, integer=integer))
    for value in given:
        made.set(value)
    made.publish()
    assert shown(image) == expected


@pytest.mark.parametrize(
    ("kind", "amounts", "expected"),
    [
        (Kind.COUNTER, [1, 2], 3),
        (Kind.COUNTER, [1, 0.5], 1.5),
        (Kind.COUNTER, [0.5], 0.5),
        (Kind.UPDOWN, [-1, -(2**40)], -1 - 2**40),
        (Kind.UPDOWN, [1, -0.5], 0.5),
    ],
)
def test_a_user_s_instrument_takes_ints_and_floats(
    image: flights.Image, kind: Kind, amounts: list[float], expected: float
) -> None:
    """Whole numbers stay whole until one is not."""
    writer, _ = flights.written(image)
    made = cell(writer, metric(kind), either=True)
    for amount in amounts:
        made.add(amount)
    made.publish()
    assert shown(image) == expected
    assert type(shown(image)) is type(expected)


def test_a_histogram_s_value_on_a_bound_is_within_it_and_no_infinity_is_observed(image: flights.Image) -> None:
    """Buckets, sum, least and greatest."""
    writer, _ = flights.written(image)
    made = cell(writer, metric(Kind.HISTOGRAM, bounds=(1.0, 2.0)))
    assert shown(image) == Distribution((0, 0, 0), 0.0, None, None)
    for value in (1.0, 1.5, 2.0, 2.5, nan, inf, -inf):
        made.observe(value)
    made.publish()
    assert shown(image) == Distribution((1, 2, 1), 7.0, 1.0, 2.5)


def test_what_is_not_published_is_not_seen_and_what_is_stays_whole(image: flights.Image) -> None:
    """A change is private until its block is published."""
    writer, _ = flights.written(image)
    made = cell(writer, metric(Kind.COUNTER, integer=True))
    made.add(1)
    assert shown(image) == 0
    writer.publish()
    assert shown(image) == 1


def test_threads_that_change_one_counter_lose_nothing(image: flights.Image) -> None:
    """Each publishes, or leaves it to the one who is at it."""
    writer, _ = flights.written(image)
    made = cell(writer, metric(Kind.COUNTER, integer=True))

    def count() -> None:
        for _ in range(500):
            made.add(1)
            made.publish()

    finish([threading.Thread(target=count) for _ in range(4)])
    assert shown(image) == 2000


def test_a_full_file_counts_what_did_not_fit_and_goes_on(image: flights.Image) -> None:
    """Series that are there stay; one that does not fit is none, and is counted once."""
    writer, _ = flights.written(image)
    first = cell(writer, metric(Kind.COUNTER, integer=True))
    for index in range(5000):
        writer.table.cell(metric(Kind.COUNTER, name=f"n{index}"), {}, LAYERS)
    dropped = writer.table.dropped
    assert dropped > 1000
    assert writer.table.cell(metric(Kind.COUNTER, name="n4999"), {}, LAYERS) is None
    assert writer.table.dropped == dropped
    assert writer.table.cell(metric(Kind.HISTOGRAM, bounds=tuple(map(float, range(BLOCK_WORDS))), name="h"), {}, LAYERS) is None
    first.add(3)
    first.publish()
    assert shown(image) == 3
    file = image.open()
    assert len(file.read().points) == len(writer.table) - 4  # gauges without a value
    file.close()
