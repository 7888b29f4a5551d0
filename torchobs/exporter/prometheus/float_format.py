"""Format many floats at once: formatting numbers takes most of a page's time.

``repr`` takes 0.8 µs for a float of 17 digits, msgspec 0.08 µs. Both write the shortest digits that round-trip, and the same
text where neither writes an exponent: no difference in 2 million floats, including powers of two, their neighbours and 32-bit
floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchobs.exporter.prometheus.text_format import PLAIN_BELOW, number

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN_FROM = 1e-4
"""Below this Python writes an exponent."""
SMALL_FROM, LARGE_BELOW = 1e-20, 1e16
"""Numbers beyond these are too rare for a fast path."""
_encode = msgspec.json.Encoder().encode


def numbers(values: Sequence[float]) -> list[str]:
    """Return finite floats as ``text_format.number`` formats each. No integers: they would have no decimal point."""
    if not values:
        return []
    encoded = _encode(values)
    texts = encoded[1:-1].decode().split(",")
    # searching the text takes a tenth of comparing the values: a number below 1e-4 has an exponent or four zeros behind the
    # point, and non-negative numbers are all below 1e6 if their sum is
    if b"e" in encoded or b"-" in encoded or b"0.0000" in encoded or not sum(values) < PLAIN_BELOW:
        _mend(texts, values)
    return texts


def _mend(texts: list[str], values: Sequence[float]) -> None:
    """Format those numbers again that msgspec formats in another way."""
    for index, value in enumerate(values):
        if PLAIN_FROM <= value < PLAIN_BELOW or not value:
            continue
        if SMALL_FROM < value < PLAIN_FROM:
            texts[index] = _small(texts[index])
        elif PLAIN_BELOW <= value < LARGE_BELOW:
            texts[index] = _large(texts[index])
        else:
            texts[index] = number(value)


def _large(text: str) -> str:
    """Return a number from 1e6 on as Go formats it; msgspec writes 1500000.0 for 1.5e+06."""
    whole, _, rest = text.partition(".")
    mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
    return f"{mantissa}e+{len(whole) - 1:02}"


def _small(text: str) -> str:
    """Return a number below 1e-4 as Python formats it; msgspec writes 0.00005 and 5.1e-6 for 5e-05 and 5.1e-06."""
    mantissa, _, exponent = text.partition("e-")
    if exponent:
        return f"{mantissa}e-{exponent:0>2}"
    digits = mantissa[2:].lstrip("0")
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{rest}e-{len(mantissa) - 1 - len(digits):02}"
