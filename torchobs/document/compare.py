"""Two runs compared: what was set differently, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

from torchobs._version import __version__
from torchobs.document.blocks import Document, Item, Items, LineChart, Section, Series, Table, Text, section
from torchobs.document.summary import WARM_UP, Quantity, Side, of_many
from torchobs.flight.events import plain
from torchobs.support import text as text_format

VERSION = 1
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
    """Two runs compared."""

    first: Side
    second: Side
    differences: tuple[Difference, ...]
    quantities: tuple[Compared, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data. Times in seconds, memory in bytes; a non-finite number is its name."""
        runs = [
            {
                **{name: getattr(one.summary, name) for name in ("job_name", "run_id", "state", "steps", "started")},
                **{name: getattr(one, name) for name in ("rank", "resumed_from")},
            }
            for one in (self.first, self.second)
        ]
        parts = {
            "differences": [one._asdict() for one in self.differences],
            "quantities": [one._asdict() for one in self.quantities],
        }
        made: dict[str, Any] = plain({"version": VERSION, "runs": runs, **parts})
        return made


def compare(first: Side, second: Side) -> Comparison:
    """Compare two runs. Steps are those of the training: a run that was resumed goes on where the first one was."""
    names = dict.fromkeys((*first.facts, *second.facts))
    pairs = ((name, first.facts.get(name, ""), second.facts.get(name, "")) for name in names)
    differences = tuple(Difference(*pair) for pair in pairs if pair[1] != pair[2])
    return Comparison(first, second, differences, tuple(_quantities(first, second)))


def _quantities(first: Side, second: Side) -> Iterator[Compared]:
    theirs = {one.what: one for one in second.quantities}
    for one in first.quantities:
        other = theirs.get(one.what, one._replace(value=None, middle_half=None))
        if not one.what.startswith("step time,") or one.value is not None or other.value is not None:
            yield _compared(one, other)
    yield from _curves(first, second)


def _compared(first: Quantity, second: Quantity) -> Compared:
    was, became = first.value, second.value
    change = (became - was) / abs(was) if was and became is not None else None
    return Compared(first.what, first.unit, was, became, change, first.middle_half, second.middle_half)


def _curves(first: Side, second: Side) -> Iterator[Compared]:
    """Yield loss and gradient norm over the last tenth of the steps that both runs have."""
    common = int(min(side.resumed_from + side.summary.steps for side in (first, second)))
    begin = common - max(int(common * _TAIL), WARM_UP)
    for field, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        what = f"{name}, steps {begin + 1:,} to {common:,}"
        tails = [
            [value for at, value in side.course.points(field) if begin < at <= common and isfinite(value)]
            for side in (first, second)
        ]
        if all(tails):
            yield _compared(*(of_many(what, "", tail) for tail in tails))


def comparison_document(found: Comparison) -> Document:
    """Return the comparison as a document."""
    runs = (found.first.summary, found.second.summary)
    names = [f"{name}: {run.job_name} {run.run_id}" for name, run in zip(_NAMES, runs, strict=True)]
    jobs = list(dict.fromkeys(run.job_name for run in runs))
    return Document(
        title=f"Two runs of {jobs[0]} compared" if len(jobs) == 1 else f"{jobs[0]} and {jobs[1]} compared",
        subtitle=" · ".join(names),
        badge=("info", "Compared"),
        headline=_settings(found),
        sections=(
            section("findings", "What differs", Items(tuple(_ends(found)))), _set_differently(found), _measured(found),
            _charts((found.first, found.second)),
        ),
        footer=(f"torchobs {__version__}",),
    )  # fmt: skip


def _settings(found: Comparison) -> str:
    changed = [one.name for one in found.differences]
    return f"Set differently: {text_format.joined(changed, 8)}." if changed else "Nothing is set differently."


def _ends(found: Comparison) -> Iterator[Item]:
    """Yield how each run that is not in order ended."""
    for name, run in zip(_NAMES, (found.first.summary, found.second.summary), strict=True):
        if run.state not in {"alive", "finished"}:
            reason = f" ({run.ended_by})" if run.ended_by else ""
            yield Item("warning", f"{name} did not finish: {run.state}{reason}, after step {run.steps:,}.")


def _with_range(one: Compared, value: float, middle_half: tuple[float, float] | None) -> str:
    rounded = {"s": text_format.duration, "By": text_format.size}.get(one.unit, text_format.number)
    ends = f" ({rounded(middle_half[0])} to {rounded(middle_half[1])})" if middle_half is not None else ""
    return f"{rounded(value)}{ends}"


def _set_differently(found: Comparison) -> Section:
    rows = tuple((one.name, one.first or "-", one.second or "-") for one in found.differences)
    untold = [name for name, one in zip(_NAMES, (found.first, found.second), strict=True) if not one.is_told]
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


def _charts(sides: Sequence[Side]) -> Section:
    fields = (("Loss", "loss"), ("Gradient norm", "grad_norm"), ("Step time", "duration_s"), ("Learning rate", "learning_rate"))
    charts = []
    for title, field in fields:
        curves = ((name, side.course.points(field)) for name, side in zip(_NAMES, sides, strict=True))
        lines = tuple(Series(name, points) for name, points in curves if points)
        charts.append(LineChart(title, lines, text_format.duration if field == "duration_s" else text_format.number))
    return section("curves", "Curves", *(chart if chart.series else None for chart in charts))
