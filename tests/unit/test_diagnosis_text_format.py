"""Numbers, sizes, times and tables as text for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from torchobs.support import text as text_format

if TYPE_CHECKING:
    from collections.abc import Callable

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202egnp.exe\u2028\ud800"


def test_nothing_that_commands_a_terminal_is_left_nor_the_path_to_a_package() -> None:
    """Escapes, C1 controls, line ends, bidirectional overrides are question marks; the path to an installed package is cut."""
    assert text_format.clean(ESCAPE) == "?]0;owned??[2J?31m???gnp.exe??"
    assert text_format.clean("h.3.attn überall 層") == "h.3.attn überall 層"
    for path, place in (("/opt/venv/lib/python3.11/site-packages/", "torch/nn.py:7 in f"), ("", "/home/me/train.py:7 in f")):
        assert text_format.source_location(path + place) == place


@given(st.text(alphabet=st.characters()))
def test_a_clean_text_is_one_printable_line(text: str) -> None:
    """Whatever it was."""
    made = text_format.clean(text)
    assert made.isprintable() or any(char.isspace() for char in made)
    assert not {*made} & {*map(chr, range(32)), *map(chr, range(127, 160))}
    assert len(made.splitlines()) <= 1
    made.encode()


@given(st.text(max_size=40), st.integers(0, 30))
def test_a_cut_text_fits_and_a_padded_one_fills(text: str, room: int) -> None:
    """In columns, of which an East Asian character has two."""
    made = text_format.clean(text)
    assert text_format.columns(text_format.cut(made, room)) <= room
    assert text_format.columns(text_format.pad(made, room)) == room


INF = math.inf
SHOWN: list[tuple[Callable[[Any], str], dict[Any, str]]] = [
    (text_format.number, {
        None: "-", 0.0: "0", 2.13456: "2.135", 12034.4: "12,034", 3e-5: "3e-5", 1.5e9: "1.5e9", -0.25: "-0.25", INF: "Inf",
        -INF: "-Inf", 1e6: "1e6", 99999.9: "100,000", 999.96: "1,000", 65536: "65,536", 0.0015: "0.0015", 3.125e-5: "3.125e-5",
    }),
    (text_format.duration, {
        None: "-", 0.0: "0 s", 0.0004: "400 µs", 0.0123: "12.3 ms", 0.9999: "1 s", 0.99951e-3: "1 ms", 1.5204: "1.52 s",
        61.0: "1 min 1 s", 3700.0: "1 h 1 min", 90000.0: "1 d 1 h", INF: "-",
    }),
    (text_format.span, {None: "-", 40.9: "40 s", 200.0: "3 min 20 s", 7_500.0: "2 h 5 min", 356_400.0: "4 d 3 h", -3.0: "0 s"}),
    (text_format.size, {
        None: "-", 0: "0 B", 512: "512 B", 1023: "0.999 KiB", 1536: "1.5 KiB", 451_936_256.0: "431 MiB", 85e9: "79.2 GiB",
        2**60: "1,024 PiB",
    }),
    (text_format.percent, {None: "-", 0.0: "0 %", 0.0004: "<0.1 %", 0.004: "0.4 %", 0.00999: "1 %", 0.456: "46 %"}),
    (text_format.count, {1_234_567.0: "1,234,567", None: "-"}),
    (text_format.rate, {1.9: "1.90", None: "-"}),
]  # fmt: skip


def test_numbers_sizes_and_times_are_short() -> None:
    """As a person reads them: few digits, one unit or two."""
    wrong = [(shown, value, made(value)) for made, values in SHOWN for value, shown in values.items() if made(value) != shown]
    assert wrong == []
    assert (text_format.number(math.nan), text_format.rate(45_300.0, "tokens")) == ("NaN", "45,300 tokens/s")


@given(st.integers(1, 9999), st.integers(-9, 1))
def test_a_rate_of_four_digits_is_shown_as_it_is(digits: int, power: int) -> None:
    """Read back it is the same number: a learning rate on the page is the one in the script."""
    value = float(f"{digits}e{power}")
    assert float(text_format.number(value).replace(",", "")) == value


def test_a_sparkline_shows_the_spike_whatever_the_room() -> None:
    """Each bar is the highest of its share; NaN is an exclamation mark, a gap a space."""
    values = [1.0] * 100
    values[37] = 50.0
    assert text_format.sparkline(values, 10) == "▁▁▁█▁▁▁▁▁▁"
    assert text_format.sparkline([1.0, math.nan, None, 2.0], 10) == "▁! █"
    assert text_format.sparkline(values, 10, ascii_only=True) == "___@______"
    assert text_format.sparkline([], 10) == text_format.sparkline([1.0], 0) == ""


@given(st.floats())
def test_every_number_has_words(value: float) -> None:
    """A forged file holds any float."""
    assert all([text_format.number(value), text_format.duration(value), text_format.moment(value)])
    assert not math.isfinite(value) or text_format.size(value)
