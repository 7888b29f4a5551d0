"""Values of a rank by name: looked up once, then read by position, to read a thousand ranks every second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.catalog import BY_NAME, Metric, cumulative
from torchobs.flight.reader.decode import DecodedBlock, Distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.flight.format.series import Series
    from torchobs.ranks.snapshot import Rank

Key = tuple[str, ...]
"""Attribute values of a series, in its own order."""


class Readings:
    """A rank's values by metric and attribute values. For a dead rank the same as stay on the metrics page."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, dict[Key, float]]) -> None:
        self._values = values

    def get(self, metric: Metric, *key: str) -> float | None:
        """Return one value; ``None`` if absent."""
        return self._values.get(metric.name, {}).get(key)

    def of(self, metric: Metric) -> dict[Key, float]:
        """Return all values of a metric, by the values of its attributes."""
        return self._values.get(metric.name, {})


def readings_of(rank: Rank) -> Readings:
    """Return a rank's values as in its file: of a dead rank all, and not only those that stay on the metrics page."""
    values: dict[str, dict[Key, float]] = {}
    for series, value in rank.view.points:
        if series.scope is None and not isinstance(value, Distribution):
            values.setdefault(series.name, {})[tuple(str(text) for _, text in series.attributes)] = value
    return Readings(values)


class Reader:
    """Reads a fixed set of metrics repeatedly."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._names = frozenset(metric.name for metric in metrics)
        self._places: dict[int, list[_Places]] = {}

    def read(self, rank: Rank) -> Readings:
        """Return the rank's values of these metrics."""
        known = self._places.setdefault(rank.opened, [])
        values: dict[str, dict[Key, float]] = {}
        for index, block in enumerate(rank.view.blocks):
            if index == len(known):
                known.append(_Places((), []))
            if known[index].series is not block.series:
                known[index] = _Places(block.series, list(self._find(block)))
            known[index].add_to(values, block, up=rank.up)
        return Readings(values)

    def keep(self, ranks: Iterable[Rank]) -> None:
        """Drop cached state of all other ranks."""
        kept = {rank.opened for rank in ranks}
        for gone in self._places.keys() - kept:
            del self._places[gone]

    def _find(self, block: DecodedBlock) -> Iterator[tuple[int, str, Key, bool]]:
        for index, series in enumerate(block.series):
            if series.name in self._names and series.scope is None:
                key = tuple(str(value) for _, value in series.attributes)
                yield index, series.name, key, cumulative(series.kind) or BY_NAME[series.name].survives


class _Places:
    """Positions of the values in a block."""

    __slots__ = ("found", "series")

    def __init__(self, series: tuple[Series, ...], found: list[tuple[int, str, Key, bool]]) -> None:
        self.series, self.found = series, found

    def add_to(self, values: dict[str, dict[Key, float]], block: DecodedBlock, *, up: bool) -> None:
        for index, name, key, survives in self.found:
            value = block.values[index]
            if value is not None and (up or survives) and not isinstance(value, Distribution):
                values.setdefault(name, {})[key] = value
