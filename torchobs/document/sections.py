"""Sections with curves: training, anomalies, layers, time, memory, compilation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from statistics import median, quantiles

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis import text_format
from torchobs.diagnosis.rank_report import Fact, RankReport, Step, attribute_text
from torchobs.document.blocks import (
    AreaChart,
    HeatMap,
    LineChart,
    Mark,
    Point,
    Section,
    Series,
    Shares,
    StripChart,
    Table,
    Text,
    section,
)

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
_OPERATIONS = "torchobs.debug.operation"
"""Beginning of the names of the metrics of ``debug.context``; by name, as a file may be another version's"""
_BY_STEP = frozenset({catalog.SPAN_RUN.name, catalog.SPAN_STEP.name, catalog.SPAN_STEP_PHASE.name})
_LABELS = ("operation", "phase", "name")
_MOST_ROWS = 40
_LEAST_TIMED = 2
_HOST = {
    catalog.MEMORY_HOST_RSS: "process", catalog.MEMORY_HOST_CHILDREN_RSS: "its children",
    catalog.CGROUP_MEMORY_WORKING_SET: "container",
}  # fmt: skip
_DEVICE = {catalog.MEMORY_DEVICE_ALLOCATED: "allocated", catalog.MEMORY_DEVICE_RESERVED: "reserved"}
_DEVICE_HEAD = ("Device", "Allocated", "Reserved", "Peak", "Limit")
_MEMORY = {
    "rss": catalog.MEMORY_HOST_RSS,
    "children_rss": catalog.MEMORY_HOST_CHILDREN_RSS,
    "machine_available": catalog.MEMORY_HOST_AVAILABLE,
    "cgroup_working_set": catalog.CGROUP_MEMORY_WORKING_SET,
    "cgroup_peak": catalog.CGROUP_MEMORY_PEAK,
    "cgroup_limit": catalog.CGROUP_MEMORY_LIMIT,
    "shared_used": catalog.MEMORY_SHARED_USED,
    "shared_size": catalog.MEMORY_SHARED_SIZE,
}
_DEVICE_MEMORY = {
    "allocated": catalog.MEMORY_DEVICE_ALLOCATED,
    "reserved": catalog.MEMORY_DEVICE_RESERVED,
    "peak": catalog.MEMORY_DEVICE_PEAK,
    "limit": catalog.MEMORY_DEVICE_LIMIT,
}


def training(report: RankReport, of: str) -> Section:
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
    known = ({row.time_s: value for row, value in points} for points in curves.values())
    values = tuple(tuple(by_time.get(row.time_s) for row in columns) for by_time in known)
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


def points_of(steps: Iterable[Step], field: str) -> list[Point]:
    """Return a field of the steps that have it, by step."""
    return [(float(step.step), value) for step in steps if (value := getattr(step, field)) is not None]


def time_spent(report: RankReport, of: str) -> Section:
    """Return where the time went, of the run and of a step."""
    times = [(float(step.step), step.duration_s) for step in report.steps if step.duration_s is not None]
    goodput = report.by_attribute(catalog.GOODPUT_TIME)
    phases = report.by_attribute(catalog.STEP_PHASE_TIME)
    return section(
        "time", f"Time{of}",
        Shares(f"Goodput: the time since {report.since}", goodput, "goodput-") if sum(goodput.values()) else None,
        Shares("Time by phase of a step, all steps", phases) if sum(phases.values()) else None,
        LineChart("Step time", (Series("step time", times),), text_format.duration, note=_spread(report)) if times else None,
        _phases(report), *_operations(report),
    )  # fmt: skip


def _phases(report: RankReport) -> AreaChart | None:
    rows = tuple(
        (float(step.step), tuple(step.phase_s.get(name, 0.0) for name in catalog.PHASES))
        for step in report.steps
        if step.duration_s is not None
    )
    return AreaChart("Phases by step", tuple(catalog.PHASES), rows) if len(rows) >= _LEAST_TIMED else None


def _spread(report: RankReport) -> str:
    times = [step.duration_s for step in report.steps if step.duration_s is not None]
    if len(times) < _LEAST_TIMED:
        return ""
    cuts = quantiles(times, n=100, method="inclusive")
    shown = {"median": cuts[49], "90 %": cuts[89], "99 %": cuts[98], "longest": max(times)}
    return ", ".join(f"{name} {text_format.duration(seconds)}" for name, seconds in shown.items())


def _operations(report: RankReport) -> Iterator[Table]:
    """Yield the operations of ``debug.context``, whose totals are exact, and the other spans that the file still holds."""
    counts = dict(_one_attribute(report, f"{_OPERATIONS}s"))
    times = dict(_one_attribute(report, f"{_OPERATIONS}.time"))
    longest = dict(_one_attribute(report, f"{_OPERATIONS}.longest"))
    rows = [
        (name, text_format.count(counts.get(name)), text_format.duration(seconds), text_format.duration(longest.get(name)))
        for name, seconds in sorted(times.items(), key=lambda item: -item[1])
    ]
    head = ("Operation", "Times", "Total", "Longest")
    if rows:
        yield Table("Operations of debug.context", head, tuple(rows[:_MOST_ROWS]))
    if spans := _spans(report):
        yield Table("Epochs, evaluations, checkpoints and own spans, as far as the file holds them", head, spans)


def _one_attribute(report: RankReport, metric: str) -> Iterator[tuple[str, float]]:
    for key, value in report.values.items():
        if key[0] == metric and len(key) == 2 and isinstance(value, (int, float)):  # noqa: PLR2004  # name and attribute
            yield text_format.clean(key[1], 80), value


def _spans(report: RankReport) -> tuple[tuple[str, ...], ...]:
    found: dict[str, list[float]] = {}
    for span in report.spans:
        if span.name not in _BY_STEP:
            label = next((span.attributes[key] for key in _LABELS if isinstance(span.attributes.get(key), str)), "")
            name = text_format.clean(f"{span.name.removeprefix('torchobs.')} {label}".strip(), 80)
            found.setdefault(name, []).append(span.end_s - span.start_s)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:_MOST_ROWS]
    return tuple(
        (name, f"{len(times):,}", text_format.duration(sum(times)), text_format.duration(max(times))) for name, times in ordered
    )


def host_memory(report: RankReport) -> dict[str, float | None]:
    """Return the last known use of host memory, in bytes."""
    return {name: report.value(metric) for name, metric in _MEMORY.items()}


def device_memory(report: RankReport) -> dict[str, dict[str, float]]:
    """Return the last known memory use of each device, in bytes."""
    found: dict[str, dict[str, float]] = {}
    for name, metric in _DEVICE_MEMORY.items():
        for device, value in report.by_attribute(metric).items():
            found.setdefault(device, {})[name] = value
    return found


def memory(report: RankReport, of: str) -> Section:
    """Return memory of host and devices: over time, and as last seen."""
    limit = report.value(catalog.CGROUP_MEMORY_LIMIT)
    host = _chart(report, "Host memory", _HOST, (("limit", limit),) if limit else ())
    device = _chart(report, "Device memory", _DEVICE, ())
    known = {name: value for name, value in host_memory(report).items() if value}
    rows = tuple((name.replace("_", " "), text_format.size(value)) for name, value in known.items())
    devices = tuple(
        (device_name, *(text_format.size(sizes.get(name)) for name in ("allocated", "reserved", "peak", "limit")))
        for device_name, sizes in device_memory(report).items()
    )
    return section(
        "memory", f"Memory{of}", host, device,
        Table("Host memory, as last seen", ("What", "Size"), rows) if rows else None,
        Table("Device memory, as last seen", _DEVICE_HEAD, devices) if devices else None,
    )  # fmt: skip


def _chart(
    report: RankReport, name: str, metrics: dict[catalog.Metric, str], levels: tuple[tuple[str, float], ...]
) -> LineChart | None:
    series = tuple(
        Series(f"{device} {word}".strip(), [(row.time_s, value) for row, value in points])
        for metric, word in metrics.items()
        for device, points in report.history.of(metric.name).items()
        if any(value for _, value in points)
    )
    greatest = max((value for one in series for _, value in one.points), default=0.0)
    # a limit far above would flatten the curves; the table has it
    near = tuple(level for level in levels if level[1] < 3 * greatest)
    return LineChart(f"{name} over time", series, text_format.size, levels=near, timed=True, from_zero=True) if series else None


def compilation(report: RankReport, of: str) -> Section:
    """Return what ``torch.compile`` did."""
    times = {stage: seconds for stage, seconds in report.by_attribute(catalog.COMPILE_TIME).items() if seconds}
    if not times:
        return section("compile", f"torch.compile{of}")
    counts = {
        "compilations": catalog.COMPILE_COMPILATIONS, "recompiled, by guard": catalog.COMPILE_RECOMPILES,
        "failed, by reason": catalog.COMPILE_FAILURES, "graph breaks, by reason": catalog.COMPILE_GRAPH_BREAKS,
    }  # fmt: skip
    rows = tuple(
        (what, kind.replace("_", " "), f"{int(count):,}")
        for what, metric in counts.items()
        for kind, count in report.by_attribute(metric).items()
        if count
    )
    stages = tuple((stage, text_format.duration(seconds)) for stage, seconds in times.items())
    return section(
        "compile", f"torch.compile{of}",
        Table("Time to compile; stages contain one another", ("Stage", "Time"), stages),
        Table("Compilations of the whole run", ("What", "Kind", "Number"), rows, frozenset({0, 1})) if rows else None,
        _reasons(report),
    )  # fmt: skip


def _reasons(report: RankReport) -> Table | None:
    events = (catalog.EVENT_RECOMPILE, catalog.EVENT_GRAPH_BREAK, catalog.EVENT_COMPILE_FAILED)
    rows = [
        (
            event.name.removeprefix("torchobs.").replace(".", " "),
            "-" if fact.step is None else f"{fact.step:,}",
            " · ".join(f"{name} {text}" for name in fact.attributes if (text := attribute_text(fact, name))),
        )
        for event in events
        for fact in report.events_named(event)[-8:]
    ]
    return (
        Table("Reasons, the last of each kind", ("Event", "Step", "Reason"), tuple(rows), frozenset({0, 2})) if rows else None
    )
