"""The HTML document and its sections: complete without JavaScript, with one script and one style sheet.

Sections are rendered separately, so that only changed ones are sent to viewers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs._version import __version__
from torchobs.catalog import GRAD_NORM, GRAD_NORM_RANKS, LOSS, SCALAR_VALUE, Severity
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import BADGES
from torchobs.exporter.ui import panels, rank_table
from torchobs.exporter.ui.events import EventGroup
from torchobs.exporter.ui.urls import link, stream_of
from torchobs.exporter.ui.view_model import LAYERS, Choice
from torchobs.report import charts
from torchobs.report.html import EMPTY, Html, exact, heading_cell, joined, named, number_cell, table, tag, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchobs.exporter.ui.view_model import Model, Run

STYLE_PATH, SCRIPT_PATH = "/live/live.css", "/live/live.js"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Response headers: forbid inline script and style, and framing."""

LEVELS = {Severity.INFO: ("good", "✓"), Severity.WARNING: ("notice", "▲"), Severity.ERROR: ("bad", "✕")}
"""CSS class and symbol"""

_MOST_NAMED = 4
_LONGEST_NAME = 40


def page(model: Model, problems: Sequence[str], links: Sequence[tuple[str, str]]) -> Html:
    """Return the document. ``links``: the exporter's other pages, as (path, name)."""
    alerts = [tag("p", tag("strong", problem), role="alert", class_="problem") for problem in problems]
    sections = [
        tag("section", content, id=name, aria_label=PARTS[name][0], tabindex="-1" if name == "ranks" else None)
        for name, content in rendered(model).items()
    ]
    body = tag(
        "body",
        tag("a", "Skip to the ranks", href="#ranks", class_="skip"),
        _header(model, links),
        tag("main", *alerts, *sections),
        tag("footer", tag("p", f"torchobs {__version__}")),
        data_stream=stream_of(model.choice),
    )
    return Html(f"<!doctype html>\n{tag('html', _head(model), body, lang='en')}\n")


def _head(model: Model) -> Html:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title(model)),
        tag("link", rel="icon", href="data:,"),
        tag("link", rel="stylesheet", href=f".{STYLE_PATH}"),
        tag("script", src=f".{SCRIPT_PATH}", defer=True),
    )


def _header(model: Model, links: Sequence[tuple[str, str]]) -> Html:
    status = tag("p", "As of when it was loaded", id="link", class_="link", data_state="still")
    pause = tag("button", "Pause", type="button", id="pause", hidden=True)
    others = tag("nav", *(tag("a", words, href=f".{path}") for path, words in links), aria_label="Elsewhere")
    return tag("header", tag("h1", heading(model), id="heading"), tag("div", status, pause, class_="controls"), others)


def rendered(model: Model) -> dict[str, Html]:
    """Return every section's content by its element's ``id``."""
    return {name: render(model) for name, (_, render) in PARTS.items()}


def title(model: Model) -> str:
    """Return the document's title, which a background tab shows."""
    _, symbol = LEVELS[model.health.level]
    return f"{symbol} {model.run.job_name[:80]} – torchobs" if model.run else "torchobs exporter"


def heading(model: Model) -> Html:
    """Return the page's heading: the run shown, or the one waited for."""
    if model.run is None:
        return named(model.choice.run) if model.choice.run else text("torchobs exporter")
    return joined([named(model.run.job_name), " ", tag("span", named(model.run.run_id), class_="run")])


def _health(model: Model) -> Html:
    health = model.health
    class_, symbol = LEVELS[health.level] if model.run else ("quiet", "…")
    badge = tag("span", f"{symbol} {BADGES[health.level] if model.run else 'Waiting'}", class_="badge")
    sentence = tag("p", badge, " ", health.text, class_=f"sentence {class_}")
    return joined([sentence, tag("p", health.gist, class_="unseen", role="status", aria_live="polite")])


def _runs(model: Model) -> Html:
    """Return the list of runs to choose from, if there is another than the one shown."""
    if all(run is model.run for run in model.runs):
        return EMPTY
    return joined([tag("h2", "Runs"), tag("ul", *(_run(run, chosen=run is model.run) for run in model.runs))])


def _run(run: Run, *, chosen: bool) -> Html:
    """Return a line of the list of runs, which begins with how the run is."""
    class_, symbol = LEVELS[run.health.level]
    sign = tag("span", symbol, class_="sign", role="img", aria_label=f"{BADGES[run.health.level]}:")
    name = link(Choice(run=run.key), run.job_name, "health", current=chosen)
    return tag("li", sign, " ", name, " ", named(run.run_id), " ", tag("span", run.health.text, class_="quiet"), class_=class_)


def _curves(model: Model) -> Html:
    focus = model.focus
    if focus is None:
        return EMPTY
    number, curves = text_format.number, model.curves
    had_loss, had_norm = (curves.read and focus.readings.get(metric) is not None for metric in (LOSS, GRAD_NORM))
    last_time = curves.time.last if curves.time else None
    is_shard = (focus.readings.get(GRAD_NORM_RANKS) or 1.0) > 1.0
    norm_name = "Gradient norm of its shard" if is_shard else "Gradient norm"
    cards = [
        _card("Loss", focus.status.loss, charts.sparkline(curves.loss, "Loss", number, stale=had_loss)),
        _card(norm_name, focus.grad_norm, charts.sparkline(curves.norm, norm_name, number, stale=had_norm)),
        _card("Step time", last_time, charts.sparkline(curves.time, "Step time", text_format.duration), text_format.duration),
    ]
    for name, curve in model.scalars.items():  # the script's own, since the run began
        chart = charts.sparkline(curve, name[:_LONGEST_NAME], number, stale=True)
        cards.append(_card(named(name[:_LONGEST_NAME]), focus.readings.get(SCALAR_VALUE, name), chart))
    return joined([tag("h2", "Rank ", named(focus.rank), " over its last steps"), tag("div", *cards, class_="cards")])


def _card(name: str, last: float | None, chart: Html, rounded: Callable[[float | None], str] = text_format.number) -> Html:
    """Return a card with a quantity's name, last value and curve."""
    return tag("div", tag("h3", name), tag("p", exact(rounded(last), last), class_="value"), chart, class_="card")


def _ranks(model: Model) -> Html:
    return joined([tag("h2", "Ranks"), rank_table.ranks(model)])


def _events(model: Model) -> Html:
    log = model.events
    if not log.lines:
        return joined([tag("h2", "Events"), tag("p", "None yet.", class_="none")])
    head = [heading_cell("when"), heading_cell("rank", "n"), heading_cell("step", "n"), heading_cell("what")]
    rows = [_event(model, line) for line in log.lines]
    if log.cause is not None and len(log.lines) > 1:
        rows.insert(0, _event(model, EventGroup(1, log.cause, log.cause), "First: "))
    caption = f"{len(log.lines):,}, the newest first, many of a kind as one, with this machine’s time"
    return joined([tag("h2", "Events"), table("Events", caption, head, rows)])


def _event(model: Model, line: EventGroup, before: str = "") -> Html:
    event, first = line.last, line.first
    class_, symbol = LEVELS[event.severity]
    sign = EMPTY
    if event.severity is not Severity.INFO:
        sign = tag("span", f"{symbol} ", role="img", aria_label=f"{BADGES[event.severity]}: ")
    what: list[str] = [before, sign, tag("b", named(event.title))]
    if line.number > 1:
        in_step = "" if first.step is None else f" in step {text_format.count(first.step)}"
        what += [tag("span", f" ×{line.number:,}", class_="times"), " since ", _when(model.now_s, first.at_s)]
        what += [f"{in_step}, last:"]
    cells = [
        tag("td", _when(model.now_s, event.at_s)),
        number_cell(named(_who(event.ranks))),
        number_cell(text_format.count(event.step)),
        tag("td", *what, " ", tag("span", event.text), class_=f"what {class_}"),
    ]
    return tag("tr", *cells, class_="first" if before else None)


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
    head = [heading_cell("when"), heading_cell("rank", "n"), heading_cell("what"), heading_cell("size", "n")]
    rows = [
        tag("tr", tag("td", tag("time", one.time[:19].replace("T", " "), datetime=one.time)),
            number_cell(named(one.rank)),
            tag("td", tag("a", one.kind.replace("_", " "), href=f".{one.href}")),
            number_cell(exact(text_format.size(one.size_bytes), one.size_bytes)))
        for one in model.evidence
    ]  # fmt: skip
    return joined([tag("h2", "Evidence"), table("Evidence", f"{len(rows):,}, the newest first, in UTC", head, rows)])


def _when(now_s: float, at_s: float) -> Html:
    moment = time.localtime(at_s)
    iso = time.strftime("%Y-%m-%dT%H:%M:%S%z", moment)
    ago_s = now_s - at_s
    local = time.strftime("%H:%M:%S" if ago_s < 43_200 else "%Y-%m-%d %H:%M", moment)  # noqa: PLR2004  # half a day
    return tag("time", local, datetime=iso)


def _layers(model: Model) -> Html:
    if not model.layers or model.focus is None:
        return EMPTY
    sort = model.choice.layers
    columns = [name for name in LAYERS if any(name in layer.values for layer in model.layers)]

    def heading(name: str, words: str, class_: str, order: str) -> Html:
        sorting = link(model.choice._replace(layers=name), words, "layers")
        return heading_cell(sorting, class_, order if name == sort else None)

    head = [
        heading("name", "layer", "", "ascending"),
        *(heading(name, LAYERS[name][1], "n", "descending") for name in columns),
    ]
    rows = []
    for layer in model.layers:
        values = [layer.values.get(name) for name in columns]
        cells = [number_cell(exact(text_format.number(value), value)) for value in values]
        rows.append(tag("tr", tag("th", named(layer.name), scope="row"), *cells))
    order = {"model": "largest layers as the model has them", "name": "by name"}.get(sort, "the highest first")
    return joined([tag("h2", "Layers"), table("Layers", f"Of rank {model.focus.rank}, {order}", head, rows)])


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
