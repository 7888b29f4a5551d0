"""Reduce a quantity over the steps in a rank's record ring to the points of a small chart."""

from __future__ import annotations

from array import array
from math import isfinite, log10
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.format.step_record import RecordKind, StepFlag

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchobs.flight.format.step_record import StepRecord

KEPT = 4096
"""Values kept: as many as the ring has records."""

BUCKETS = 120
"""Points of a chart: one for each two pixels or so."""

LOG_FROM = 30.0
"""Ratio of the largest to the typical value from which a logarithmic scale is used; a linear one would show only a spike."""


class Bucket(NamedTuple):
    """Mean, minimum and maximum of the finite values of neighbouring steps; ``None`` if there are none."""

    mean: float | None
    least: float
    greatest: float
    nonfinite: int


class Curve(NamedTuple):
    """The data of a chart."""

    first_step: int
    last_step: int
    buckets: tuple[Bucket, ...]
    last: float
    least: float
    greatest: float
    nonfinite: int
    logarithmic: bool


class RankHistory:
    """Loss, gradient norm and step time of one rank."""

    def __init__(self) -> None:
        self.losses, self.norms, self.times = RecentValues(), RecentValues(), RecentValues()
        self.upto = 0
        """number of the last record added"""

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add the records that are new."""
        for record in records:
            if record.seq <= self.upto:
                continue
            self.upto = record.seq
            if record.flags & StepFlag.LOSS:
                self.losses.append(record.step, record.loss)
            if record.flags & StepFlag.GRAD_NORM:
                self.norms.append(record.step, record.grad_norm)
            if record.kind == RecordKind.STEP and not record.flags & StepFlag.UNTIMED:
                self.times.append(record.step, record.duration_s)


class RecentValues:
    """The last values with their steps, in arrays: 16 bytes each, where a list of tuples takes 120."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")

    def append(self, step: int, value: float) -> None:
        """Add a value; the oldest are dropped in blocks."""
        self._steps.append(step)
        self._values.append(value)
        if len(self._values) >= 2 * KEPT:
            del self._steps[:KEPT], self._values[:KEPT]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield the last (step, value) pairs in the order of their addition."""
        return ((int(step), value) for step, value in zip(self._steps[-KEPT:], self._values[-KEPT:], strict=True))


def curve(values: Iterable[tuple[int, float]]) -> Curve | None:
    """Return the chart's data; ``None`` if no value is finite. Values delivered late by a device are sorted to their step."""
    ordered = sorted(values)
    finite = [value for _, value in ordered if isfinite(value)]
    if not finite:
        return None
    groups = (ordered[first:last] for first, last in _edges(len(ordered)))
    buckets = tuple(_bucket([value for _, value in group]) for group in groups)
    return Curve(
        first_step=ordered[0][0],
        last_step=ordered[-1][0],
        buckets=buckets,
        last=finite[-1],
        least=min(finite),
        greatest=max(finite),
        nonfinite=len(ordered) - len(finite),
        logarithmic=_spreads(finite),
    )


def heights(curve: Curve) -> list[tuple[float, float, float] | None]:
    """Return each bucket's (mean, minimum, maximum), scaled to 0 (the chart's bottom) to 1."""

    def scaled(value: float) -> float:
        return log10(value) if curve.logarithmic else value

    low, high = scaled(curve.least), scaled(curve.greatest)
    room = high - low
    if not (room > 0 and isfinite(room)):
        return [(0.5, 0.5, 0.5) if bucket.mean is not None else None for bucket in curve.buckets]

    def height(value: float) -> float:
        return min(1.0, max(0.0, (scaled(value) - low) / room))

    return [
        (height(bucket.mean), height(bucket.least), height(bucket.greatest)) if bucket.mean is not None else None
        for bucket in curve.buckets
    ]


def _edges(count: int) -> Iterable[tuple[int, int]]:
    buckets = min(count, BUCKETS)
    return ((index * count // buckets, (index + 1) * count // buckets) for index in range(buckets))


def _bucket(values: Sequence[float]) -> Bucket:
    finite = [value for value in values if isfinite(value)]
    missing = len(values) - len(finite)
    if not finite:
        return Bucket(None, 0.0, 0.0, missing)
    # divided first: the sum of very large floats is infinite
    return Bucket(sum(value / len(finite) for value in finite), min(finite), max(finite), missing)


def _spreads(finite: Sequence[float]) -> bool:
    ordered = sorted(finite)
    return ordered[0] > 0 and ordered[-1] / LOG_FROM > ordered[len(ordered) // 2]
