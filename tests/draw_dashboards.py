"""Pictures of the dashboards for the documentation: ``python -m tests.draw_dashboards [UID...]`` writes docs/images/dashboards.

A real Prometheus gets an hour of simulated runs (tests/simulated_run.py) and answers the panels' queries; matplotlib draws what
Grafana would. Sections that are closed until somebody opens them are left out.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from PIL import Image

from tests.dashboards import shipped, variables
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.prometheus_server import Series as Answer
from tests.promql import filled
from tests.remote_write import FLAG, write
from tests.simulated_run import Run, Series, series
from tests.support import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = ROOT / "docs" / "images" / "dashboards"
RANGE_S, INTERVAL_S = 3300.0, 15.0
SHOWN = Run()
RUNS = (
    SHOWN,
    Run("vit", "20260105-vit-l", 8, 8, sick=False),
    Run("llama", "48213", 8, 8, sick=False),
)
ALERTS = (
    ("TorchobsStraggler", "ticket", 0.4, 0.6),
    ("TorchobsRankFailed", "ticket", 0.6, 0.66),
    ("TorchobsDataStarvation", "ticket", 0.42, 1.0),
)
"""Alerts of the sick run, as Prometheus records them: name, severity, and when they fire as shares of the time."""
INCH_PER_COLUMN, INCH_PER_ROW = 0.72, 0.36
COLORS = {
    "green": "#56a64b",
    "orange": "#ff9830",
    "red": "#e02f44",
    "blue": "#3274d9",
    "purple": "#8f3bb8",
    "dark-red": "#ad0317",
}
COLORS["text"] = "#3a3f45"
CYCLE = ("#56a64b", "#f2cc0c", "#3274d9", "#ff9830", "#e02f44", "#8f3bb8", "#00a3a3", "#b877d9", "#806eb7", "#707070")
TICK_S = 300.0
"""Long times have ticks at multiples of it"""
LEGENDS, ROWS = 6, 12
"""The most lines of a legend and rows of a table that are drawn."""


def alerts(began_s: float, ended_s: float) -> Iterator[Series]:
    """Yield the series that Prometheus makes of alerts."""
    for name, severity, first, last in ALERTS:
        span = ended_s - began_s
        times = np.arange(began_s + first * span, began_s + last * span, INTERVAL_S)
        of = {"alertname": name, "severity": severity, "job_name": SHOWN.job, "run_id": SHOWN.run}
        yield {"__name__": "ALERTS", "alertstate": "firing", **of}, times, np.ones(len(times))
        yield {"__name__": "ALERTS_FOR_STATE", **of}, times, np.full(len(times), times[0])


class Grafana:
    """Asks as Grafana does, for the run that is shown where a dashboard is about one."""

    def __init__(self, server: PrometheusServer, ended_s: float) -> None:
        self._server, self._ended_s = server, ended_s
        self.times = np.arange(ended_s - RANGE_S, ended_s, INTERVAL_S)

    def ask(self, panel: Mapping[str, Any], dashboard: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[Answer]]]:
        """The answers to each of the panel's queries."""
        return [(target, self._one(target, panel, dashboard)) for target in panel["targets"] if "@ 0" not in target["expr"]]

    def _one(self, target: Mapping[str, Any], panel: Mapping[str, Any], dashboard: Mapping[str, Any]) -> list[Answer]:
        query = target["expr"].replace('$run_id"', f'{SHOWN.run}"').replace('job_name=~"$job_name"', 'job_name=~".*"')
        rank = variables(dashboard).get("rank", {}).get("current", {}).get("value")
        query = query.replace('"$rank"', f'"{rank}"' if rank not in {None, "$__all"} else '".*"')
        query = query.replace('"$instance"', f'"{SHOWN.job}-.*"')
        query = filled(query, rate_interval="1m", range="55m", interval="15s")
        if target["instant"]:
            return self._server.query(query, self._ended_s - 1)
        step_s = max(INTERVAL_S, RANGE_S / (panel.get("maxDataPoints") or RANGE_S))
        return self._server.query_range(query, self._ended_s - RANGE_S, self._ended_s, f"{step_s:.0f}s")


UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((86400, " d"), (3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1, " B")),
    "percentunit": ((0.01, " %"),),
    "": ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"), (1, "")),
}
"""Sizes and names of units, the greatest first; the last is for all that are smaller."""
SUFFIXES = {"Bps": "/s", "watt": "W", "celsius": "°C", "joule": "J"}


def text_of(value: float, unit: str, texts: Mapping[str, str] | None = None) -> str:
    """A value as Grafana would write it, roughly."""
    if texts and f"{value:g}" in texts:
        return texts[f"{value:g}"]
    sizes = UNITS["bytes" if unit == "Bps" else unit if unit in UNITS else ""]
    size, name = next(((size, name) for size, name in sizes if abs(value) >= size), sizes[-1])
    if unit == "s" and not value:
        name = " s"
    return f"{value / size:.3g}{name}{SUFFIXES.get(unit, '')}"


def legend_of(target: Mapping[str, Any], one: Answer) -> str:
    """The name of a series in the legend."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: one.labels.get(found[1], ""), target["legendFormat"]).strip() or "value"


def mappings(defaults: Mapping[str, Any]) -> dict[str, str]:
    """Words for values."""
    return {value: result["text"] for one in defaults.get("mappings") or () for value, result in one["options"].items()}


def color_at(value: float, defaults: Mapping[str, Any]) -> str:
    """The colour of the threshold that a value has passed."""
    shade = "text"
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            shade = step["color"]
    return COLORS.get(shade, COLORS["text"])


class Canvas:
    """Draws one dashboard."""

    def __init__(self, grafana: Grafana, dashboard: Mapping[str, Any]) -> None:
        from matplotlib.figure import Figure

        self._grafana, self._dashboard = grafana, dashboard
        self._rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
        self.figure: Figure = Figure(figsize=(24 * INCH_PER_COLUMN, self._rows * INCH_PER_ROW), facecolor="#f4f5f5")

    def draw(self) -> Figure:
        """Return the figure."""
        self.figure.text(0.006, 1 - 0.9 / self._rows, self._dashboard["title"], fontsize=15, weight="bold", va="center")
        for panel in self._dashboard["panels"]:
            place = panel["gridPos"]
            left, bottom = place["x"] / 24, 1 - (place["y"] + place["h"] + 2) / self._rows
            if panel["type"] == "row":
                sign = "▸" if panel["collapsed"] else "▾"
                self.figure.text(left + 0.006, bottom + 0.5 / self._rows, f"{sign} {panel['title']}", fontsize=11, va="center")
            else:
                self._panel(panel, (left, bottom, place["w"] / 24, place["h"] / self._rows))
        return self.figure

    def _panel(self, panel: Mapping[str, Any], box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        frame = self.figure.add_axes((left + 0.002, bottom + 0.1 / self._rows, width - 0.004, height - 0.2 / self._rows))
        frame.set(xticks=[], yticks=[], facecolor="white")
        for spine in frame.spines.values():
            spine.set_color("#d8d9da")
        self.figure.text(left + 0.007, bottom + height - 0.65 / self._rows, panel["title"], fontsize=8.5, va="center")
        answers = self._grafana.ask(panel, self._dashboard)
        inner = (left + 0.035, bottom + 1.9 / self._rows, width - 0.045, height - 3.2 / self._rows)
        if not any(found for _, found in answers):
            self.figure.text(left + width / 2, bottom + height / 2, "No data", ha="center", color="#8e8e8e", fontsize=9)
        elif panel["type"] == "stat":
            self._stat(panel, answers, box)
        elif panel["type"] == "table":
            self._table(panel, answers, box)
        elif panel["type"] == "heatmap":
            self._heatmap(panel, answers, self.figure.add_axes(inner))
        elif panel["type"] == "barchart":
            self._bars(answers, self.figure.add_axes(inner))
        elif panel["type"] == "state-timeline":
            self._timeline(panel, answers, self.figure.add_axes((left + 0.11, inner[1], width - 0.12, inner[3])))
        else:
            self._lines(panel, answers, self.figure.add_axes(inner))

    def _stat(self, panel: Mapping[str, Any], answers: Any, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        defaults = panel["fieldConfig"]["defaults"]
        value = next(found[0].value for _, found in answers if found)
        value = round(value) if defaults.get("decimals") == 0 else value
        text = text_of(value, defaults["unit"], mappings(defaults))
        place = left + width / 2, bottom + height * 0.42
        self.figure.text(*place, text, ha="center", va="center", fontsize=19, color=color_at(value, defaults))

    def _table(self, panel: Mapping[str, Any], answers: Any, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        organize = panel["transformations"][1]["options"]
        values: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        rename = organize["renameByName"]
        units = {
            one["matcher"]["options"]: {part["id"]: part["value"] for part in one["properties"]}
            for one in panel["fieldConfig"]["overrides"]
        }
        for number, (_, found) in enumerate(answers):
            name = f"Value #{chr(ord('A') + number)}" if len(answers) > 1 else "Value"
            for one in found:
                key = tuple(sorted((k, v) for k, v in one.labels.items() if k in rename))
                values.setdefault(key, dict(key))[name] = one.value
        shown = [(source, title) for source, title in rename.items() if any(source in row for row in values.values())]
        for column, (source, title) in enumerate(shown):
            x = left + 0.008 + (width - 0.012) * column / len(shown)
            self.figure.text(x, bottom + height - 1.7 / self._rows, title, fontsize=8, weight="bold", va="center")
            for line, row in enumerate(list(values.values())[: min(ROWS, int((height * self._rows - 2.4) / 0.9))]):
                value, more = row.get(source, ""), units.get(title, {})
                color = (
                    color_at(value, {"thresholds": more.get("thresholds", {})}) if isinstance(value, float) else COLORS["text"]
                )
                text = text_of(value, more.get("unit", "short")) if isinstance(value, float) else value
                self.figure.text(
                    x, bottom + height - (2.7 + 0.9 * line) / self._rows, text, fontsize=8, va="center", color=color
                )

    def _lines(self, panel: Mapping[str, Any], answers: Any, axes: Axes) -> None:
        from matplotlib.ticker import LogLocator

        defaults = panel["fieldConfig"]["defaults"]
        custom = defaults["custom"]
        fixed, aside = {}, {}
        for one in panel["fieldConfig"]["overrides"]:
            parts = {part["id"]: part["value"] for part in one["properties"]}
            if "color" in parts:
                fixed[one["matcher"]["options"].strip("/")] = COLORS.get(parts["color"]["fixedColor"])
            if parts.get("custom.axisPlacement") == "right":
                aside[one["matcher"]["options"].strip("/")] = axes.twinx()
        named = [(legend_of(target, one), one) for target, found in answers for one in found]
        stack = np.zeros(len(self._grafana.times))
        stacked = custom.get("stacking", {}).get("mode") == "normal"
        for number, (name, one) in enumerate(named):
            color = next((shade for like, shade in fixed.items() if shade and re.match(like, name)), CYCLE[number % len(CYCLE)])
            times, values = self._gaps(one)
            label = name if number < LEGENDS else None
            if stacked:
                grid = np.nan_to_num(np.interp(self._grafana.times, times, values, left=0, right=0))
                axes.fill_between(
                    self._dates(self._grafana.times), stack, stack + grid, color=color, alpha=0.75, lw=0, label=label
                )
                stack = stack + grid
            else:
                place = next((other for like, other in aside.items() if re.match(like, name)), axes)
                place.plot(self._dates(times), values, color=color, lw=1.1, label=label)
                if place is not axes:  # for the legend
                    axes.plot([], [], color=color, lw=1.1, label=label)
        if custom.get("scaleDistribution", {}).get("type") == "log" and axes.get_ylim()[1] > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        elif defaults.get("min") == 0:
            axes.set_ylim(bottom=0)
        self._thresholds(panel, axes)
        self._axes(axes, defaults["unit"])
        for other in aside.values():
            other.set_ylim(bottom=0)
            self._axes(other, "short")
            other.tick_params(axis="y", direction="in", pad=-12)
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.1),
            ncols=3,
            fontsize=6.5,
            frameon=False,
            handlelength=1,
            columnspacing=1,
        )

    def _thresholds(self, panel: Mapping[str, Any], axes: Axes) -> None:
        defaults = panel["fieldConfig"]["defaults"]
        if defaults["custom"].get("thresholdsStyle", {}).get("mode") == "dashed":
            low, high = axes.get_ylim()
            for step in defaults["thresholds"]["steps"]:
                if step["value"] is not None and low <= step["value"] <= high:
                    axes.axhline(step["value"], color=COLORS[step["color"]], ls="--", lw=0.8)

    def _heatmap(self, panel: Mapping[str, Any], answers: Any, axes: Axes) -> None:
        ((target, found),) = answers
        if "{{le}}" in target["legendFormat"]:
            found = sorted(found, key=lambda one: float(one.labels["le"].replace("+Inf", "inf")))
        names = [legend_of(target, one) for one in found]
        times = np.unique(np.concatenate([[time_s for time_s, _ in one.points] for one in found]))
        grid = np.full((len(found), len(times)), np.nan)
        for row, one in enumerate(found):
            grid[row, np.searchsorted(times, [time_s for time_s, _ in one.points])] = [value for _, value in one.points]
        if "{{le}}" in target["legendFormat"]:
            grid = np.diff(grid, axis=0, prepend=0)
            grid[grid <= 0] = np.nan
        options = panel["options"]["color"]
        limits = {"vmin": options.get("min"), "vmax": options.get("max")}
        scheme = mpl.colormaps[options["scheme"]]
        scheme = scheme.reversed() if options.get("reverse") or "{{le}}" in target["legendFormat"] else scheme
        drawn = axes.pcolormesh(self._dates(times), np.arange(len(found)), grid, cmap=scheme, shading="nearest", **limits)
        ticks = np.unique(np.linspace(0, len(found) - 1, min(len(found), 8)).astype(int))
        axes.set_yticks(ticks, [names[tick] for tick in ticks])
        unit = panel["fieldConfig"]["defaults"]["unit"]
        bar = self.figure.colorbar(drawn, ax=axes, pad=0.01, aspect=30, format=lambda value, _: text_of(value, unit))
        bar.ax.tick_params(labelsize=6)
        bar.outline.set_visible(False)
        self._axes(axes, None)

    def _bars(self, answers: Any, axes: Axes) -> None:
        ((_, found),) = answers
        rows = sorted({one.labels["rank"] for one in found}, key=int)
        left = np.zeros(len(rows))
        for number, column in enumerate(sorted({one.labels["phase"] for one in found})):
            values = {one.labels["rank"]: one.value for one in found if one.labels["phase"] == column}
            widths = np.array([values.get(row, 0.0) for row in rows])
            axes.barh(rows, widths, left=left, color=CYCLE[number], height=0.85, label=column)
            left += widths
        self._axes(axes, None, dates=False)
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncols=5, fontsize=6.5, frameon=False, handlelength=1)

    def _timeline(self, panel: Mapping[str, Any], answers: Any, axes: Axes) -> None:
        named = [(legend_of(target, one), one) for target, found in answers for one in found]
        for row, (_, one) in enumerate(named):
            for time_s, value in one.points:
                color = color_at(value, panel["fieldConfig"]["defaults"])
                axes.barh(row, INTERVAL_S / 86400, left=self._dates(np.array([time_s]))[0], color=color, height=0.7)
        axes.set_yticks(range(len(named)), [name[:34] for name, _ in named])
        axes.set_xlim(*self._dates(self._grafana.times[[0, -1]]))
        self._axes(axes, None)

    def _gaps(self, one: Answer) -> tuple[Any, Any]:
        """Times and values, with a hole where no sample was."""
        times, values = (np.array(part, dtype=float) for part in zip(*one.points, strict=True))
        holes = np.flatnonzero(np.diff(times) > 4 * INTERVAL_S)
        return np.insert(times, holes + 1, times[holes] + 1), np.insert(values, holes + 1, np.nan)

    @staticmethod
    def _dates(times: Any) -> Any:
        from matplotlib.dates import date2num

        dates = [datetime.fromtimestamp(time_s, timezone.utc) for time_s in times]
        return date2num(dates)  # type: ignore[no-untyped-call]  # matplotlib says nothing of it

    @staticmethod
    def _axes(axes: Axes, unit: str | None, *, dates: bool = True) -> None:
        from matplotlib.dates import DateFormatter, MinuteLocator
        from matplotlib.ticker import MultipleLocator, NullFormatter

        if dates:
            axes.xaxis.set_major_locator(MinuteLocator(byminute=range(0, 60, 15)))  # type: ignore[no-untyped-call]  # nor here
            axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))  # type: ignore[no-untyped-call]  # nor here
        if unit:
            axes.yaxis.set_major_formatter(lambda value, _: text_of(value, unit))
            axes.yaxis.set_minor_formatter(NullFormatter())
            low, high = axes.get_ylim()
            if axes.get_yscale() == "linear" and unit in {"bytes", "Bps"}:
                axes.yaxis.set_major_locator(MultipleLocator(2.0 ** np.ceil(np.log2((high - low) / 6))))
            elif axes.get_yscale() == "linear" and unit == "s" and high - low > TICK_S:
                axes.yaxis.set_major_locator(MultipleLocator(TICK_S * np.ceil((high - low) / 6 / TICK_S)))
        axes.tick_params(labelsize=6.5, length=2, colors="#5a5f66")
        axes.grid(color="#e9eaea", lw=0.5)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#c8c9ca")


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uids", nargs="*", metavar="UID", help="which, e.g. torchobs-run (default: all)")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder to write to (default: docs/images/dashboards)")
    options = parser.parse_args(argv)
    program = newest_prometheus(2)
    if program is None:
        sys.exit("needs a Prometheus on PATH: apt-get install prometheus")
    mpl.use("agg")
    options.out.mkdir(parents=True, exist_ok=True)
    with PrometheusServer(program, arguments=[FLAG]) as server:
        ended_s = time.time() // 3600 * 3600
        began_s = ended_s - RANGE_S
        for run in RUNS:
            write(server.address, series(run, began_s, ended_s, INTERVAL_S))
        write(server.address, alerts(began_s, ended_s))
        for uid, dashboard in shipped().items():
            if not options.uids or uid in options.uids:
                path = options.out / f"{uid.removeprefix('torchobs-')}.png"
                drawn = io.BytesIO()
                Canvas(Grafana(server, ended_s), dashboard).draw().savefig(drawn, dpi=72)
                Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
                print(f"wrote {path}")  # noqa: T201  # for who called it


if __name__ == "__main__":
    main()
