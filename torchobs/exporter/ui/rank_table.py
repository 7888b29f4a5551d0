"""The table of ranks: one page of rows, worst first or sorted as chosen, and a summary row."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog import PHASES
from torchobs.detect.stall import PATIENT_PHASES
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import last_step
from torchobs.exporter.ui.urls import link
from torchobs.exporter.ui.view_model import PER_PAGE
from torchobs.report import charts
from torchobs.report.html import EMPTY, Html, exact, heading_cell, joined, number_cell, table, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchobs.diagnosis.status import RankStatus
    from torchobs.exporter.ui.view_model import Model, Row

_COLUMNS = (
    ("rank", "rank", "n"), ("state", "worst", ""), ("step", "step", "n"), ("step time", "time", "n"), ("phases", "", ""),
    ("slowdown", "", "n"), ("loss", "loss", "n"), ("gradient norm", "norm", "n"), ("memory", "memory", "n"),
    ("last step", "", "n"),
)  # fmt: skip
"""Heading, the sort order it links to, and its CSS class"""

SYMBOLS = {"alive": "●", "finished": "✓", "unresponsive": "▲", "hung": "▲", "failed": "✕", "lost": "✕"}
"""Symbols beside the state's name, so that its meaning does not depend on colour"""


def ranks(model: Model) -> Html:
    """Return the section's content."""
    if model.run is None:
        return tag("p", "None yet.", class_="none")
    head = [_heading(model, *column) for column in _COLUMNS]
    body = [_row(model, row) for row in model.rows]
    foot = [_summary_row(model.run.rows)] if len(model.run.rows) > 1 else []
    caption = _caption(model, len(model.run.rows))
    legend = tag("p", "Phases: ", joined((_key(phase) for phase in PHASES), " "), class_="legend")
    return joined([table("Ranks", caption, head, body, foot), legend, _pager(model)])


def _heading(model: Model, words: str, sort: str, class_: str) -> Html:
    content = link(model.choice._replace(sort=sort, page=1), words, "ranks") if sort else tag("span", words)
    order = "ascending" if sort in {"rank", "step"} else "descending"
    return heading_cell(content, class_, order if sort == model.choice.sort else None)


def _caption(model: Model, count: int) -> str:
    order = {"worst": "the worst first", "rank": "in their order", "step": "the least advanced first"}
    sorted_by = order.get(model.choice.sort, "the highest first")
    if model.pages == 1:
        return f"{text_format.count(count)} on this node, {sorted_by}"
    first = (model.choice.page - 1) * PER_PAGE
    return f"{first + 1:,}–{first + len(model.rows):,} of {count:,} on this node, {sorted_by}"


def _row(model: Model, row: Row) -> Html:
    chosen = row is model.focus
    words = link(model.choice._replace(rank=row.rank), row.rank, "curves", label=f"Show rank {row.rank}", current=chosen)
    step = row.status.steps if row.readings.get(catalog.STEPS) is not None else None
    slow = row.status.slowness
    cells = [
        tag("td", _state(row.status)),
        _number(text_format.count, step),
        _number(text_format.duration, row.pace.step_s if row.pace else None),
        tag("td", charts.phases(row.pace.shares) if row.pace else text_format.NONE, class_="phases"),
        tag("td", _slowdown(row.status), class_="n slow" if slow and slow.is_slow else "n"),
        _number(text_format.number, row.status.loss),
        _number(text_format.number, row.grad_norm),
        number_cell(_memory(row)),
        number_cell(last_step(row.status)),
    ]
    return tag("tr", tag("th", words, scope="row", class_="n"), *cells, class_="chosen" if chosen else None)


def _state(status: RankStatus) -> Html:
    """Return the state with its symbol, how the rank ended, and its active anomalies."""
    symbol = tag("span", SYMBOLS.get(status.state, "●"), aria_hidden="true")
    details = [status.exception or status.reason.replace("_", " ")] if status.reason not in {"", status.state} else []
    details += [status.phase] if status.phase in PATIENT_PHASES else []
    details += [kind.replace("_", " ") for kind in status.anomalies]
    state = tag("span", symbol, " ", status.state, class_=f"state {status.state}")
    return joined([state, " ", tag("span", ", ".join(details), class_="why")]) if details else state


def _number(rounded: Callable[[float | None], str], value: float | None) -> Html:
    return number_cell(exact(rounded(value), value))


def _slowdown(status: RankStatus) -> Html:
    slow = status.slowness
    if slow is None or not status.up:
        return tag("span", text_format.NONE)
    words = exact(f"{slow.factor:.2f}×", slow.factor)
    return joined([words, f" {PHASES[slow.phase]}"]) if slow.is_slow else words


def _memory(row: Row) -> Html:
    limit = f" ({row.memory_limit})" if row.memory_limit and row.memory is not None else ""
    return joined([exact(text_format.size(row.memory), row.memory), limit])


def _summary_row(rows: Sequence[Row]) -> Html:
    """Return the number of ranks by state, and the range of each value."""
    counts = Counter(row.status.state for row in rows)
    states = ", ".join(f"{counts[name]:,} {name}" for name in catalog.RANK_STATES if counts[name])
    paces = [row.pace for row in rows if row.pace]
    mean = [sum(column) / len(paces) for column in zip(*(pace.shares for pace in paces), strict=True)]
    memory = [row.memory for row in rows if row.memory is not None]
    cells = [
        tag("td", states),
        number_cell(_range(text_format.count, [row.status.steps for row in rows])),
        number_cell(text_format.duration(median(pace.step_s for pace in paces) if paces else None)),
        tag("td", charts.phases(mean) if mean else text_format.NONE, class_="phases"),
        tag("td", ""),
        number_cell(_range(text_format.number, [row.status.loss for row in rows])),
        number_cell(_range(text_format.number, [row.grad_norm for row in rows])),
        number_cell(text_format.size(sum(memory) if memory else None)),
        tag("td", ""),
    ]
    return tag("tr", tag("th", "all", scope="row", class_="n"), *cells)


def _range(rounded: Callable[[float | None], str], values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    finite = [value for value in known if isfinite(value)]
    nonfinite = dict.fromkeys(rounded(value) for value in known if not isfinite(value))
    ends = dict.fromkeys([rounded(min(finite)), rounded(max(finite))]) if finite else ()
    return ", ".join([*([" – ".join(ends)] if ends else []), *nonfinite]) or text_format.NONE


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
