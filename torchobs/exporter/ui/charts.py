"""Charts as inline SVG with text alternatives. Colours and widths are set in the style sheet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.catalog import PHASES
from torchobs.diagnosis import quantities
from torchobs.exporter.ui.html import EMPTY, Html, joined, tag, unseen
from torchobs.exporter.ui.sparkline_data import heights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchobs.exporter.ui.sparkline_data import Curve

_WIDTH, _HEIGHT = 240.0, 56.0
_LEAST_NAMED = 0.005

Points = list[tuple[float, float, float, float]]
"""x, and the y (downwards) of the mean, minimum and maximum of each bucket"""


def sparkline(curve: Curve | None, what: str, rounded: Callable[[float], str], *, stale: bool = False) -> Html:
    """Return a line of means within a band from minimum to maximum. ``stale``: without a curve, there were values before."""
    if curve is None:
        return tag("p", "No finite value lately." if stale else "No value yet.", class_="none")
    rows = _rows(curve)
    svg = tag(
        "svg",
        *(tag("path", d=_band(row), class_="band") for row in rows),
        *(tag("path", d=_line(row), class_="line") for row in rows),
        *(
            tag("path", d=f"M{_x(index, curve)} 3h.1", class_="odd")
            for index, bucket in enumerate(curve.buckets)
            if bucket.nonfinite
        ),
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
    """Return the chart's text alternative: first and last value, and extremes."""
    first = next(bucket.mean for bucket in curve.buckets if bucket.mean is not None)
    odd = f", {curve.nonfinite:,} values not finite" if curve.nonfinite else ""
    return (
        f"{what} from step {curve.first_step:,} to {curve.last_step:,}: from {rounded(first)} to {rounded(curve.last)},"
        f" least {rounded(curve.least)}, greatest {rounded(curve.greatest)}{odd}"
    )


def phases(shares: Sequence[float]) -> Html:
    """Return a bar of the phases' shares with the largest one's name."""
    parts = tuple(zip(PHASES, shares, strict=True))
    largest = max(parts, key=lambda part: part[1])
    words = ", ".join(f"{name} {quantities.share(part)}" for name, part in parts if part >= _LEAST_NAMED)
    visible = tag("span", f"{largest[0]} {quantities.share(largest[1])}", aria_hidden="true")
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


def meter(part: float | None) -> Html:
    """Return a bar of a fraction in use; the surrounding text gives the number."""
    return EMPTY if part is None else stacked([("full" if part >= 0.9 else "taken", part)])  # noqa: PLR2004


def _rows(curve: Curve) -> list[Points]:
    """Return the points in contiguous rows: buckets without finite values are gaps."""
    rows: list[Points] = [[]]
    for index, point in enumerate(heights(curve)):
        if point is None:
            rows.append([])
        else:
            x = float(_x(index, curve))
            mean, least, greatest = point
            rows[-1].append((x, _y(mean), _y(least), _y(greatest)))
    return [row for row in rows if row]


def _x(index: int, curve: Curve) -> str:
    return f"{_WIDTH * (index + 0.5) / len(curve.buckets):.1f}"


def _y(height: float) -> float:
    return 4 + (1 - height) * (_HEIGHT - 8)


def _line(row: Points) -> str:
    if len(row) == 1:
        return f"M{row[0][0] - 1:.1f} {row[0][1]:.1f}h2"
    return "M" + "L".join(f"{x:.1f} {mean:.1f}" for x, mean, _, _ in row)


def _band(row: Points) -> str:
    above = [f"{x:.1f} {top:.1f}" for x, _, _, top in row]
    below = [f"{x:.1f} {bottom:.1f}" for x, _, bottom, _ in reversed(row)]
    return f"M{'L'.join(above + below)}Z"
