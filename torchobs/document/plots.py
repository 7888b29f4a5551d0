"""A report's charts as image files, drawn by matplotlib: for papers and slides. The page draws its own (``axes``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from torchobs.document.blocks import Chart, Document, HeatMap, LineChart, StripChart
from torchobs.document.charts import curve, spreads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
_BUCKETS = 600
_STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e9ed", "axes.axisbelow": True,
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    "svg.fonttype": "none", "text.parse_math": False,
}  # fmt: skip
_COLOURS = ("#2f6fdb", "#c26a00", "#2c8a5f", "#8e44ad", "#b3231d", "#0f7f8c", "#6b5b00", "#55606c")
_SEVERITIES = {"error": "#b3231d", "warning": "#8a4b00", "info": "#1d5bb8"}


def draw(document: Document, directory: Path, form: str = "png") -> list[Path]:
    """Draw each chart of a report into ``directory``, which is created; return the files, named after the charts.

    Args:
        document: the report.
        directory: where to.
        form: ``png``, ``svg`` or ``pdf``.

    Raises:
        OSError: a file cannot be written.
        ValueError: another format.
    """
    if form not in FORMATS:
        raise ValueError(f"{form!r} is no format of these: {', '.join(FORMATS)}")
    directory.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    with mpl.rc_context(_STYLE):
        for chart in document.charts():
            stem = re.sub(r"[^a-z0-9]+", "-", chart.name.lower()).strip("-")[:60] or "chart"
            names = (directory / f"{stem}{f'-{number}' if number else ''}.{form}" for number in range(len(files) + 1))
            path = next(path for path in names if path not in files)
            rows = len(chart.rows) if isinstance(chart, StripChart) else len(chart.names) if isinstance(chart, HeatMap) else 0
            # no pyplot: it keeps global state, which may be the script's
            figure = Figure(figsize=(7.2, max(1.4, 0.9 + 0.22 * rows) if rows else 3.0), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            if _drawn(chart, figure.add_subplot()):
                figure.savefig(path, format=form, metadata={"Date": None} if form == "svg" else None)
                files.append(path)
    return files


def _drawn(chart: Chart, axes: Axes) -> bool:
    axes.set_title(chart.name)
    if isinstance(chart, LineChart):
        return _lines(chart, axes)
    axes.set_xlabel("step")
    return _strip(chart, axes) if isinstance(chart, StripChart) else _heat(chart, axes)


def _lines(chart: LineChart, axes: Axes) -> bool:
    values = []
    for index, series in enumerate(chart.series):
        line = curve(series.points, _BUCKETS)
        if line is not None:
            buckets = [bucket for bucket in line.buckets if bucket.mean is not None]
            places, colour = [bucket.at for bucket in buckets], _COLOURS[index % len(_COLOURS)]
            if len(chart.series) == 1:
                axes.fill_between(
                    places, [b.least for b in buckets], [b.greatest for b in buckets], color=colour, alpha=0.18, linewidth=0
                )
            axes.plot(places, [bucket.mean for bucket in buckets], color=colour, linewidth=1.2, label=series.name)  # type: ignore[arg-type]  # these are not None
            values += [value for _, value in series.points if isfinite(value)]
    for name, level in chart.levels:
        axes.axhline(level, color="#55606c", linewidth=1, linestyle="--", label=name)
    for mark in chart.marks:
        axes.axvline(mark.at, color=_SEVERITIES[mark.severity], linewidth=0.8, linestyle=":")
    if values and spreads(values):
        axes.set_yscale("log")
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the start" if chart.timed else "step")
    if values:
        axes.yaxis.set_major_formatter(_formatter(chart.rounded))
    if len(chart.series) > 1 or chart.levels:
        axes.legend(fontsize=8)
    return bool(values)


def _formatter(rounded: Callable[[float], str]) -> Callable[[float, float], str]:
    return lambda value, _: rounded(value)


def _strip(chart: StripChart, axes: Axes) -> bool:
    for index, (_, severity, steps) in enumerate(chart.rows):
        axes.plot(steps, [index] * len(steps), "o", markersize=4, color=_SEVERITIES[severity])
    axes.set_yticks(range(len(chart.rows)), [name for name, _, _ in chart.rows])
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.set_xlim(*chart.span)
    return True


def _heat(chart: HeatMap, axes: Axes) -> bool:
    rows = [[value if value is not None and value > 0 else float("nan") for value in row] for row in chart.values]
    positive = [value for row in rows for value in row if isfinite(value)]
    if not positive:
        return False
    norm = LogNorm(min(positive), max(positive)) if max(positive) > min(positive) else None
    image = axes.imshow(rows, aspect="auto", norm=norm, cmap="Blues", interpolation="nearest")
    axes.set_yticks(range(len(chart.names)), chart.names, fontsize=7)
    places = sorted({0, (len(chart.steps) - 1) // 2, len(chart.steps) - 1})
    axes.set_xticks(places, [f"{chart.steps[at]:,}" for at in places])
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, format=_formatter(chart.rounded))
    return True
