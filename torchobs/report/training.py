"""Sections on the optimization: loss, gradients, learning rate, anomalies, layers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from statistics import median

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis import text_format
from torchobs.diagnosis.rank_report import Fact, RankReport, Step
from torchobs.report.content import HeatMap, LineChart, Mark, Point, Section, Series, StripChart, Table, Text, section

_MOST_MARKS = 40
_MOST_SCALARS = 16
_SEVERITIES = {Severity.INFO: "info", Severity.WARNING: "warning", Severity.ERROR: "error"}
_ORDINARY = frozenset(
    event.name
    for event in (
        catalog.EVENT_RUN_START, catalog.EVENT_RUN_END, catalog.EVENT_SCALARS, catalog.EVENT_MODEL, catalog.EVENT_TRAINER,
        catalog.EVENT_DISTRIBUTED, catalog.EVENT_CHILDREN, catalog.EVENT_STACKS, catalog.EVENT_PROFILE_START,
        catalog.EVENT_PROFILE_END, catalog.EVENT_DEBUG_VALIDATION, catalog.EVENT_TUNE_PLAN, catalog.EVENT_TUNE_BENCHMARK,
    )
)  # fmt: skip
"""Events that are no sign of anything"""


def section_of(report: RankReport, of: str) -> Section:
    """Return the curves of the optimization."""
    steps = report.steps
    marks = _marks(report)
    limit = report.value(catalog.GRAD_CLIP_MAX_NORM)
    charts = [
        LineChart("Loss", _series(steps, "loss"), marks=tuple(mark for mark in marks if "loss" in mark.name)),
        LineChart(
            "Gradient norm", _series(steps, "grad_norm"), marks=tuple(mark for mark in marks if "gradient" in mark.name),
            levels=(("clipping at", limit),) if limit is not None else (), note=_clipped(report),
        ),
        LineChart("Learning rate", _series(steps, "learning_rate")),
        _scale(report),
        *_scalars(report),
    ]  # fmt: skip
    return section("training", f"Training{of}", *(chart for chart in charts if chart is not None and chart.series))


def _series(steps: Iterable[Step], field: str) -> tuple[Series, ...]:
    points = points_of(steps, field)
    return (Series(field.replace("_", " "), points),) if points else ()


def _marks(report: RankReport) -> list[Mark]:
    found = [fact for fact in report.events_named(catalog.EVENT_ANOMALY) if fact.step is not None]
    first = report.steps[0].step if report.steps else 0
    return [
        Mark(float(fact.step), _severity(fact), fact.text("kind").replace("_", " "))
        for fact in found[:_MOST_MARKS]
        if fact.step is not None and fact.step >= first
    ]


def _clipped(report: RankReport) -> str:
    steps = report.value(catalog.GRAD_CLIPPED_STEPS)
    if not steps:
        return ""
    share = text_format.percent(steps / report.last_step) if report.last_step else ""
    return f"Clipped in {int(steps):,} steps ({share} of all); the norm is that before clipping."


def _scale(report: RankReport) -> LineChart | None:
    curves = report.history.of(catalog.AMP_SCALE.name)
    series = tuple(
        Series(f"scaler {name}" if name else "loss scale", [(float(row.step), value) for row, value in points])
        for name, points in curves.items()
    )
    skipped = int(report.value(catalog.AMP_STEPS_SKIPPED) or 0)
    note = f"{text_format.plural(skipped, 'step')} skipped, as their gradients were not finite at the scale."
    return LineChart("AMP loss scale", series, note=note) if series else None


def _scalars(report: RankReport) -> Iterator[LineChart]:
    for name, points in list(report.scalars.items())[:_MOST_SCALARS]:
        shown = text_format.clean(name, 80)
        yield LineChart(shown, (Series(shown, [(float(point.step), point.value) for point in points]),))


def anomalies(report: RankReport, of: str) -> Section:
    """Return everything odd on one axis of steps."""
    rows: dict[tuple[str, str], list[float]] = {}
    for fact in report.events:
        if fact.name not in _ORDINARY and fact.step is not None:
            rows.setdefault((_kind(fact), _severity(fact)), []).append(float(fact.step))
    if skipped := [float(step.step) for step in report.steps if step.skipped]:
        rows["step skipped by the scaler", "warning"] = skipped
    table = _counts(report)
    if not rows:
        return section("anomalies", f"Anomalies{of}", table)
    last = float(max(report.last_step, *(max(steps) for steps in rows.values())))
    order = {"error": 0, "warning": 1, "info": 2}
    shown = sorted(rows.items(), key=lambda row: (order[row[0][1]], row[1][0]))
    chart = StripChart(
        "Anomalies and events by step",
        tuple((name, severity, tuple(steps[:500])) for (name, severity), steps in shown[:20]),
        (0.0, last),
        note="From the events that the flight file still holds; of many in a row only some are events. The table counts all.",
    )
    return section("anomalies", f"Anomalies{of}", chart, table)


def _severity(fact: Fact) -> str:
    return _SEVERITIES[catalog.event_severity(fact.name, fact.attributes)]


def _kind(fact: Fact) -> str:
    kind = fact.text("kind") if fact.name == catalog.EVENT_ANOMALY.name else ""
    return text_format.clean((kind or fact.name.removeprefix("torchobs.")).replace("_", " ").replace(".", " "), 60)


def _counts(report: RankReport) -> Table | None:
    found = {kind: count for kind, count in report.by_attribute(catalog.ANOMALIES).items() if count}
    steps = {kind: report.norms if "gradient" in kind and report.norms >= found[kind] else report.last_step for kind in found}
    rows = tuple(
        (kind.replace("_", " "), f"{int(count):,}", text_format.percent(count / steps[kind]) if steps[kind] else "-")
        for kind, count in sorted(found.items(), key=lambda item: -item[1])
    )
    return Table("Anomalies of the whole run", ("Kind", "Steps", "Share of those measured"), rows) if rows else None


def layers(report: RankReport, of: str) -> Section:
    """Return gradient norms by layer over time, and at level extreme how widely each layer's output is spread."""
    few = Text("Only the largest layers and those that had anomalies have series of their own.", "note")
    blocks = [
        *_by_layer(report, catalog.GRAD_LAYER_NORM, "Gradient norm", "the norms were"),
        *_by_layer(report, catalog.ACTIVATION_LAYER_STD, "Standard deviation of the output", "the outputs were"),
    ]
    return section("layers", f"Layers{of}", *blocks, *([few] if blocks else []), wide=bool(blocks))


def _by_layer(report: RankReport, metric: catalog.Metric, what: str, were: str) -> Iterator[HeatMap | Table]:
    """Yield a metric by layer and time, and its range by layer; nothing if it was not recorded."""
    curves = {text_format.clean(name, 80): points for name, points in report.history.of(metric.name).items()}
    if not curves:
        return
    columns = sorted({row.time_s: row for points in curves.values() for row, _ in points}.values(), key=lambda row: row.time_s)
    columns = [row for index, row in enumerate(columns) if row.step and (not index or row.step != columns[index - 1].step)]
    values = tuple(
        _row({row.time_s: value for row, value in points}, [row.time_s for row in columns]) for points in curves.values()
    )
    yield HeatMap(
        f"{what} by layer and time", tuple(curves), tuple(row.step for row in columns), values,
        note=f"Each column is one moment at which {were} read, evenly in time over the whole run; empty: not measured.",
    )  # fmt: skip
    rows = tuple(
        (name, *(text_format.number(value) for value in (min(own), median(own), max(own), own[-1])))
        for name, points in curves.items()
        if (own := [value for _, value in points if isfinite(value)])
    )
    yield Table(f"{what} by layer, as read", ("Layer", "Least", "Median", "Greatest", "Last"), rows)


def _row(known: dict[float, float], times: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(known.get(time_s) for time_s in times)


def points_of(steps: Iterable[Step], field: str) -> list[Point]:
    """Return a field of the steps that have it, by step."""
    return [(float(step.step), value) for step in steps if (value := getattr(step, field)) is not None]
