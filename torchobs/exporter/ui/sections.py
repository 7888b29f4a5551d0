"""The sections of the page. Each is rendered separately, so that only changed ones are sent to viewers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs.catalog import GRAD_NORM, LOSS, SCALAR_VALUE, Severity
from torchobs.diagnosis import quantities
from torchobs.diagnosis.health import BADGES
from torchobs.exporter.ui import charts, panels, rank_table
from torchobs.exporter.ui.event_groups import Line
from torchobs.exporter.ui.health_summary import MISSING, health
from torchobs.exporter.ui.html import EMPTY, Html, exact, joined, named, tag, text
from torchobs.exporter.ui.urls import link, table
from torchobs.exporter.ui.view_model import Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchobs.exporter.ui.sparkline_data import Curve
    from torchobs.exporter.ui.view_model import LayerRow, Model

LEVELS = {level: (*mark, BADGES[level]) for level, mark in
          ((Severity.INFO, ("good", "✓")), (Severity.WARNING, ("notice", "▲")), (Severity.ERROR, ("bad", "✕")))}  # fmt: skip


_MOST_NAMED = 4
_LONGEST_NAME = 40


def rendered(model: Model) -> dict[str, Html]:
    """Return every section's content by its element's ``id``."""
    return {name: render(model) for name, (_, render) in PARTS.items()}


def title(model: Model) -> str:
    """Return the document's title, which a background tab shows."""
    mark = LEVELS[health(model.run, model.runs).level][1]
    return f"{mark} {model.run.job_name[:80]} – torchobs" if model.run else "torchobs exporter"


def heading(model: Model) -> Html:
    """Return the page's heading: the run shown, or the one waited for."""
    if model.run is None:
        return named(model.choice.run) if model.choice.run else text("torchobs exporter")
    return joined([named(model.run.job_name), " ", tag("span", named(model.run.run_id), class_="run")])


def _health(model: Model) -> Html:
    told = MISSING if model.run is None and model.choice.run else health(model.run, model.runs)
    level, mark, word = LEVELS[told.level] if model.run else ("quiet", "…", "Waiting")
    return joined(
        [
            tag("p", tag("span", f"{mark} {word}", class_="badge"), " ", told.text, class_=f"sentence {level}"),
            tag("p", told.gist, class_="unseen", role="status", aria_live="polite"),
        ]
    )


def _runs(model: Model) -> Html:
    """Return the list of runs to choose from, if there is another than the one shown."""
    if all(run is model.run for run in model.runs):
        return EMPTY
    items = [
        tag("li", link(Choice(run=run.key), run.job_name, "health", current=run is model.run), " ", named(run.run_id), " ",
            tag("span", health(run).text, class_="quiet"))
        for run in model.runs
    ]  # fmt: skip
    return joined([tag("h2", "Runs"), tag("ul", *items)])


def _curves(model: Model) -> Html:
    focus = model.focus
    if focus is None:
        return EMPTY
    found = model.curves
    old_loss, old_norm = (found.read and focus.readings.get(metric) is not None for metric in (LOSS, GRAD_NORM))
    loss_chart = charts.sparkline(found.loss, "Loss", quantities.number, stale=old_loss)
    norm_chart = charts.sparkline(found.norm, "Gradient norm", quantities.number, stale=old_norm)
    cards = [
        _card("Loss", exact(quantities.number(focus.loss), focus.loss), loss_chart),
        _card("Gradient norm", exact(quantities.number(focus.grad_norm), focus.grad_norm), norm_chart),
        _card(
            "Step time", _last(found.time, quantities.seconds), charts.sparkline(found.time, "Step time", quantities.seconds)
        ),
    ]
    cards += [_logged(model, name) for name in model.scalars]
    return joined([tag("h2", "Rank ", named(focus.rank), " over its last steps"), tag("div", *cards, class_="cards")])


def _logged(model: Model, name: str) -> Html:
    """Return the card of a logged scalar: its last value, and its curve since the run began."""
    last = model.focus.readings.get(SCALAR_VALUE, name) if model.focus else None
    drawn = charts.sparkline(model.scalars[name], name[:_LONGEST_NAME], quantities.number, stale=True)
    return _card(named(name[:_LONGEST_NAME]), exact(quantities.number(last), last), drawn)


def _last(found: Curve | None, shown: Callable[[float], str]) -> Html:
    return exact(shown(found.last), found.last) if found else tag("span", quantities.NONE)


def _card(name: str, value: Html, chart: Html) -> Html:
    return tag("div", tag("h3", name), tag("p", value, class_="value"), chart, class_="card")


def _ranks(model: Model) -> Html:
    return joined([tag("h2", "Ranks"), rank_table.ranks(model)])


def _events(model: Model) -> Html:
    log = model.events
    if not log.lines:
        return joined([tag("h2", "Events"), tag("p", "None yet.", class_="none")])
    head = [tag("th", word, scope="col", class_=kind or None) for word, kind in
            (("when", ""), ("rank", "n"), ("step", "n"), ("what", ""))]  # fmt: skip
    rows = [_event(model, line) for line in log.lines]
    if log.cause is not None and len(log.lines) > 1:
        rows.insert(0, _event(model, Line(log.cause), "First: "))
    caption = f"{len(log.lines):,}, the newest first, many of a kind as one, with this machine’s time"
    return joined([tag("h2", "Events"), table("Events", caption, head, rows)])


def _event(model: Model, line: Line, before: str = "") -> Html:
    event = line.event
    level, mark, word = LEVELS[event.severity]
    sign = EMPTY if event.severity is Severity.INFO else tag("span", f"{mark} ", role="img", aria_label=f"{word}: ")
    step = quantities.NONE if event.step is None else quantities.count(event.step)
    told: list[str] = [before, sign, tag("b", named(event.title))]
    if line.first is not None:
        since = "" if line.first.step is None else f" in step {quantities.count(line.first.step)}"
        told += [tag("span", f" ×{line.number:,}", class_="times"), " since ", _when(model.now_s, line.first.at_s)]
        told += [f"{since}, last:"]
    what = tag("td", *told, " ", tag("span", event.text), class_=f"what {level}")
    when, who = tag("td", _when(model.now_s, event.at_s)), tag("td", named(_who(event.ranks)), class_="n")
    return tag("tr", when, who, tag("td", step, class_="n"), what, class_="first" if before else None)


def _who(ranks: Sequence[str]) -> str:
    """Return ranks as a short list: ``0–7``, or the first few."""
    numbers = sorted({int(rank) for rank in ranks if rank.isdecimal()})
    if len(numbers) == len(ranks) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:  # noqa: PLR2004  # two are no range
        return f"{numbers[0]}–{numbers[-1]}"
    more = len(ranks) - _MOST_NAMED
    return ", ".join(ranks[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _evidence(model: Model) -> Html:
    """Return the list of the ranks' artifacts, if there are any."""
    if not model.evidence:
        return EMPTY
    columns = (("when", ""), ("rank", "n"), ("what", ""), ("size", "n"))
    head = [tag("th", word, scope="col", class_=kind or None) for word, kind in columns]
    rows = [
        tag("tr", tag("td", tag("time", one.time[:19].replace("T", " "), datetime=one.time)),
            tag("td", named(one.rank), class_="n"),
            tag("td", tag("a", one.kind.replace("_", " "), href=f".{one.href}")),
            tag("td", exact(quantities.size(one.size_bytes), one.size_bytes), class_="n"))
        for one in model.evidence
    ]  # fmt: skip
    return joined([tag("h2", "Evidence"), table("Evidence", f"{len(rows):,}, the newest first, in UTC", head, rows)])


def _when(now_s: float, at_s: float) -> Html:
    moment = time.localtime(at_s)
    iso = time.strftime("%Y-%m-%dT%H:%M:%S%z", moment)
    ago_s = now_s - at_s
    shown = time.strftime("%H:%M:%S" if ago_s < 43_200 else "%Y-%m-%d %H:%M", moment)  # noqa: PLR2004  # half a day
    return tag("time", shown, datetime=iso)


def _layers(model: Model) -> Html:
    if not model.layers:
        return EMPTY
    columns = (("layer", "name", ""), ("gradient norm", "gradient", "n"), ("weight norm", "weights", "n"),
               ("update / weights", "update", "n"))  # fmt: skip
    shown = [
        column for column in columns if column[1] == "name" or any(_of(layer, column[1]) is not None for layer in model.layers)
    ]
    chosen = model.choice.layers
    head = [
        tag("th", link(model.choice._replace(layers=sort), words, "layers"), scope="col", class_=kind or None,
            aria_sort=None if sort != chosen else "ascending" if sort == "name" else "descending")
        for words, sort, kind in shown
    ]  # fmt: skip
    rows = [tag("tr", tag("th", named(layer.name), scope="row"), *(_norm(_of(layer, sort)) for _, sort, _ in shown[1:]))
            for layer in model.layers]  # fmt: skip
    rank = model.focus.rank if model.focus else ""
    order = {"model": "largest layers as the model has them", "name": "by name"}.get(chosen, "the highest first")
    return joined([tag("h2", "Layers"), table("Layers", f"Of rank {rank}, {order}", head, rows)])


def _of(layer: LayerRow, column: str) -> float | None:
    return {"gradient": layer.gradient, "weights": layer.weights, "update": layer.update}.get(column)


def _norm(value: float | None) -> Html:
    return tag("td", exact(quantities.number(value), value), class_="n")


PARTS: dict[str, tuple[str, Callable[[Model], Html]]] = {
    "health": ("Health", _health),
    "runs": ("Runs", _runs),
    "figures": ("Key figures", panels.key_figures),
    "curves": ("Curves", _curves),
    "ranks": ("Ranks", _ranks),
    "details": ("Details", panels.details),
    "events": ("Events", _events),
    "evidence": ("Evidence", _evidence),
    "layers": ("Layers", _layers),
}
"""By ``id``: the section's name for screen readers, and the function that renders it"""
