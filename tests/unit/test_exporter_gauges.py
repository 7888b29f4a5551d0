"""Gauges are written many at a time, and each as it would be alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.utils import floatToGoString

from torchobs.catalog import Kind
from torchobs.exporter.encoder import number
from torchobs.exporter.gauges import PLAIN_FROM, Gauges, is_gauge, numbers
from torchobs.flight.series import Series, ValueType

FINITE = st.floats(allow_nan=False, allow_infinity=False)
AROUND = [
    sign * math.nextafter(edge, to) for edge in (0.0, PLAIN_FROM, 1.0, 1e6, 1e16) for to in (0.0, 1e300) for sign in (1, -1)
]
POWERS = [sign * 2.0**exponent for exponent in range(-1074, 1024) for sign in (1, -1)]


@given(st.lists(FINITE | st.floats(PLAIN_FROM, 1e6) | st.floats(0, 1e6, width=32)))
def test_many_numbers_are_written_as_one_is(values: list[float]) -> None:
    """As prometheus-client writes them, digit for digit."""
    assert numbers(values) == [number(value) for value in values]
    assert numbers(values) == [floatToGoString(value) for value in values]  # type: ignore[no-untyped-call]  # it has no types


@pytest.mark.parametrize("values", [[0.0, -0.0], AROUND, POWERS, [math.nextafter(power, 0.0) for power in POWERS]])
def test_numbers_at_the_edges_are_written_as_one_is(values: list[float]) -> None:
    """Where an exponent begins, where a float's neighbours are not equally far, and the zeros."""
    assert numbers(values) == [number(value) for value in values]


def test_the_absent_have_no_line() -> None:
    """Wherever they stand; and where none is there, there is no text."""
    gauges = Gauges([(0, "a "), (2, "b% "), (3, "c ")])
    assert gauges.text([1.0, 7.0, 0.5, 1e-7]) == "a 1.0\nb% 0.5\nc 1e-07\n"
    assert gauges.text([None, 7.0, 0.5, None]) == "b% 0.5\n"
    assert gauges.text([None, 7.0, None, None]) == ""


@pytest.mark.parametrize(
    ("kind", "value_type", "expected"),
    [(Kind.GAUGE, ValueType.FLOAT, True), (Kind.GAUGE, ValueType.EITHER, False), (Kind.GAUGE, ValueType.INT, False),
     (Kind.COUNTER, ValueType.FLOAT, False), (Kind.UPDOWN, ValueType.FLOAT, False)],
)  # fmt: skip
def test_only_gauges_of_floats_are(kind: Kind, value_type: int, expected: bool) -> None:  # noqa: FBT001  # a parameter of the table above
    """A whole number would be written without its point, a counter may not be negative."""
    assert is_gauge(Series("x", kind, "", "", (), (), value_type, 0, 0)) is expected
