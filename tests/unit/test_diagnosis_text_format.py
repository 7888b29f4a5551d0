"""Numbers, times and hostile texts, as a terminal gets them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobs.diagnosis import text_format

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202egnp.exe\u2028\ud800"


def test_nothing_that_commands_a_terminal_is_left() -> None:
    """Escape sequences, C1 controls, line ends, bidirectional overrides, lone surrogates: each is a question mark."""
    assert text_format.clean(ESCAPE) == "?]0;owned??[2J?31m???gnp.exe??"
    assert text_format.clean("h.3.attn überall 層") == "h.3.attn überall 層"


@given(st.text(alphabet=st.characters()))
def test_a_clean_text_is_one_printable_line(text: str) -> None:
    """Whatever it was."""
    made = text_format.clean(text)
    assert made.isprintable() or " " in made or "\u00a0" in made or any(char.isspace() for char in made)
    assert not {*made} & {*map(chr, range(32)), *map(chr, range(127, 160))}
    assert len(made.splitlines()) <= 1
    made.encode()


@given(st.text(max_size=40), st.integers(0, 30))
def test_a_cut_text_fits_and_a_padded_one_fills(text: str, room: int) -> None:
    """In columns, of which an East Asian character has two."""
    made = text_format.clean(text)
    assert text_format.columns(text_format.cut(made, room)) <= room
    assert text_format.columns(text_format.pad(made, room)) == room


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (0.0, "0"), (2.13456, "2.135"), (12034.4, "12034"), (3e-5, "3e-5"), (1.5e9, "1.5e9"), (-0.25, "-0.25"),
        (math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "-Inf"), (0.002, "0.002"), (1e6, "1e6"), (99999.9, "100000"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits(value: float | None, shown: str) -> None:
    """And a power where zeros would have to be counted."""
    assert text_format.number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"), (0.0, "0"), (0.0004, "0.4 ms"), (0.25, "250 ms"), (0.9999, "1 s"), (59.9, "59.9 s"), (61.0, "1 min 1 s"),
        (3700.0, "1 h 1 min"), (90000.0, "1 d 1 h"), (math.inf, "-"),
    ],
)  # fmt: skip
def test_times_have_the_units_that_matter(seconds: float | None, shown: str) -> None:
    """One or two."""
    assert text_format.duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 * 2**30, "4.0 GiB"), (2**60, "1048576 TiB")],
)
def test_bytes_have_their_unit(count: float | None, shown: str) -> None:
    """Binary, as memory is sold."""
    assert text_format.size(count) == shown


def test_a_sparkline_shows_the_spike_whatever_the_room() -> None:
    """Each bar is the highest of its share; NaN is an exclamation mark, a gap a space."""
    values = [1.0] * 100
    values[37] = 50.0
    assert text_format.sparkline(values, 10) == "▁▁▁█▁▁▁▁▁▁"
    assert text_format.sparkline([1.0, math.nan, None, 2.0], 10) == "▁! █"
    assert text_format.sparkline(values, 10, ascii_only=True) == "___@______"
    assert text_format.sparkline([], 10) == text_format.sparkline([1.0], 0) == ""


def test_a_range_of_magnitudes_is_drawn_by_logarithms() -> None:
    """A loss of 1e17 does not make a line of the rest."""
    assert text_format.sparkline([1.0, 10.0, 100.0, 1000.0, 1e6], 5) == "▁▂▃▅█"


@given(st.lists(st.one_of(st.none(), st.floats())), st.integers(1, 50))
def test_no_values_break_a_sparkline(values: list[float | None], room: int) -> None:
    """Infinities, subnormals and sums that overflow."""
    assert len(text_format.sparkline(values, room)) == min(room, len(values))


@given(st.floats())
def test_every_number_has_words(value: float) -> None:
    """A forged file holds any float."""
    assert all([text_format.number(value), text_format.duration(value), text_format.moment(value)])
    assert not math.isfinite(value) or text_format.size(value)


def test_an_installed_package_s_place_begins_with_its_name() -> None:
    """The path to it says nothing; a place in the user's own code stays whole."""
    assert text_format.source_location("/opt/venv/lib/python3.11/site-packages/torch/nn.py:7 in f") == "torch/nn.py:7 in f"
    assert text_format.source_location("/home/me/train.py:7 in f") == "/home/me/train.py:7 in f"
