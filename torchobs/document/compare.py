"""Two runs compared: what was set differently, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import median, quantiles
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs._version import __version__
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.document.blocks import Document, Item, Items, LineChart, Section, Series, Table, Text, section
from torchobs.document.run import facts, known_details
from torchobs.document.sections import points_of
from torchobs.flight.events import plain
from torchobs.ranks.rank_view import RankView, Step
from torchobs.ranks.runs import Chosen
from torchobs.support import text as text_format

VERSION = 1
_WARM_UP = 5
_NAMES = ("A", "B")
_TAIL = 0.1


class Compared(NamedTuple):
    """A quantity of both runs: a single figure, or the median of many and the range of their middle half."""

    what: str
    unit: str
    """``s``, ``By``, or empty"""
    first: float | None
    second: float | None
    change: float | None
    first_range: tuple[float, float] | None = None
    second_range: tuple[float, float] | None = None


class Difference(NamedTuple):
    """A setting that differs; empty text where one run has none."""

    name: str
    first: str
    second: str


class Comparison(NamedTuple):
    """Two runs compared, each by the rank that its report shows."""

    first: RankView
    second: RankView
    differences: tuple[Difference, ...]
    quantities: tuple[Compared, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data. Times in seconds, memory in bytes; a non-finite number is its name."""
        runs = [
            {
                **{name: getattr(one, name) for name in ("job_name", "run_id", "rank", "state")},
                "steps": one.last_step,
                "started": one.begun_s,
            }
            for one in (self.first, self.second)
        ]
        parts = {
            "differences": [one._asdict() for one in self.differences],
            "quantities": [one._asdict() for one in self.quantities],
        }
        made: dict[str, Any] = plain({"version": VERSION, "runs": runs, **parts})
        return made


def compare(first: Chosen, second: Chosen) -> Comparison:
    """Compare two runs; each has one rank or more."""
    reports = [chosen.ranks[diagnose_run(chosen.ranks, chosen.launchers).principal] for chosen in (first, second)]
    known = []
    for chosen, report in zip((first, second), reports, strict=True):
        details = known_details(chosen.ranks, report)
        arguments = details.get("arguments")
        given = parsed(arguments) if isinstance(arguments, list) else {}
        known.append(given | facts(report, details) | {"ranks here": str(len(chosen.ranks))})
    names = dict.fromkeys((*known[0], *known[1]))
    differences = tuple(
        Difference(name, known[0].get(name, ""), known[1].get(name, ""))
        for name in names
        if known[0].get(name, "") != known[1].get(name, "")
    )
    return Comparison(reports[0], reports[1], differences, tuple(_quantities(reports[0], reports[1])))


def parsed(arguments: Sequence[object]) -> dict[str, str]:
    """Return a script's arguments by name: ``--lr 3e-4``, ``--lr=3e-4``, ``lr=3e-4``; others by their position."""
    words = [text_format.clean(word) for word in arguments]
    by_name: dict[str, str] = {}
    option = ""
    position = 0
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.strip("-"):
            by_name[name] = value
        elif word.startswith("-"):
            by_name[word] = "yes"
        elif option:
            by_name[option] = word
        else:
            position += 1
            by_name[f"argument {position}"] = word
        option = word if word.startswith("-") and not equals else ""
    return by_name


def _quantities(first: RankView, second: RankView) -> Iterator[Compared]:
    yield _medians("step time", "s", *(_durations(report.steps) for report in (first, second)))
    for phase in catalog.PHASES:
        times = [[step.phase_s.get(phase, 0.0) for step in report.steps[_WARM_UP:]] for report in (first, second)]
        if any(map(any, times)):
            yield _medians(f"step time, {phase}", "s", *times)
    yield _plain("speed", "", *(_speed(report, "per_s") for report in (first, second)))
    yield _plain("tokens per second", "", *(_speed(report, "tokens_per_s") for report in (first, second)))
    spent = [report.by_attribute(catalog.GOODPUT_TIME) for report in (first, second)]
    yield _plain(
        "goodput", "", *(one.get("productive", 0.0) / sum(one.values()) if any(one.values()) else None for one in spent)
    )
    seen = [report.history.of(catalog.MEMORY_HOST_RSS.name).get("", []) for report in (first, second)]
    last = [report.value(catalog.MEMORY_HOST_RSS) for report in (first, second)]
    greatest = (max((value for _, value in rows), default=size) for rows, size in zip(seen, last, strict=True))
    yield _plain("host memory, greatest RSS", "By", *greatest)
    peaks = (report.by_attribute(catalog.MEMORY_DEVICE_PEAK).values() for report in (first, second))
    yield _plain("device memory, peak", "By", *(max(sizes, default=None) for sizes in peaks))
    yield _plain("steps", "", float(first.last_step), float(second.last_step))
    yield from _curves(first, second)


def _medians(what: str, unit: str, first: Sequence[float], second: Sequence[float]) -> Compared:
    figures = _plain(what, unit, *(median(values) if values else None for values in (first, second)))
    return figures._replace(first_range=_middle_half(first), second_range=_middle_half(second))


def _middle_half(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:  # noqa: PLR2004  # a range has two ends
        return None
    low, _, high = quantiles(values, method="inclusive")
    return low, high


def _plain(what: str, unit: str, first: float | None, second: float | None) -> Compared:
    change = (second - first) / abs(first) if first and second is not None else None
    return Compared(what, unit, first, second, change)


def _durations(steps: Sequence[Step]) -> list[float]:
    """Return step times without the first steps, which warm up caches and allocators."""
    timed = [step.duration_s for step in steps if step.duration_s is not None and step.step > _WARM_UP]
    return [seconds for seconds in timed if isfinite(seconds)]


def _speed(report: RankView, field: str) -> float | None:
    return getattr(report.pace, field) if report.pace is not None else None


def _curves(first: RankView, second: RankView) -> Iterator[Compared]:
    """Yield loss and gradient norm over the last tenth of the steps that both runs have."""
    common = min(first.last_step, second.last_step)
    begin = common - max(int(common * _TAIL), _WARM_UP)
    for field, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        tails = [
            [value for at, value in points_of(report.steps, field) if begin < at <= common and isfinite(value)]
            for report in (first, second)
        ]
        if all(tails):
            yield _medians(f"{name}, steps {begin + 1:,} to {common:,}", "", *tails)


def comparison_document(found: Comparison) -> Document:
    """Return the comparison as a document."""
    reports = (found.first, found.second)
    names = [f"{name}: {' '.join(report.names)}" for name, report in zip(_NAMES, reports, strict=True)]
    jobs = list(dict.fromkeys(report.names[0] for report in reports))
    return Document(
        title=f"Two runs of {jobs[0]} compared" if len(jobs) == 1 else f"{jobs[0]} and {jobs[1]} compared",
        subtitle=" · ".join(names),
        badge=("info", "Compared"),
        headline=_settings(found),
        sections=(
            section("findings", "What differs", Items(tuple(_ends(found)))), _set_differently(found), _measured(found),
            _charts(reports),
        ),
        footer=(f"torchobs {__version__}",),
    )  # fmt: skip


def _settings(found: Comparison) -> str:
    changed = [one.name for one in found.differences]
    return f"Set differently: {text_format.joined(changed, 8)}." if changed else "Nothing is set differently."


def _ends(found: Comparison) -> Iterator[Item]:
    """Yield how each run that is not in order ended."""
    for name, report in zip(_NAMES, (found.first, found.second), strict=True):
        if report.state not in {"alive", "finished"}:
            reason = f" ({report.reason})" if report.reason else ""
            yield Item("warning", f"{name} did not finish: {report.state}{reason}, after step {report.last_step:,}.")


def _with_range(one: Compared, value: float, middle_half: tuple[float, float] | None) -> str:
    rounded = {"s": text_format.duration, "By": text_format.size}.get(one.unit, text_format.number)
    ends = f" ({rounded(middle_half[0])} to {rounded(middle_half[1])})" if middle_half is not None else ""
    return f"{rounded(value)}{ends}"


def _set_differently(found: Comparison) -> Section:
    rows = tuple((one.name, one.first or "-", one.second or "-") for one in found.differences)
    untold = [name for name, one in zip(_NAMES, (found.first, found.second), strict=True) if not one.details]
    note = f"How {text_format.joined(untold)} was started is not in its flight file." if untold else ""
    return section(
        "set", "Settings and environment", Text(note, "warning") if note else None,
        Table("What differs", ("What", *_NAMES), rows, frozenset({0, 1, 2})) if rows else Text("Nothing differs."), wide=True,
    )  # fmt: skip


def _measured(found: Comparison) -> Section:
    rows = tuple(
        (
            one.what,
            "-" if one.first is None else _with_range(one, one.first, one.first_range),
            "-" if one.second is None else _with_range(one, one.second, one.second_range),
            "-" if one.change is None else f"{100 * one.change:+,.1f} %",
        )
        for one in found.quantities
        if one.first is not None or one.second is not None
    )
    note = (
        "Step times and curves are medians, without the first steps, with the range of the middle half of the steps. The other "
        "figures are single ones. Where the ranges overlap, the difference may be noise."
    )
    table = Table("Speed, memory, curves", ("What", *_NAMES, "Change"), rows, frozenset({0}))
    return section("measured", "Speed, memory and results", table, Text(note, "note"), wide=True)


def _charts(reports: Sequence[RankView]) -> Section:
    fields = (("Loss", "loss"), ("Gradient norm", "grad_norm"), ("Step time", "duration_s"), ("Learning rate", "learning_rate"))
    charts = []
    for title, field in fields:
        curves = ((name, points_of(report.steps, field)) for name, report in zip(_NAMES, reports, strict=True))
        lines = tuple(Series(name, points) for name, points in curves if points)
        charts.append(LineChart(title, lines, text_format.duration if field == "duration_s" else text_format.number))
    return section("curves", "Curves", *(chart if chart.series else None for chart in charts))
