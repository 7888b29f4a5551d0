"""From words to values: what a reader serves, and whether it may be served after what was served before."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import Kind
from torchobs.flight.series import INT_ABSENT, Series, ValueType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Distribution(NamedTuple):
    """A histogram's value: counts per bucket (one more than bounds), sum, least and greatest value (None: no value)."""

    counts: tuple[int, ...]
    sum: float
    least: float | None
    greatest: float | None


Value = float | Distribution


class Point(NamedTuple):
    """One series and its value."""

    series: Series
    value: Value


def evaluate(series: Sequence[Series], words: bytes | bytearray) -> list[Value | None]:
    """Return the value of each series of one block; ``None`` where it is absent or its words are not there yet."""
    view = memoryview(words)
    ints = view.cast("Q").tolist()
    floats = list(view.cast("d"))
    count = len(ints)
    values: list[Value | None] = []
    for one in series:
        there = one.word + one.width <= count
        values.append(_VALUES[one.value_type](ints, floats, one.word, one) if there else None)
    return values


def steps_back(series: Sequence[Series], before: Sequence[Value | None], now: Sequence[Value | None]) -> bool:
    """Tell whether a counter or a bucket went down, or a counter went away.

    All three are in the same order; ``before`` may be shorter.
    """
    for one, old, new in zip(series, before, now, strict=False):
        if old is None or old == new:
            continue
        if isinstance(old, Distribution):
            if not isinstance(new, Distribution) or any(a < b for a, b in zip(new.counts, old.counts, strict=True)):
                return True
        elif one.kind is Kind.COUNTER and (new is None or isinstance(new, Distribution) or new < old):
            return True
    return False


def _int_value(ints: list[int], _: list[float], word: int, series: Series) -> int | None:
    value = ints[word]
    if value < INT_ABSENT:
        return value
    return value - (1 << 64) if series.kind is not Kind.COUNTER and value > INT_ABSENT else None


def _float_value(_: list[int], floats: list[float], word: int, __: Series) -> float | None:
    return floats[word] if isfinite(floats[word]) else None


def _either_value(ints: list[int], floats: list[float], word: int, series: Series) -> float | None:
    whole, real = ints[word], floats[word + 1]
    signed = None if whole == INT_ABSENT else whole - (1 << 64) if whole >> 63 else whole
    if not isfinite(real):
        return signed
    return real if signed is None or series.kind is Kind.GAUGE else signed + real


def _distribution(ints: list[int], floats: list[float], word: int, series: Series) -> Distribution | None:
    total = word + len(series.bounds) + 1
    least, greatest = floats[total + 1], floats[total + 2]
    counts = tuple(ints[word:total])
    if not isfinite(floats[total]) or max(counts) >> 62:
        return None
    return Distribution(counts, floats[total], least if isfinite(least) else None, greatest if isfinite(greatest) else None)


_VALUES: dict[int, Callable[[list[int], list[float], int, Series], Value | None]] = {
    ValueType.INT: _int_value,
    ValueType.FLOAT: _float_value,
    ValueType.EITHER: _either_value,
    ValueType.HISTOGRAM: _distribution,
}
