"""The section on time: goodput, phases, execution time of steps and of operations. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import quantiles

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.rank_report import RankReport
from torchobs.report.content import AreaChart, LineChart, Section, Series, Shares, Table, section

_OPERATIONS = "torchobs.debug.operation"
"""Beginning of the names of the metrics of ``debug.context``; by name, as a file may be another version's"""
_BY_STEP = frozenset({catalog.SPAN_RUN.name, catalog.SPAN_STEP.name, catalog.SPAN_STEP_PHASE.name})
_LABELS = ("operation", "phase", "name")
_MOST_ROWS = 40
_LEAST_TIMED = 2


def section_of(report: RankReport, of: str) -> Section:
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
