"""Decoding of value blocks, and the check that no counter decreases from one snapshot to the next."""

from __future__ import annotations

from math import isfinite
from operator import lt
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import Kind
from torchobs.flight.format.series import INT_ABSENT, Series, ValueType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Distribution(NamedTuple):
    """A histogram's value: counts per bucket (one more than bounds), sum, least and greatest value (None: empty)."""

    counts: tuple[int, ...]
    sum: float
    least: float | None
    greatest: float | None


Value = float | Distribution


class SeriesValue(NamedTuple):
    """One series and its value."""

    series: Series
    value: Value


class Columns:
    """Decoder of a value block's series, grouped by value type, so that most values are read by one list operation."""

    __slots__ = ("_floats", "_growing", "_others", "_run", "_words", "series")

    def __init__(self, series: Sequence[Series] = ()) -> None:
        self.series = tuple(series)
        numbered = list(enumerate(self.series))
        self._floats = [(index, one.word) for index, one in numbered if one.value_type == ValueType.FLOAT]
        self._others = [(index, one) for index, one in numbered if one.value_type != ValueType.FLOAT]
        self._growing = [index for index, one in numbered if one.kind in {Kind.COUNTER, Kind.HISTOGRAM}]
        self._words = max((one.word + one.width for one in self.series), default=0)
        self._run = self._consecutive()

    def _consecutive(self) -> slice | None:
        """Return the slice of the values if all are consecutive floats in series order, as a writer lays them out."""
        words = [word for _, word in self._floats]
        if self._others or not words or words != [*range(words[0], words[0] + len(words))]:
            return None
        return slice(words[0] * 8, (words[0] + len(words)) * 8)

    def read(self, words: bytes) -> DecodedBlock:
        """Return the value of each series; ``None`` where it is absent or its words are not written yet."""
        there = len(words) // 8
        if self._run is not None and there >= self._words:
            run: list[float] = list(memoryview(words)[self._run].cast("d"))
            if isfinite(sum(run)):  # then all of them are finite, as in nearly every block
                return DecodedBlock(self.series, run, whole=True)
        view = memoryview(words.ljust(self._words * 8, b"\0"))
        floats: list[float] = list(view.cast("d"))
        found: list[Value | None] = [None] * len(self.series)
        for index, word in self._floats:
            value = floats[word]
            if value - value == 0.0:  # finite: for NaN and infinities the difference is NaN
                found[index] = value
        ints = view.cast("Q").tolist() if self._others else []
        for index, one in self._others:
            found[index] = _VALUES[one.value_type](ints, floats, one.word, one)
        if there < self._words:
            found = [found[i] if one.word + one.width <= there else None for i, one in enumerate(self.series)]
        return DecodedBlock(self.series, found, whole=None not in found)

    def decreases(self, before: Sequence[Value | None], now: Sequence[Value | None]) -> bool:
        """Return True if a counter or a bucket decreased, or a counter became absent. ``before`` may be shorter."""
        for index in self._growing:
            if index >= len(before):
                return False
            old, new = before[index], now[index]
            if old is None or old == new:
                continue
            if isinstance(old, Distribution):
                if not isinstance(new, Distribution) or any(map(lt, new.counts, old.counts)):
                    return True
            elif new is None or isinstance(new, Distribution) or new < old:
                return True
        return False


class DecodedBlock(NamedTuple):
    """The series of one value block, and the value of each; ``None`` where it is absent."""

    series: tuple[Series, ...] = ()
    values: Sequence[Value | None] = ()
    whole: bool = False
    """True if it is known that no value is absent"""

    def points(self) -> Iterator[SeriesValue]:
        """Yield the series that have a value."""
        return (SeriesValue(one, value) for one, value in zip(self.series, self.values, strict=True) if value is not None)


def _int_value(ints: list[int], _: list[float], word: int, series: Series) -> int | None:
    value = ints[word]
    if value < INT_ABSENT:
        return value
    return value - (1 << 64) if series.kind is not Kind.COUNTER and value > INT_ABSENT else None


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
    if not isfinite(floats[total]):
        return None
    return Distribution(counts, floats[total], least if isfinite(least) else None, greatest if isfinite(greatest) else None)


_VALUES: dict[int, Callable[[list[int], list[float], int, Series], Value | None]] = {
    ValueType.INT: _int_value,
    ValueType.EITHER: _either_value,
    ValueType.HISTOGRAM: _distribution,
}
