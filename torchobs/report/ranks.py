"""The section that compares a run's ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.endings import typical_phases
from torchobs.diagnosis.rank_report import RankReport, last_known
from torchobs.report.content import LineChart, Section, Series, Table, section
from torchobs.report.training import points_of

_MOST_LINES, _MOST_ROWS = 8, 256


def section_of(every: Sequence[RankReport]) -> Section:
    """Return a table of the ranks, and their step times and losses in one chart each."""
    head = (
        "Rank",
        "State",
        "Ended by",
        "Steps",
        "Loss",
        "Gradient norm",
        "Step time",
        *(name.capitalize() for name in catalog.PHASES),
        "Host",
    )
    table = Table("Ranks compared; times are medians of their last steps", head, tuple(map(_row, every[:_MOST_ROWS])),
                  frozenset({0, 1, 2, len(head) - 1}))  # fmt: skip
    charts = (_lines(every, "Step time by rank", "duration_s", timed=True), _lines(every, "Loss by rank", "loss"))
    return section("ranks", "Ranks", table, *charts)


def _row(report: RankReport) -> tuple[str, ...]:
    phases = typical_phases(report.steps)
    last = report.steps[-1] if report.steps else None
    return (
        report.rank, report.state, report.reason, f"{report.last_step:,}", text_format.number(last.loss if last else None),
        text_format.number(last_known([step.grad_norm for step in report.steps])),
        text_format.duration(sum(phases.values()) or None),
        *(text_format.duration(phases.get(name)) for name in catalog.PHASES),
        report.described("host"),
    )  # fmt: skip


def _lines(every: Sequence[RankReport], name: str, field: str, *, timed: bool = False) -> LineChart | None:
    shown = sorted(every, key=lambda report: -sum(typical_phases(report.steps).values()))[:_MOST_LINES]
    in_order = sorted(shown, key=lambda one: (len(one.rank), one.rank))
    series = [Series(f"rank {one.rank}", points) for one in in_order if (points := points_of(one.steps, field))]
    note = f"The {_MOST_LINES} slowest of {len(every):,} ranks." if len(every) > _MOST_LINES else ""
    rounded = text_format.duration if timed else text_format.number
    return LineChart(name, tuple(series), rounded, note=note) if series else None
