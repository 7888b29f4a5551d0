"""Numbers are written many at a time, and each as it would be alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.utils import floatToGoString

from torchobs.exporter.prometheus.text_format import PLAIN_FROM, number, numbers

FINITE = st.floats(allow_nan=False, allow_infinity=False)
AROUND = [
    sign * math.nextafter(edge, to) for edge in (0.0, PLAIN_FROM, 1.0, 1e6, 1e16) for to in (0.0, 1e300) for sign in (1, -1)
]
SMALL = [step * 10.0**-exponent for exponent in range(3, 30) for step in (1.0, 1.5, 1.0000000000000002, 2.0, 9.999999999999998)]
LARGE = [step * 10.0**exponent for exponent in range(5, 18) for step in (1.0, 1.5, 1.0000000000000002, 7.25, 9.999999999999998)]
POWERS = [sign * 2.0**exponent for exponent in range(-1074, 1024) for sign in (1, -1)]


@given(
    st.lists(FINITE | st.floats(PLAIN_FROM, 1e6) | st.floats(0, 1e6, width=32) | st.floats(1e-22, 1e-3) | st.floats(1e5, 1e17))
)
def test_many_numbers_are_written_as_one_is(values: list[float]) -> None:
    """As prometheus-client writes them, digit for digit."""
    assert numbers(values) == [number(value) for value in values]
    assert numbers(values) == [floatToGoString(value) for value in values]  # type: ignore[no-untyped-call]  # it has no types


@pytest.mark.parametrize(
    "values", [[0.0, -0.0, 1e7], AROUND, SMALL, LARGE, POWERS, [math.nextafter(one, 0.0) for one in (*POWERS, *SMALL, *LARGE)]]
)
def test_numbers_at_the_edges_are_written_as_one_is(values: list[float]) -> None:
    """Where an exponent begins, where a float's neighbours are not equally far, and the zeros; also each by itself."""
    expected = [number(value) for value in values]
    assert numbers(values) == expected
    assert [text for value in values for text in numbers([value])] == expected
