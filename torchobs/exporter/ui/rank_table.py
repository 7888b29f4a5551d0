"""The table of ranks: one page of rows, worst first or sorted as chosen, and a summary row."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog import PHASES
from torchobs.diagnosis import quantities
from torchobs.exporter.ui import charts
from torchobs.exporter.ui.html import EMPTY, Html, exact, joined, named, tag
from torchobs.exporter.ui.urls import link, table
from torchobs.exporter.ui.view_model import PER_PAGE
from torchobs.ranks.state import PATIENT_PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.exporter.ui.view_model import Model, Row

_COLUMNS = (
    ("rank", "rank", "n"), ("state", "worst", ""), ("step", "step", "n"), ("step time", "time", "n"), ("phases", "", ""),
    ("slowdown", "", "n"), ("loss", "loss", "n"), ("gradient norm", "norm", "n"), ("memory", "memory", "n"),
    ("last step", "", "n"),
)  # fmt: skip
"""Heading, the sort order it links to, and its CSS class"""

MARKS = {"alive": "●", "finished": "✓", "unresponsive": "▲", "hung": "▲", "failed": "✕", "lost": "✕"}
"""Symbols beside the state's name, so that its meaning does not depend on colour"""


def ranks(model: Model) -> Html:
    """Return the section's content."""
    if model.run is None:
        return tag("p", "None yet.", class_="none")
    head = [tag("th", _heading(model, *column), **_scope(model, *column)) for column in _COLUMNS]
    body = [_row(model, row) for row in model.rows]
    foot = [_all(model.run.rows)] if len(model.run.rows) > 1 else []
    caption = _caption(model, len(model.run.rows))
    legend = tag("p", "Phases: ", joined((_key(phase) for phase in PHASES), " "), class_="legend")
    return joined([table("Ranks", caption, head, body, foot), legend, _pager(model)])


def _heading(model: Model, words: str, sort: str, _: str) -> Html:
    return link(model.choice._replace(sort=sort, page=1), words, "ranks") if sort else tag("span", words)


def _scope(model: Model, _: str, sort: str, kind: str) -> dict[str, str | None]:
    direction = "ascending" if sort in {"rank", "step"} else "descending"
    return {"scope": "col", "class_": kind or None, "aria_sort": direction if sort == model.choice.sort else None}


def _caption(model: Model, count: int) -> str:
    order = {"worst": "the worst first", "rank": "in their order", "step": "the least advanced first"}
    sorted_by = order.get(model.choice.sort, "the highest first")
    if model.pages == 1:
        return f"{quantities.count(count)} on this node, {sorted_by}"
    first = (model.choice.page - 1) * PER_PAGE
    return f"{first + 1:,}–{first + len(model.rows):,} of {count:,} on this node, {sorted_by}"


def _row(model: Model, row: Row) -> Html:
    chosen = row is model.focus
    words = link(model.choice._replace(rank=row.rank), row.rank, "curves", label=f"Show rank {row.rank}", current=chosen)
    step = row.steps if row.readings.get(catalog.STEPS) is not None else None
    slow = row.slowness
    cells = [
        tag("td", state(row)),
        _number(quantities.count, step),
        _number(quantities.seconds, row.pace.step_s if row.pace else None),
        tag("td", charts.phases(row.pace.shares) if row.pace else quantities.NONE, class_="phases"),
        tag("td", _slowdown(row), class_="n slow" if slow and slow.is_slow else "n"),
        _number(quantities.number, row.loss),
        _number(quantities.number, row.grad_norm),
        tag("td", _memory(row), class_="n"),
        tag("td", _seen(row), class_="n"),
    ]
    return tag("tr", tag("th", words, scope="row", class_="n"), *cells, class_="chosen" if chosen else None)


def state(row: Row) -> Html:
    """Return the state with its symbol, how the rank ended, and its active anomalies."""
    mark = tag("span", MARKS.get(row.state, "●"), aria_hidden="true")
    details = [row.reason.replace("_", " ")] if row.reason not in {"", row.state} else []
    details += [row.phase] if row.phase in PATIENT_PHASES else []
    details += [kind.replace("_", " ") for kind in row.anomalies]
    more = tag("span", ", ".join(details), class_="why") if details else EMPTY
    return joined([tag("span", mark, " ", row.state, class_=f"state {row.state}"), " " if details else "", more])


def _number(shown: Callable[[float | None], str], value: float | None) -> Html:
    return tag("td", exact(shown(value), value), class_="n")


def _slowdown(row: Row) -> Html:
    slow = row.slowness
    if slow is None or not row.up:
        return tag("span", quantities.NONE)
    words = exact(f"{slow.factor:.2f}×", slow.factor)
    return joined([words, f" {PHASES[slow.phase]}"]) if slow.is_slow else words


def _memory(row: Row) -> Html:
    part = "" if row.memory_share is None else f" ({quantities.share(row.memory_share)})"
    return joined([exact(quantities.size(row.memory), row.memory), part if row.memory is not None else ""])


def _seen(row: Row) -> str:
    if not row.up:
        return f"ended {quantities.span(row.beat_age_s)} ago"
    age_s = row.progress_age_s or 0.0
    if not row.steps:
        return f"none for {quantities.span(age_s)}"
    return "now" if age_s < 1.5 else f"{quantities.span(age_s)} ago"  # noqa: PLR2004  # the page is updated every second


def _all(rows: Iterable[Row]) -> Html:
    """Return the summary row: the number of ranks by state, and the range of each value."""
    every = list(rows)
    counts = Counter(row.state for row in every)
    states = ", ".join(f"{counts[name]:,} {name}" for name in catalog.RANK_STATES if counts[name])
    paces = [row.pace for row in every if row.pace]
    mean = [sum(column) / len(paces) for column in zip(*(pace.shares for pace in paces), strict=True)]
    memory = [row.memory for row in every if row.memory is not None]
    cells = [
        tag("td", states),
        tag("td", _extent(quantities.count, [row.steps for row in every]), class_="n"),
        tag("td", quantities.seconds(median(pace.step_s for pace in paces)) if paces else quantities.NONE, class_="n"),
        tag("td", charts.phases(mean) if mean else quantities.NONE, class_="phases"),
        tag("td", ""),
        tag("td", _extent(quantities.number, [row.loss for row in every]), class_="n"),
        tag("td", _extent(quantities.number, [row.grad_norm for row in every]), class_="n"),
        tag("td", quantities.size(sum(memory)) if memory else quantities.NONE, class_="n"),
        tag("td", ""),
    ]
    return tag("tr", tag("th", "all", scope="row", class_="n"), *cells)


def _extent(shown: Callable[[float | None], str], values: Iterable[float | None]) -> str:
    there = [value for value in values if value is not None]
    finite = [value for value in there if isfinite(value)]
    odd = dict.fromkeys(shown(value) for value in there if not isfinite(value))
    ends = dict.fromkeys([shown(min(finite)), shown(max(finite))]) if finite else ()
    return ", ".join([*([" – ".join(ends)] if ends else []), *odd]) or quantities.NONE


def _key(phase: str) -> Html:
    return tag("span", charts.stacked([(phase, 1.0)]), phase, class_="key")


def _pager(model: Model) -> Html:
    if model.pages == 1:
        return EMPTY
    page = model.choice.page
    wanted = sorted({1, 2, page - 1, page, page + 1, model.pages - 1, model.pages} & set(range(1, model.pages + 1)))
    links = [
        link(model.choice._replace(page=number), f"{number:,}", "ranks", label=f"Page {number:,}", current=number == page)
        for number in wanted
    ]
    return tag("nav", joined(links, " "), aria_label="Pages of ranks", class_="pager")


def names(rows: Iterable[Row]) -> Html:
    """Return the names of ranks."""
    return joined((named(row.rank) for row in rows), ", ")
