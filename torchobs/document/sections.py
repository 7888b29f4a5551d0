"""Sections with curves: training, anomalies, layers, time, memory, compilation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from statistics import fmean, median, quantiles

from torchobs import catalog
from torchobs.catalog.findings import GOODPUT_WORDS, PAST
from torchobs.diagnosis.hangs import shown, stall, without_launcher
from torchobs.document.blocks import (
    Code,
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
from torchobs.document.event_log import EventGroup, log_of, rows_of
from torchobs.flight.events import Event
from torchobs.ranks.events import attribute_text, title_of
from torchobs.ranks.rank_view import WHOLES, RankView, Step
from torchobs.support import text as text_format
from torchobs.support.rate_limit import BURST

_MOST_MARKS = 40
_MOST_SCALARS = 16
_MOST_EPOCHS = 20
_LONGEST_NAME = 80
_ORDINARY = frozenset(
    event.name
    for event in (
        catalog.EVENT_RUN_START, catalog.EVENT_RUN_END, catalog.EVENT_SCALARS, catalog.EVENT_MODEL, catalog.EVENT_TRAINER,
        catalog.EVENT_DISTRIBUTED, catalog.EVENT_STACKS, catalog.EVENT_STEP_BETWEEN, catalog.EVENT_PROFILE_START,
        catalog.EVENT_PROFILE_END, catalog.EVENT_DEBUG_VALIDATION, catalog.EVENT_TUNE_PLAN, catalog.EVENT_TUNE_BENCHMARK,
    )
)  # fmt: skip
"""Events that are no sign of trouble"""
_BY_STEP = frozenset({catalog.SPAN_RUN.name, catalog.SPAN_STEP.name, catalog.SPAN_STEP_PHASE.name})
_LABELS = ("operation", "phase", "name")
_MOST_ROWS = 40
_LEAST_TIMED = 2
_HOST = {
    catalog.MEMORY_HOST_RSS: "process", catalog.MEMORY_HOST_CHILDREN_RSS: "its children",
    catalog.CGROUP_MEMORY_WORKING_SET: "container",
}  # fmt: skip
_DEVICE = {catalog.MEMORY_DEVICE_ALLOCATED: "allocated", catalog.MEMORY_DEVICE_RESERVED: "reserved"}
_DEVICE_MORE = {catalog.MEMORY_DEVICE_ALLOCATED: "in use", catalog.MEMORY_DEVICE_PEAK: "at most"}
_HOST_MEMORY: tuple[tuple[str, catalog.Metric, catalog.Metric | None], ...] = (
    ("process", catalog.MEMORY_HOST_RSS, None), ("its children", catalog.MEMORY_HOST_CHILDREN_RSS, None),
    ("available on the machine", catalog.MEMORY_HOST_AVAILABLE, None),
    ("container", catalog.CGROUP_MEMORY_WORKING_SET, catalog.CGROUP_MEMORY_LIMIT),
    ("container's peak", catalog.CGROUP_MEMORY_PEAK, None),
    ("shared memory", catalog.MEMORY_SHARED_USED, catalog.MEMORY_SHARED_SIZE),
)  # fmt: skip
"""Name, metric, and metric of the whole"""
_MOST_FRAMES = 12
_MOST_RANKS = 1e7
"""A damaged file may hold any number"""


def curves(rank: RankView) -> Iterator[LineChart]:
    """Yield the curves of a rank over its last steps, and of its script's scalars since the run began."""
    had_loss, had_norm = (bool(rank.steps) and rank.value(metric) is not None for metric in (catalog.LOSS, catalog.GRAD_NORM))
    norm = "Gradient norm of its shard" if (rank.value(catalog.GRAD_NORM_RANKS) or 1.0) > 1.0 else "Gradient norm"
    times = points_of(rank.steps, "duration_s")
    yield _curve("Loss", rank.losses.items(), rank.loss, had=had_loss)
    yield _curve(norm, rank.norms.items(), rank.grad_norm, had=had_norm)
    yield _curve("Step time", times, times[-1][1] if times else None)._replace(rounded=text_format.duration)
    for name, points in rank.events.scalars.items():
        yield _curve(text_format.clean(name, _LONGEST_NAME), points, rank.value(catalog.SCALAR_VALUE, name), had=True)


def _curve(name: str, points: Iterable[tuple[float, float]], last: float | None, *, had: bool = False) -> LineChart:
    """Return a curve; ``had``: there were values before the points."""
    values = tuple(points)
    empty = "No finite value lately." if had else "No value yet."
    return LineChart(name, (Series(name, values),) if values else (), last=last, empty=empty)


def _whole(report: RankView, chart: LineChart, metric: catalog.Metric) -> LineChart:
    """Return the curve with a metric's points from before its first step, evenly over the run."""
    if not chart.series or not report.steps:
        return chart
    (curve,), first = chart.series, report.steps[0].step
    earlier = {row.step: value for row, value in report.history.curves(metric.name).get("", ()) if 0 < row.step < first}
    note = f"Before step {first:,}: as read now and then." if earlier else chart.note
    return chart._replace(series=(curve._replace(points=(*earlier.items(), *curve.points)),), note=note)


def training(report: RankView, of: str) -> Section:
    """Return the curves of the optimization."""
    marks, limit = _marks(report), report.value(catalog.GRAD_CLIP_MAX_NORM)
    loss, norm, _, *scalars = curves(report)
    loss, norm = _whole(report, loss, catalog.LOSS), _whole(report, norm, catalog.GRAD_NORM)
    rates = points_of(report.steps, "learning_rate")
    charts = [
        loss._replace(marks=tuple(mark for mark in marks if "loss" in mark.name)),
        norm._replace(
            marks=tuple(mark for mark in marks if "gradient" in mark.name),
            levels=(("clipping at", limit),) if limit is not None else (),
            note=" ".join(filter(None, (norm.note, _clipped(report)))),
        ),
        LineChart("Learning rate", (Series("learning rate", rates),) if rates else ()), _scale(report),
        *scalars[:_MOST_SCALARS],
    ]  # fmt: skip
    drawn = (chart for chart in charts if chart is not None and chart.series)
    return section("training", f"Training{of}", *drawn, epoch_table(report), precision_table(report))


def _marks(report: RankView) -> list[Mark]:
    anomalies = [fact for fact in report.events_named(catalog.EVENT_ANOMALY) if fact.step is not None]
    first = report.steps[0].step if report.steps else 0
    return [
        Mark(float(fact.step), _severity(fact), fact.text("kind").replace("_", " "))
        for fact in anomalies[:_MOST_MARKS]
        if fact.step is not None and fact.step >= first
    ]


def _clipped(report: RankView) -> str:
    steps = report.value(catalog.GRAD_CLIPPED_STEPS)
    if not steps:
        return ""
    share = text_format.percent(steps / report.last_step) if report.last_step else ""
    return f"Clipped in {int(steps):,} steps ({share} of all); the norm is that before clipping."


def _scale(report: RankView) -> LineChart | None:
    curves = report.history.curves(catalog.AMP_SCALE.name)
    series = tuple(
        Series(f"scaler {name}" if name else "loss scale", [(float(row.step), value) for row, value in points])
        for name, points in curves.items()
    )
    skipped = int(report.value(catalog.AMP_STEPS_SKIPPED) or 0)
    note = f"{text_format.plural(skipped, 'step')} skipped, as their gradients were not finite at the scale."
    return LineChart("AMP loss scale", series, note=note) if series else None


def anomalies(report: RankView, of: str) -> Section:
    """Return all anomalies on one axis of steps."""
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


def _severity(fact: Event) -> str:
    return catalog.event_severity(fact.name, fact.attributes).name.lower()


def _kind(fact: Event) -> str:
    kind = fact.text("kind") if fact.name == catalog.EVENT_ANOMALY.name else ""
    return title_of(kind or fact.name)


def _counts(report: RankView) -> Table | None:
    counts = {kind: count for kind, count in report.by_attribute(catalog.ANOMALIES).items() if count}
    steps = {
        kind: report.measured_norms if "gradient" in kind and report.measured_norms >= counts[kind] else report.last_step
        for kind in counts
    }
    rows = tuple(
        (
            PAST[kind][0] if kind in PAST else kind,
            f"{int(count):,}",
            text_format.percent(count / steps[kind]) if steps[kind] else "-",
        )
        for kind, count in sorted(counts.items(), key=lambda item: -item[1])
    )
    return Table("Anomalies of the whole run", ("Kind", "Steps", "Share of those measured"), rows) if rows else None


def layers(report: RankView, of: str) -> Section:
    """Return gradient norms by layer over time, and at level extreme how widely each layer's output is spread."""
    few = Text("Only the largest layers have series of their own.", "note")
    blocks = [
        *_by_layer(report, catalog.GRAD_LAYER_NORM, "Gradient norm", "the norms were"),
        *_by_layer(report, catalog.ACTIVATION_LAYER_STD, "Standard deviation of the output", "the outputs were"),
    ]
    is_rest = "other" in report.history.curves(catalog.GRAD_LAYER_NORM.name)
    return section("layers", f"Layers{of}", *blocks, *([few] if is_rest else []), wide=bool(blocks))


def _by_layer(report: RankView, metric: catalog.Metric, what: str, were: str) -> Iterator[HeatMap | Table]:
    """Yield a metric by layer and time, and its range by layer; nothing if it was not recorded."""
    curves = {text_format.clean(name, 80): points for name, points in report.history.curves(metric.name).items()}
    if not curves:
        return
    columns = sorted({row.time_s: row for points in curves.values() for row, _ in points}.values(), key=lambda row: row.time_s)
    columns = [row for index, row in enumerate(columns) if row.step and (not index or row.step != columns[index - 1].step)]
    layers = ({row.time_s: value for row, value in points} for points in curves.values())
    values = tuple(tuple(by_time.get(row.time_s) for row in columns) for by_time in layers)
    yield HeatMap(
        f"{what} by layer and time", tuple(curves), tuple(row.step for row in columns), values,
        note=f"Each column is one moment at which {were} read, evenly in time over the whole run; empty: not measured.",
    )  # fmt: skip
    rows = tuple(
        (name, *(text_format.number(value) for value in (min(numbers), median(numbers), max(numbers), numbers[-1])))
        for name, points in curves.items()
        if (numbers := [value for _, value in points if isfinite(value)])
    )
    yield Table(f"{what} by layer, as read", ("Layer", "Least", "Median", "Greatest", "Last"), rows)


def points_of(steps: Iterable[Step], field: str) -> list[Point]:
    """Return a field of the steps that have it, by step."""
    return [(float(step.step), value) for step in steps if (value := getattr(step, field)) is not None]


def time_spent(report: RankView, of: str) -> Section:
    """Return the use of time, in the run and in a step."""
    _, _, times, *_ = curves(report)
    phases, device = report.by_attribute(catalog.STEP_PHASE_TIME), report.by_attribute(catalog.STEP_DEVICE_TIME)
    return section(
        "time", f"Time{of}",
        goodput(report),
        Shares("Time by phase of a step, all steps", phases) if sum(phases.values()) else None,
        Shares("Phases on the GPU, of its time in a step", device) if sum(device.values()) else None,
        times._replace(note=_spread(report)) if times.series else None,
        _phases(report), *_operations(report),
    )  # fmt: skip


def goodput(rank: RankView) -> Shares | None:
    """Return the use of time since the process began."""
    times = {GOODPUT_WORDS.get(state, state): seconds for state, seconds in rank.by_attribute(catalog.GOODPUT_TIME).items()}
    return Shares(f"Time since {rank.since}", times, "goodput-") if sum(times.values()) else None


def _phases(report: RankView) -> LineChart | None:
    timed = [(float(step.step), step.phase_s) for step in report.steps if step.duration_s is not None]
    lines = {name: [(at, phases.get(name, 0.0)) for at, phases in timed] for name in catalog.PHASES}
    series = tuple(Series(name, points) for name, points in lines.items() if any(seconds for _, seconds in points))
    return LineChart("Phases by step", series, text_format.duration) if len(timed) >= _LEAST_TIMED and series else None


def _spread(report: RankView) -> str:
    times = [step.duration_s for step in report.steps if step.duration_s is not None]
    if len(times) < _LEAST_TIMED:
        return ""
    cuts = quantiles(times, n=100, method="inclusive")
    shown = {"median": cuts[49], "90 %": cuts[89], "99 %": cuts[98], "longest": max(times)}
    return ", ".join(f"{name} {text_format.duration(seconds)}" for name, seconds in shown.items())


def _operations(report: RankView) -> Iterator[Table]:
    """Yield the operations of ``debug.context``, with exact totals, and the other spans that the file still holds."""
    wanted = (catalog.DEBUG_OPERATIONS, catalog.DEBUG_OPERATION_TIME, catalog.DEBUG_OPERATION_LONGEST)
    counts, times, longest = map(report.by_attribute, wanted)
    rows = [
        (name, text_format.count(counts.get(name)), text_format.duration(seconds), text_format.duration(longest.get(name)))
        for name, seconds in sorted(times.items(), key=lambda item: -item[1])
    ]
    head = ("Operation", "Times", "Total", "Longest")
    if rows:
        yield Table("Operations of debug.context", head, tuple(rows[:_MOST_ROWS]))
    if spans := _spans(report):
        caption = "Spans in the file: epochs, evaluations, checkpoints, your own; of many short ones only some have a span"
        yield Table(caption, ("Operation", "Spans", *head[2:]), spans)


def _spans(report: RankView) -> tuple[tuple[str, ...], ...]:
    durations: dict[str, list[float]] = {}
    for span in report.events.spans:
        if span.name not in _BY_STEP:
            label = next((span.attributes[key] for key in _LABELS if isinstance(span.attributes.get(key), str)), "")
            name = text_format.clean(f"{span.name.removeprefix('torchobs.')} {label}".strip(), 80)
            durations.setdefault(name, []).append(span.duration_s)
    ordered = sorted(durations.items(), key=lambda item: -sum(item[1]))[:_MOST_ROWS]
    return tuple(
        (name, f"{len(times):,}", text_format.duration(sum(times)), text_format.duration(max(times))) for name, times in ordered
    )


def memory(report: RankView, of: str) -> Section:
    """Return memory of host and devices: over time, and as last seen."""
    limit = report.value(catalog.CGROUP_MEMORY_LIMIT)
    host = _chart(report, "Host memory", _HOST, (("limit", limit),) if limit else ())
    device = _chart(report, "Device memory", _DEVICE, ())
    return section("memory", f"Memory{of}", host, device, memory_table(report))


def memory_table(rank: RankView) -> Table | None:
    """Return the memory in use: of devices, process, container and machine."""
    rows = []
    reserved, limits = rank.values(catalog.MEMORY_DEVICE_RESERVED), rank.values(catalog.MEMORY_DEVICE_LIMIT)
    for device, size in reserved.items():
        pairs = ((rank.value(metric, *device), word) for metric, word in _DEVICE_MORE.items())
        more = [f"{text_format.size(value)} {word}" for value, word in pairs if value is not None]
        rows.append((f"{device[0]} reserved", ", ".join([_of_limit(size, limits.get(device)), *more])))
    for name, metric, whole in _HOST_MEMORY:
        if used := rank.value(metric):
            rows.append((name, _of_limit(used, rank.value(whole) if whole is not None else None)))
    for (limit,), share in rank.values(catalog.MEMORY_HOST_UTILIZATION).items():
        rows.append((f"{WHOLES.get(limit, limit)} full", text_format.percent(share)))
    for (space,), left_s in rank.values(catalog.MEMORY_TIME_TO_LIMIT).items():
        rows.append((f"{space} memory full in", text_format.span(left_s)))
    if kills := rank.value(catalog.CGROUP_MEMORY_OOM_KILLS):
        rows.append(("killed in its cgroup for memory", text_format.plural(int(kills), "process", "processes")))
    return _pairs("Memory", "In use, as last seen", rows)


def _of_limit(size: float, limit: float | None) -> str:
    return f"{text_format.size(size)} of {text_format.size(limit)}" if limit else text_format.size(size)


def _pairs(name: str, caption: str, rows: Iterable[tuple[str, str]]) -> Table | None:
    """Return a table of names and values; none of no rows."""
    rows = tuple((text_format.clean(what, 80), value) for what, value in rows)
    return Table(caption, ("What", "Value"), rows, frozenset({0, 1}), name) if rows else None


def precision_table(rank: RankView) -> Table | None:
    """Return autocast and the loss scale."""
    kinds = [f"{dtype} on {device}" for device, dtype in rank.values(catalog.AMP_AUTOCAST)]
    scales = rank.values(catalog.AMP_SCALE)
    rows = [("autocast", text_format.clean(", ".join(kinds)))] if kinds else []
    rows += [
        (f"loss scale {scaler}" if len(scales) > 1 else "loss scale", text_format.number(scale))
        for (scaler,), scale in scales.items()
    ]
    counts = (("steps skipped", catalog.AMP_STEPS_SKIPPED), ("in a row now", catalog.AMP_SKIP_STREAK)) if scales else ()
    return _pairs("Mixed precision", "Mixed precision", [*rows, *_counted(rank, counts)])


def compile_table(rank: RankView) -> Table | None:
    """Return the figures of ``torch.compile``; none if it was not used."""
    times = {stage: seconds for (stage,), seconds in rank.values(catalog.COMPILE_TIME).items() if seconds}
    if not times and not rank.value(catalog.COMPILE_IN_PROGRESS):
        return None
    rows = [("now", "compiling")] if rank.value(catalog.COMPILE_IN_PROGRESS) else []
    rows += [(stage, text_format.duration(seconds)) for stage, seconds in times.items()]
    first, again = (int(rank.value(catalog.COMPILE_COMPILATIONS, cause) or 0) for cause in ("first", "recompile"))
    rows += [("compilations", f"{first + again:,}, {again:,} of them again")]
    for name, metric in (("graph breaks", catalog.COMPILE_GRAPH_BREAKS), ("given up", catalog.COMPILE_FAILURES)):
        rows += [
            (f"{name}, {kind.replace('_', ' ')}", f"{int(count):,}") for (kind,), count in rank.values(metric).items() if count
        ]
    return _pairs("torch.compile", "torch.compile; the stages add up", rows)


def epoch_table(rank: RankView) -> Table | None:
    """Return a line for each of the last epochs; the mean loss where the file still has every step."""
    rows = []
    for span in [span for span in rank.events.spans if span.is_ours and span.name == catalog.SPAN_EPOCH.name][-_MOST_EPOCHS:]:
        begun_s, ended_s, steps = span.begun_ns / 1e9, (span.ended_ns or 0) / 1e9, span.attributes.get("steps")
        inside = [step for step in rank.steps if begun_s < step.end_s <= ended_s]
        losses = [step.loss for step in inside if step.loss is not None]
        words = (
            text_format.clean(span.attributes.get("epoch"), _LONGEST_NAME),
            text_format.count(steps if isinstance(steps, int) else None),
            text_format.duration(span.duration_s),
            text_format.number(fmean(losses) if losses and isinstance(steps, int) and len(inside) >= steps else None),
        )
        rows.append(words)
    return Table("Epochs that have ended", ("Epoch", "Steps", "Time", "Mean loss"), tuple(rows)) if rows else None


def checkpoint_table(rank: RankView) -> Table | None:
    """Return the checkpoints that were saved, and the steps that were clipped."""
    saved, failed = rank.value(catalog.CHECKPOINTS, "saved"), rank.value(catalog.CHECKPOINTS, "failed")
    words = f"{text_format.count(saved)}{f', {text_format.count(failed)} failed' if failed else ''}"
    rows = [("checkpoints", words)] if saved or failed else []
    at_s, size = rank.value(catalog.CHECKPOINT_TIMESTAMP), rank.value(catalog.CHECKPOINT_SIZE)
    if at_s:
        age_s, before = rank.last_s + (rank.beat_age_s if rank.up else 0.0) - at_s, "ago" if rank.up else "before the end"
        rows += [
            ("last one", f"{text_format.span(max(0.0, age_s))} {before}" + (f", {text_format.size(size)}" if size else ""))
        ]
    counts = (("steps clipped", catalog.GRAD_CLIPPED_STEPS), ("gradients found not finite", catalog.GRAD_NONFINITE_STEPS))
    return _pairs("Checkpoints and gradients", "Of the whole run", [*rows, *_counted(rank, counts)])


def _counted(rank: RankView, wanted: Iterable[tuple[str, catalog.Metric]]) -> Iterator[tuple[str, str]]:
    return ((name, text_format.count(value)) for name, metric in wanted if (value := rank.value(metric)))


def _chart(
    report: RankView, name: str, metrics: dict[catalog.Metric, str], levels: tuple[tuple[str, float], ...]
) -> LineChart | None:
    series = tuple(
        Series(f"{device} {word}".strip(), [(row.time_s, value) for row, value in points])
        for metric, word in metrics.items()
        for device, points in report.history.curves(metric.name).items()
        if any(value for _, value in points)
    )
    greatest = max((value for line in series for _, value in line.points), default=0.0)
    # a limit far above would flatten the curves; the table has it
    near = tuple(level for level in levels if level[1] < 3 * greatest)
    return LineChart(f"{name} over time", series, text_format.size, levels=near, timed=True, from_zero=True) if series else None


def compilation(report: RankView, of: str) -> Section:
    """Return the section on ``torch.compile``."""
    table = compile_table(report)
    return section("compile", f"torch.compile{of}", table, _reasons(report) if table is not None else None)


def _reasons(report: RankView) -> Table | None:
    events = (catalog.EVENT_RECOMPILE, catalog.EVENT_GRAPH_BREAK, catalog.EVENT_COMPILE_FAILED)
    rows = [
        (
            title_of(event.name),
            "-" if fact.step is None else f"{fact.step:,}",
            " · ".join(f"{name} {text}" for name in fact.attributes if (text := attribute_text(fact, name))),
        )
        for event in events
        for fact in report.events_named(event)[-8:]
    ]
    table = Table("Reasons, the last eight of each kind", ("Event", "Step", "Reason"), tuple(rows), frozenset({0, 2}))
    return table if rows else None


_STEP_HEAD = ("Step", "Loss", "Grad norm", "Took", "Learning rate", "", "Ended", *catalog.PHASES)


def last_steps(report: RankView, of: str, most: int) -> Section:
    """Return the last steps as a table."""
    rows = tuple(
        (
            f"{step.step:,}", text_format.number(step.loss), text_format.number(step.grad_norm),
            text_format.duration(step.duration_s), text_format.number(step.learning_rate),
            "skipped" if step.skipped else "clipped" if step.clipped else "", text_format.moment(step.end_s, "%H:%M:%S"),
            *(text_format.duration(took_s) if (took_s := step.phase_s.get(phase)) else "" for phase in catalog.PHASES),
        )
        for step in (report.steps[-most:] if most else ())
    )  # fmt: skip
    ranks = report.value(catalog.GRAD_NORM_RANKS) or 1.0
    shard = (
        f"Gradient norms are of this rank's own shard; the squares of {ranks:,.0f} ranks' norms add up to that of the whole's."
    )
    return section(
        "steps", f"Last steps{of}", Table("With the time of each phase", _STEP_HEAD, rows, frozenset({5})) if rows else None,
        Text(shard) if rows and 1.0 < ranks < _MOST_RANKS else None,
    )  # fmt: skip


def stack(report: RankView, of: str) -> Section:
    """Return the main thread's last stack, if it was written in a stall at the end."""
    stalled = stall(report)
    frames = without_launcher(stalled.frames) if stalled is not None else ()
    more = [f"… and {len(frames) - _MOST_FRAMES} more"] if len(frames) > _MOST_FRAMES else []
    return section("stack", f"Stack{of}", Code("\n".join([*map(shown, frames[:_MOST_FRAMES]), *more])) if frames else None)


def events(report: RankView, of: str, most: int) -> Section:
    """Return the last events that the file holds, in their order, many of a kind as one."""
    rows = tuple(
        (text_format.moment(line.last.at_s, "%H:%M:%S"), *event_words(line), line.last.text)
        for line in reversed(log_of([rows_of(report.rank, report.events)]).lines[:most])
    )
    table = Table("Those that the flight file still holds", ("Time", "Step", "Event", "What"), rows, frozenset({0, 2, 3}))
    return section("events", f"Events{of}", table if rows else None, wide=True)


def event_words(line: EventGroup) -> tuple[str, str]:
    """Return the steps and the title of a line of the event log."""
    last, first = (text_format.count(step) if step is not None else "" for step in (line.last.step, line.first.step))
    if line.number == 1:
        return last, line.last.title
    more = " or more" if line.number >= BURST else ""  # of many in a row only so many are events
    return f"{first} to {last}" if first else last, f"{line.last.title} ×{line.number:,}{more}"
