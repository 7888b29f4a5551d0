"""The lines of a value block: of what has a value, in the order of the page, whatever comes and goes."""

from __future__ import annotations

import pytest

from torchobs.catalog import Kind
from torchobs.exporter.prometheus.line_renderer import BlockRenderer, is_gauge
from torchobs.exporter.prometheus.name_registry import family_of
from torchobs.exporter.prometheus.rank_series import QuietSeries, label
from torchobs.exporter.prometheus.text_format import Style
from torchobs.flight.format.series import Series, ValueType
from torchobs.flight.reader.decode import DecodedBlock, Distribution, Value
from torchobs.ranks.exemplars import NONE

OPENMETRICS, TEXT = Style(openmetrics=True), Style(openmetrics=False)


def one(
    name: str, kind: Kind = Kind.GAUGE, value_type: int = ValueType.FLOAT, bounds: tuple[float, ...] = (), **own: str
) -> Series:
    """A series."""
    return Series(name, kind, "", "", tuple(own.items()), bounds, value_type, 1, 0)


ALL = (
    one("a", layer="0"), one("c", Kind.COUNTER), one("a", layer="1"), one("b"),
    one("h", Kind.HISTOGRAM, ValueType.HISTOGRAM, (1.0,)), one("mixed"), one("mixed", value_type=ValueType.INT, which="whole"),
)  # fmt: skip
FULL: list[Value | None] = [0.5, 3, 0.25, 1e-7, Distribution((1, 2), 4.5, None, None), 1.5, 7]
LINES = {
    "a": ['a{layer="0"} 0.5', 'a{layer="1"} 0.25'],
    "c": ["c_total 3.0"],
    "b": ["b 1e-07"],
    "h": ['h_bucket{le="1.0"} 1.0', 'h_bucket{le="+Inf"} 3.0', "h_count 3.0", "h_sum 4.5"],
    "mixed": ["mixed 1.5", 'mixed{which="whole"} 7.0'],
}


def text_of(style: Style = OPENMETRICS, *, born_s: float | None = None) -> BlockRenderer:
    """The text of a block with all of them."""
    entries = [label(series, family_of(series.name, series.kind, ""), {}) for series in ALL]
    return BlockRenderer([*enumerate(entries)], style, QuietSeries(1), born_s=born_s)


def lines(text: BlockRenderer, values: list[Value | None]) -> dict[str, list[str]]:
    """What is written of those values, by family."""
    block = DecodedBlock(ALL, values, whole=None not in values)
    return {chunk.heading.family: chunk.lines.split("\n")[1:] for chunk in text.lines(block, NONE)}


def test_families_come_in_the_order_of_their_first_series() -> None:
    """Each with its lines in the order of the series, whatever way they are written in."""
    found = lines(text_of(), FULL)
    assert found == LINES
    assert [*found] == ["a", "c", "b", "h", "mixed"]


def test_what_has_no_value_has_no_line_and_gets_one_again() -> None:
    """One after the other, and all of them: the others' lines stay what they are."""
    text = text_of()
    for index in (*range(len(ALL)), None):
        values = [None if index in {None, place} else value for place, value in enumerate(FULL)]
        known = {line for place, line in enumerate(_flat(LINES)) if values[_SERIES[place]] is not None}
        assert {line for family in lines(text, values).values() for line in family} == known
        assert lines(text, FULL) == LINES


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), Distribution((1, 2), 1.0, None, None)])
def test_a_counter_is_what_a_page_can_show(value: Value) -> None:
    """Neither less than zero nor not finite nor something else; it comes back when it is."""
    text = text_of()
    assert "c" not in lines(text, [FULL[0], value, *FULL[2:]])
    assert lines(text, FULL) == LINES


def test_a_histogram_whose_sum_is_negative_has_buckets_only() -> None:
    """For a while, as a sum may be again."""
    text = text_of()
    fallen: list[Value | None] = [*FULL[:4], Distribution((1, 2), -4.5, None, None), *FULL[5:]]
    assert lines(text, fallen)["h"] == LINES["h"][:2]
    assert lines(text, FULL) == LINES


def test_what_counts_says_since_when_behind_its_lines() -> None:
    """In OpenMetrics within its family; in the classic format apart; a gauge nowhere; what has no value not either."""
    assert lines(text_of(born_s=1.5), FULL) == {
        **LINES, "c": [*LINES["c"], "c_created 1.5"], "h": [*LINES["h"], "h_created 1.5"],
    }  # fmt: skip
    text = text_of(TEXT, born_s=1.5)
    assert {chunk.heading.family: chunk.created for chunk in text.lines(DecodedBlock(ALL, FULL), NONE) if chunk.created} == {
        "c": "\nc_created 1.5", "h": "\nh_created 1.5",
    }  # fmt: skip
    without: list[Value | None] = [FULL[0], None, *FULL[2:]]
    assert [chunk.heading.family for chunk in text.lines(DecodedBlock(ALL, without), NONE) if chunk.created] == ["h"]


def test_a_block_that_is_the_same_is_not_written_again() -> None:
    """It costs no more than a look."""
    text, block = text_of(), DecodedBlock(ALL, FULL)
    assert text.lines(block, NONE) is text.lines(block, NONE)
    assert text.lines(block, NONE) is not text.lines(DecodedBlock(ALL, FULL), NONE)


@pytest.mark.parametrize(
    ("kind", "value_type", "expected"),
    [(Kind.GAUGE, ValueType.FLOAT, True), (Kind.GAUGE, ValueType.EITHER, False), (Kind.GAUGE, ValueType.INT, False),
     (Kind.COUNTER, ValueType.FLOAT, False), (Kind.UPDOWN, ValueType.FLOAT, False)],
)  # fmt: skip
def test_only_gauges_of_floats_are(kind: Kind, value_type: int, expected: bool) -> None:  # noqa: FBT001  # a parameter of the table above
    """A whole number would be written without its point, a counter may not be negative."""
    assert is_gauge(Series("x", kind, "", "", (), (), value_type, 0, 0)) is expected


def _flat(found: dict[str, list[str]]) -> list[str]:
    return [line for family in found.values() for line in family]


_SERIES = [0, 2, 1, 3, 4, 4, 4, 4, 5, 6]
"""The series that each of those lines is of"""
