"""Two runs compared: settings that differ, and their results. Pure.

Each is given as plain data (``document.run``); a kept run is plain data already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from statistics import median, quantiles
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs._version import __version__
from torchobs.document.blocks import Document, Item, Items, LineChart, Point, Section, Series, Table, Text, section
from torchobs.document.run import facts
from torchobs.flight.events import plain
from torchobs.support import text as text_format

VERSION = 1
_WARM_UP = 5
_NAMES = ("A", "B")
_TAIL = 0.1
CURVES = {"loss": "Loss", "grad_norm": "Gradient norm", "duration_s": "Step time", "learning_rate": "Learning rate"}


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


class Side(NamedTuple):
    """One run of a comparison, by the rank that its report shows."""

    job_name: str
    run_id: str
    rank: str
    state: str
    ended_by: str
    started: float
    steps: int
    resumed_from: float | None
    """steps before this process; ``None``: it may have gone on from a checkpoint, at a step that nothing says"""
    facts: Mapping[str, str]
    """arguments and settings, by name"""
    is_told: bool
    """whether its file says how it was started"""
    quantities: Mapping[str, tuple[str, list[float]]]
    """units and values, one or many, by name"""
    curves: Mapping[str, list[Point]]
    """by field and step of the training"""


class Comparison(NamedTuple):
    """Two runs compared."""

    first: Side
    second: Side
    differences: tuple[Difference, ...]
    quantities: tuple[Compared, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data. Times in seconds, memory in bytes; a non-finite number is its name."""
        names = ("job_name", "run_id", "rank", "state", "steps", "resumed_from", "started")
        runs = [{name: getattr(side, name) for name in names} for side in (self.first, self.second)]
        parts = {
            "differences": [difference._asdict() for difference in self.differences],
            "quantities": [quantity._asdict() for quantity in self.quantities],
        }
        data: dict[str, Any] = plain({"version": VERSION, "runs": runs, **parts})
        return data


def all_steps(rank: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps of a rank's plain data, and before them the points of earlier ones, evenly over the run."""
    columns, steps = {catalog.LOSS.name: "loss", catalog.GRAD_NORM.name: "grad_norm"}, rank["steps"]
    fields = {2 + at: columns[name] for at, name in enumerate(rank["history"]["names"]) if name in columns}
    first = steps[0]["step"] if steps else inf
    earlier = {
        row[1]: {**dict.fromkeys(CURVES), "step": row[1], "end_s": rank["started"] + row[0]}
        | {field: row[at] for at, field in fields.items()}
        for row in rank["history"]["rows"]
        if 0 < row[1] < first
    }
    return [*earlier.values(), *steps]


def side_of(data: Mapping[str, Any]) -> Side:
    """Return the side of a run; ``data``: its plain data, with all steps and the history of its principal rank."""
    every, rank = data["ranks"], data["ranks"][data["principal"]]
    details = max((rank["details"], *(other["details"] for other in every)), key=len)
    arguments, resumed_from = details.get("arguments"), rank["resumed_from"]
    before = resumed_from or 0.0
    return Side(
        **{name: text_format.clean(rank[name]) for name in ("job_name", "run_id", "rank", "state")},
        ended_by=text_format.clean(rank["exit"]["reason"] or ""), started=float(rank["started"]), steps=rank["last_step"],
        resumed_from=resumed_from,
        facts=(parsed(arguments) if isinstance(arguments, list) else {})
        | facts(rank["resource"], details)
        | {"ranks here": str(len(every)), "resumed from step": "unknown" if resumed_from is None else f"{before:,.0f}"},
        is_told=bool(rank["details"]),
        quantities={what: (unit, [float(value) for value in values]) for what, unit, values in _quantities(rank)},
        curves={
            field: [(before + step["step"], float(step[field])) for step in all_steps(rank) if step[field] is not None]
            for field in CURVES
        },
    )  # fmt: skip


def compare(first: Side, second: Side) -> Comparison:
    """Compare two runs. Steps are those of the training: a run that was resumed goes on where the first one was.

    Where that is unknown, its curves begin at its own start, and no step of it is beside one of the other run.
    """
    names = dict.fromkeys((*first.facts, *second.facts))
    pairs = ((name, first.facts.get(name, ""), second.facts.get(name, "")) for name in names)
    quantities = [
        _compared(what, unit, *(side.quantities[what][1] for side in (first, second)))
        for what, (unit, _) in first.quantities.items()
        if not what.startswith("step time,") or any(any(side.quantities[what][1]) for side in (first, second))
    ]
    differences = tuple(Difference(*pair) for pair in pairs if pair[1] != pair[2])
    return Comparison(first, second, differences, (*quantities, *_tails(first, second)))


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


def _quantities(rank: Mapping[str, Any]) -> Iterator[tuple[str, str, Sequence[Any]]]:
    steps, history, rss = rank["steps"], rank["history"], catalog.MEMORY_HOST_RSS.name
    timed = [step["duration_s"] for step in steps if step["duration_s"] is not None and step["step"] > _WARM_UP]
    yield "step time", "s", [seconds for seconds in timed if isfinite(float(seconds))]
    for phase in catalog.PHASES:
        yield f"step time, {phase}", "s", [step["phases"].get(phase, 0.0) for step in steps[_WARM_UP:]]
    speed, spent = rank["speed"] or {}, rank["goodput"]
    yield from _greatest("speed", "", [speed.get("steps_per_s")])
    yield from _greatest("tokens per second", "", [speed.get("tokens_per_s")])
    yield from _greatest("goodput", "", [spent.get("productive", 0.0) / sum(spent.values())] if any(spent.values()) else [])
    at = history["names"].index(rss) if rss in history["names"] else None
    memory = [row[2 + at] for row in history["rows"]] if at is not None else []
    yield from _greatest("host memory, greatest RSS", "By", memory or [rank["memory"]["rss"]])
    yield from _greatest("device memory, peak", "By", [sizes.get("peak") for sizes in rank["device_memory"].values()])
    yield "steps", "", [rank["last_step"]]


def _greatest(what: str, unit: str, values: Sequence[Any]) -> Iterator[tuple[str, str, Sequence[Any]]]:
    yield what, unit, sorted(float(value) for value in values if value is not None)[-1:]


def _compared(what: str, unit: str, first: Sequence[float], second: Sequence[float]) -> Compared:
    was, became = (median(values) if values else None for values in (first, second))
    change = (became - was) / abs(was) if was and became is not None else None
    return Compared(what, unit, was, became, change, _middle_half(first), _middle_half(second))


def _middle_half(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:  # noqa: PLR2004  # a range has two ends
        return None
    low, _, high = quantiles(values, method="inclusive")
    return low, high


def _tails(first: Side, second: Side) -> Iterator[Compared]:
    """Yield loss and gradient norm over the last tenth of the steps that both runs have."""
    if first.resumed_from is None or second.resumed_from is None:
        return
    common = int(min(first.resumed_from + first.steps, second.resumed_from + second.steps))
    begin = common - max(int(common * _TAIL), _WARM_UP)
    for field, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        tails = [
            [value for at, value in side.curves[field] if begin < at <= common and isfinite(value)] for side in (first, second)
        ]
        if all(tails):
            yield _compared(f"{name}, steps {begin + 1:,} to {common:,}", "", *tails)


def comparison_document(comparison: Comparison) -> Document:
    """Return the comparison as a document."""
    runs = (comparison.first, comparison.second)
    names = [f"{name}: {run.job_name} {run.run_id}" for name, run in zip(_NAMES, runs, strict=True)]
    jobs = list(dict.fromkeys(run.job_name for run in runs))
    return Document(
        title=f"Two runs of {jobs[0]} compared" if len(jobs) == 1 else f"{jobs[0]} and {jobs[1]} compared",
        subtitle=" · ".join(names),
        badge=("info", "Compared"),
        headline=_settings(comparison),
        sections=(
            section("findings", "What differs", Items(tuple(_ends(comparison)))), _set_differently(comparison),
            _measured(comparison), _charts(runs),
        ),
        footer=(f"torchobs {__version__}",),
    )  # fmt: skip


def _settings(comparison: Comparison) -> str:
    changed = [difference.name for difference in comparison.differences]
    return f"Set differently: {text_format.joined(changed, 8)}." if changed else "Nothing is set differently."


def _ends(comparison: Comparison) -> Iterator[Item]:
    """Yield how each run that is not in order ended."""
    for name, run in zip(_NAMES, (comparison.first, comparison.second), strict=True):
        if run.state not in {"alive", "finished"}:
            reason = f" ({run.ended_by})" if run.ended_by else ""
            yield Item("warning", f"{name} did not finish: {run.state}{reason}, after step {run.steps:,}.")


def _with_range(quantity: Compared, value: float, middle_half: tuple[float, float] | None) -> str:
    rounded = {"s": text_format.duration, "By": text_format.size}.get(quantity.unit, text_format.number)
    ends = f" ({rounded(middle_half[0])} to {rounded(middle_half[1])})" if middle_half is not None else ""
    return f"{rounded(value)}{ends}"


def _set_differently(comparison: Comparison) -> Section:
    rows = tuple((difference.name, difference.first or "-", difference.second or "-") for difference in comparison.differences)
    unrecorded = [name for name, side in zip(_NAMES, (comparison.first, comparison.second), strict=True) if not side.is_told]
    note = f"How {text_format.joined(unrecorded)} was started is not in its flight file." if unrecorded else ""
    return section(
        "set", "Settings and environment", Text(note, "warning") if note else None,
        Table("What differs", ("What", *_NAMES), rows, frozenset({0, 1, 2})) if rows else Text("Nothing differs."), wide=True,
    )  # fmt: skip


def _measured(comparison: Comparison) -> Section:
    rows = tuple(
        (
            quantity.what,
            "-" if quantity.first is None else _with_range(quantity, quantity.first, quantity.first_range),
            "-" if quantity.second is None else _with_range(quantity, quantity.second, quantity.second_range),
            "-" if quantity.change is None else f"{100 * quantity.change:+,.1f} %",
        )
        for quantity in comparison.quantities
        if quantity.first is not None or quantity.second is not None
    )
    note = (
        "Step times and curves are medians, without the first steps, with the range of the middle half of the steps. The other "
        "figures are single ones. Where the ranges overlap, the difference may be noise."
    )
    table = Table("Speed, memory, curves", ("What", *_NAMES, "Change"), rows, frozenset({0}))
    return section("measured", "Speed, memory and results", table, Text(note, "note"), wide=True)


def _charts(sides: Sequence[Side]) -> Section:
    charts = []
    uncounted = [name for name, side in zip(_NAMES, sides, strict=True) if side.resumed_from is None]
    note = (
        f"Nothing says at which step {text_format.joined(uncounted)} began: the optimizer counts none (SGD, for one), and a "
        "checkpoint may have been loaded. So the curves begin at step 1, and losses at the same steps are not compared. "
        "torchobs.log(resumed_from=...) says where a run goes on."
    )
    for field, title in CURVES.items():
        lines = tuple(Series(name, side.curves[field]) for name, side in zip(_NAMES, sides, strict=True) if side.curves[field])
        charts.append(LineChart(title, lines, text_format.duration if field == "duration_s" else text_format.number))
    shown = Text(note, "warning") if uncounted else None
    return section("curves", "Curves", shown, *(chart if chart.series else None for chart in charts))
