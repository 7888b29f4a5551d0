"""Numbers as text, many at once: to write them is most of what a page takes.

``repr`` takes 0.8 µs for a float of 17 digits, msgspec 0.08 µs. Both write the shortest digits that are that float again, and
where neither writes an exponent the same text: no difference in 2 million floats, among them powers of two, their neighbours
and floats of 32 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchobs.exporter.encoder import PLAIN_BELOW, number

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN_FROM = 1e-4
"""Below it Python writes an exponent."""
SMALL_FROM = 1e-20
"""Below it a number is too rare for a way of its own."""
_encode = msgspec.json.Encoder().encode


def numbers(values: Sequence[float]) -> list[str]:
    """Return finite floats as ``encoder.number`` writes each. No integers: they would have no point."""
    if not values:
        return []
    encoded = _encode(values)
    texts = encoded[1:-1].decode().split(",")
    # a search takes a tenth of what comparing takes: what is below 1e-4 has an exponent or four zeros behind its point, and
    # what is not negative is below 1e6 if all of them together are
    if b"e" in encoded or b"-" in encoded or b"0.0000" in encoded or not sum(values) < PLAIN_BELOW:
        _mend(texts, values)
    return texts


def _mend(texts: list[str], values: Sequence[float]) -> None:
    """Write those again that msgspec writes in another way."""
    for index, value in enumerate(values):
        if not PLAIN_FROM <= value < PLAIN_BELOW:
            texts[index] = _small(texts[index]) if SMALL_FROM < value < PLAIN_FROM else number(value)


def _small(text: str) -> str:
    """Return a number below 1e-4 as Python writes it; msgspec writes 0.00005 and 5.1e-6 for 5e-05 and 5.1e-06."""
    mantissa, _, exponent = text.partition("e-")
    if exponent:
        return f"{mantissa}e-{exponent:0>2}"
    digits = mantissa[2:].lstrip("0")
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{rest}e-{len(mantissa) - 1 - len(digits):02}"
