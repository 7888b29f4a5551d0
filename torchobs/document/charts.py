"""Charts: a quantity over many steps reduced to a small curve, and SVG with text alternatives.

Colours and widths are set in the style sheet.
"""

from __future__ import annotations

from math import isfinite, log10
from typing import TYPE_CHECKING, NamedTuple

from torchobs.catalog import PHASES
from torchobs.document.markup import Html, joined, tag, unseen
from torchobs.support import text as text_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

BUCKETS = 120
"""Points of a curve: one for each two pixels or so."""

LOG_FROM = 30.0
"""Ratio of the largest to the typical value from which a logarithmic scale is used; a linear one would show only a spike."""

_WIDTH, _HEIGHT = 240.0, 56.0
_LEAST_NAMED = 0.005

Points = list[tuple[float, float, float, float]]
"""x, and the y (downwards) of the mean, minimum and maximum of each bucket"""


class Bucket(NamedTuple):
    """Mean, minimum and maximum of the finite values of neighbouring steps; ``None`` if there are none."""

    mean: float | None
    least: float
    greatest: float
    nonfinite: int
    at: float = 0.0
    """mean of their step numbers"""


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


def curve(values: Iterable[tuple[int, float]], most: int = BUCKETS) -> Curve | None:
    """Return the chart's data in at most so many buckets; ``None`` if no value is finite.

    Values delivered late by a device are sorted to their step.
    """
    ordered = sorted(values)
    finite = [value for _, value in ordered if isfinite(value)]
    if not finite:
        return None
    count, number = len(ordered), min(len(ordered), most)
    groups = (ordered[index * count // number : (index + 1) * count // number] for index in range(number))
    buckets = tuple(_bucket(group) for group in groups)
    return Curve(
        first_step=ordered[0][0],
        last_step=ordered[-1][0],
        buckets=buckets,
        last=finite[-1],
        least=min(finite),
        greatest=max(finite),
        nonfinite=len(ordered) - len(finite),
        logarithmic=spreads(finite),
    )


def curve_of(points: Iterable[tuple[float, float]], most: int) -> Curve | None:
    """Return the data of a chart over steps or seconds, whose buckets count in thousandths: a curve counts in whole steps."""
    return curve(((round(at * 1000), value) for at, value in points), most)


def height_of(curve: Curve) -> Callable[[float], float]:
    """Return the function that scales the curve's values to 0 (the chart's bottom) to 1."""

    def scaled(value: float) -> float:
        return log10(value) if curve.logarithmic else value

    low, room = scaled(curve.least), scaled(curve.greatest) - scaled(curve.least)
    if not (room > 0 and isfinite(room)):
        return lambda _: 0.5
    return lambda value: min(1.0, max(0.0, (scaled(value) - low) / room))


def drawn(
    curve: Curve, x: Callable[[int], float], y: Callable[[float], float], line: str = "line", *, banded: bool = True
) -> list[Html]:
    """Return a curve's means in a band from minimum to maximum, with gaps and marks where nothing is finite.

    ``x``: the place of a bucket by its index; ``y``: that of a value, downwards.
    """
    rows: list[Points] = [[]]
    for index, bucket in enumerate(curve.buckets):
        if bucket.mean is None:
            rows.append([])
        else:
            rows[-1].append((x(index), y(bucket.mean), y(bucket.least), y(bucket.greatest)))
    bands = [tag("path", d=band_path(row), class_="band") for row in rows if row and banded]
    lines = [tag("path", d=line_path(row), class_=line) for row in rows if row]
    odd = [index for index, bucket in enumerate(curve.buckets) if bucket.nonfinite]
    return [*bands, *lines, *(tag("path", d=f"M{x(index):.1f} 4h.1", class_="odd") for index in odd)]


def _bucket(group: Sequence[tuple[int, float]]) -> Bucket:
    finite = [value for _, value in group if isfinite(value)]
    missing, at = len(group) - len(finite), sum(step for step, _ in group) / len(group)
    if not finite:
        return Bucket(None, 0.0, 0.0, missing, at)
    # divided first: the sum of very large floats is infinite
    return Bucket(sum(value / len(finite) for value in finite), min(finite), max(finite), missing, at)


def spreads(finite: Sequence[float]) -> bool:
    """Return True if the largest of the values is so far above the typical one that a linear scale would show it alone."""
    ordered = sorted(finite)
    return ordered[0] > 0 and ordered[-1] / LOG_FROM > ordered[len(ordered) // 2]


def sparkline(curve: Curve | None, what: str, rounded: Callable[[float], str], *, stale: bool = False) -> Html:
    """Return a line of means within a band from minimum to maximum. ``stale``: without a curve, there were values before."""
    if curve is None:
        return tag("p", "No finite value lately." if stale else "No value yet.", class_="none")
    height, count = height_of(curve), len(curve.buckets)
    svg = tag(
        "svg",
        *drawn(curve, lambda index: _WIDTH * (index + 0.5) / count, lambda value: 4 + (1 - height(value)) * (_HEIGHT - 8)),
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=alternative(curve, what, rounded),
    )
    notes = [f"{rounded(curve.least)} to {rounded(curve.greatest)}", f"steps {curve.first_step:,}–{curve.last_step:,}"]
    notes += ["log scale"] * curve.logarithmic
    notes += [f"{curve.nonfinite:,} not finite"] * bool(curve.nonfinite)
    return joined([svg, tag("p", " · ".join(notes), class_="range")])


def alternative(curve: Curve, what: str, rounded: Callable[[float], str]) -> str:
    """Return the text alternative of a chart over steps."""
    return f"{what} from step {curve.first_step:,} to {curve.last_step:,}: {described(curve, rounded)}"


def described(curve: Curve, rounded: Callable[[float], str]) -> str:
    """Return a curve in words: first and last value, and extremes."""
    first = next(bucket.mean for bucket in curve.buckets if bucket.mean is not None)
    odd = f", {curve.nonfinite:,} values not finite" if curve.nonfinite else ""
    ends = f"from {rounded(first)} to {rounded(curve.last)}"
    return f"{ends}, least {rounded(curve.least)}, greatest {rounded(curve.greatest)}{odd}"


def phases(shares: Sequence[float]) -> Html:
    """Return a bar of the phases' shares with the largest one's name."""
    parts = tuple(zip(PHASES, shares, strict=True))
    largest = max(parts, key=lambda part: part[1])
    words = ", ".join(f"{name} {text_format.percent(part)}" for name, part in parts if part >= _LEAST_NAMED)
    visible = tag("span", f"{largest[0]} {text_format.percent(largest[1])}", aria_hidden="true")
    return joined([stacked(parts), visible, unseen(words)])


def stacked(parts: Iterable[tuple[str, float]]) -> Html:
    """Return a stacked bar of shares. It has no text alternative: the surrounding text gives the numbers."""
    drawn, at = [], 0.0
    for name, part in parts:
        width = min(max(part, 0.0), 1.0) * 100
        if width > 0:
            drawn.append(
                tag("rect", x=f"{at:.2f}", y="0", width=f"{max(width - 0.6, 0.2):.2f}", height="8", class_=f"is-{name}")
            )
        at += width
    return tag("svg", *drawn, viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true", class_="bar")


def line_path(row: Points) -> str:
    """Return the path of the means."""
    if len(row) == 1:
        return f"M{row[0][0] - 1:.1f} {row[0][1]:.1f}h2"
    return "M" + "L".join(f"{x:.1f} {mean:.1f}" for x, mean, _, _ in row)


def band_path(row: Points) -> str:
    """Return the path around the minima and maxima."""
    above = [f"{x:.1f} {top:.1f}" for x, _, _, top in row]
    below = [f"{x:.1f} {bottom:.1f}" for x, _, bottom, _ in reversed(row)]
    return f"M{'L'.join(above + below)}Z"
