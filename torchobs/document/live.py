"""The live page: what it shows for one choice of a viewer, and its sections as HTML.

Sections are rendered separately, so that only changed ones are sent to viewers.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlencode

from torchobs import catalog
from torchobs._version import __version__
from torchobs.catalog import PHASES, Severity
from torchobs.catalog.findings import BADGES
from torchobs.detect.hangs import PATIENT_PHASES
from torchobs.diagnosis.health import Health, health, last_step
from torchobs.document import charts, html, sections
from torchobs.document.event_log import EventGroup, log_of, rows_of
from torchobs.document.markup import EMPTY, Html, definitions, exact, heading_cell, joined, named, number_cell, table, tag, text
from torchobs.document.run import figures
from torchobs.ranks.live import LAYERS, key_of
from torchobs.ranks.rank_file import DIGITS
from torchobs.ranks.rank_view import SORTS, descending, ordered
from torchobs.ranks.snapshot import grouped
from torchobs.support import text as text_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchobs.ranks.rank_view import RankView, RunView
    from torchobs.ranks.snapshot import Rank

PER_PAGE = 50
MOST_EVIDENCE = 50
LAYER_SORTS = ("model", "name", *LAYERS)
STREAM_PATH, STYLE_PATH, SCRIPT_PATH = "/live/stream", "/live/live.css", "/live/live.js"
LEVELS = {Severity.INFO: ("good", "✓"), Severity.WARNING: ("notice", "▲"), Severity.ERROR: ("bad", "✕")}
"""CSS class and symbol"""
SYMBOLS = {"alive": "●", "finished": "✓", "unresponsive": "▲", "hung": "▲", "failed": "✕", "lost": "✕"}
"""Symbols beside the state's name, so that its meaning does not depend on colour"""
_GOODPUT = frozenset({*catalog.GOODPUT_STATES, catalog.STARTUP})
_MOST_NAMED = 4
_LONGEST_NAME = 40
_MOST_QUERY = 16_000
"""Enough for the longest name of a run: it is from a header of 4 KiB, and each byte may take three in a query"""
_MOST_PAGE = 1000
_COLUMNS = (
    ("rank", "rank", "n"), ("state", "worst", ""), ("step", "step", "n"), ("step time", "time", "n"), ("phases", "", ""),
    ("slowdown", "", "n"), ("loss", "loss", "n"), ("gradient norm", "norm", "n"), ("memory", "memory", "n"),
    ("last step", "", "n"),
)  # fmt: skip
"""Heading, the sort order it links to, and its CSS class"""
NO_RANK = Health(
    Severity.INFO,
    "No rank has been seen yet. One appears as soon as a training calls torchobs.init().",
    "No rank has been seen yet.",
)
MISSING = Health(Severity.INFO, "No such run (any more). Once it is there it is shown here.", "No such run (any more).")
"""Health of a chosen run that does not exist"""

T = TypeVar("T")


class Choice(NamedTuple):
    """A viewer's choice of run, rank and sorting, from a query string; any part may be invalid."""

    run: str = ""
    """``job_name/run_id``; empty: the first run"""
    rank: str = ""
    """the rank with curves and details; invalid: the first rank"""
    sort: str = SORTS[0]
    page: int = 1
    layers: str = LAYER_SORTS[0]


def choice_of(query: str) -> Choice:
    """Return the choice in a query string. Invalid parts are ignored, never an error."""
    try:
        fields = parse_qs(query[:_MOST_QUERY], max_num_fields=16)
    except ValueError:
        return Choice()
    given = {name: fields[name][0] for name in ("run", "rank", "sort", "layers") if name in fields}
    page = fields.get("page", ["1"])[0]
    return Choice(**given, page=min(int(page), _MOST_PAGE) if page.isdecimal() and page.isascii() else 1)


def query_of(choice: Choice) -> str:
    """Return the query string for a choice; empty for the default one."""
    chosen = {name: str(value) for name, value in choice._asdict().items() if value != Choice._field_defaults[name]}
    return f"?{urlencode(chosen, errors='replace')}" if chosen else ""


def stream_of(choice: Choice) -> str:
    """Return the URL of the event stream for a choice."""
    return f".{STREAM_PATH}{query_of(choice)}"


def _link(choice: Choice, words: str, section: str, *, label: str | None = None, current: bool = False) -> Html:
    """Return a link to the page with another choice."""
    target = f"./{query_of(choice)}#{section}"
    return tag("a", words, href=target, aria_label=label, aria_current="true" if current else None)


def focused(ranks: Iterable[Rank], choice: Choice) -> str | None:
    """Return the incarnation of the chosen rank, which is shown with curves and details."""
    members = _chosen({key_of(run): run for run in grouped(ranks)}, choice) or []
    return next((rank.incarnation for rank in members if rank.rank == choice.rank), members[0].incarnation if members else None)


def _chosen(runs: Mapping[str, T], choice: Choice) -> T | None:
    """Return the chosen run (``runs``: by key). If the chosen one does not exist, no other is shown in its place."""
    return runs.get(choice.run) if choice.run else next(iter(runs.values()), None)


@dataclass(frozen=True, slots=True)
class Model:
    """The content of the page for one choice."""

    choice: Choice
    runs: tuple[RunView, ...]
    run: RunView | None
    """``None``: there is no run, or not the chosen one"""
    health: Health
    """of the run shown; failed other runs are mentioned, too"""
    focus: RankView | None
    ranks: tuple[RankView, ...]
    """those shown: one page of the sorted table"""
    pages: int
    evidence: tuple[Mapping[str, Any], ...]
    """as in the API, newest first; ``rank``: its label, for an earlier incarnation with that one's first digits behind it"""
    now_s: float
    """Unix time"""


def model(runs: tuple[RunView, ...], choice: Choice, evidence: Iterable[Mapping[str, Any]], now_s: float) -> Model:
    """Return the model for one viewer. ``evidence``: the API's list of artifacts, newest first; ``now_s``: Unix time."""
    run = _chosen({one.key: one for one in runs}, choice)
    ranks = run.ranks if run else ()
    focus = next((rank for rank in ranks if rank.rank == choice.rank), ranks[0] if ranks else None)
    pages = max(1, -(-len(ranks) // PER_PAGE))
    # without invalid parts, so that links do not repeat them; a run that does not exist may begin soon
    choice = Choice(
        run=run.key if run else choice.run,
        rank=choice.rank if focus is None or focus.rank == choice.rank else "",
        sort=choice.sort if choice.sort in SORTS else SORTS[0],
        page=min(max(choice.page, 1), pages) if run else max(choice.page, 1),
        layers=choice.layers if choice.layers in LAYER_SORTS else LAYER_SORTS[0],
    )
    first = (choice.page - 1) * PER_PAGE
    return Model(
        choice=choice,
        runs=runs,
        run=run,
        health=health_beside(run, runs) if run else MISSING if choice.run else NO_RANK,
        focus=focus,
        ranks=tuple(ordered(ranks, choice.sort)[first : first + PER_PAGE]),
        pages=pages,
        evidence=tuple(_evidence_of(run, evidence))[:MOST_EVIDENCE],
        now_s=now_s,
    )


def health_beside(run: RunView, runs: Iterable[RunView]) -> Health:
    """Return the health of a run among others: failed ones are mentioned, too."""
    own, failed = health(run), [other for other in runs if other is not run and health(other).level is Severity.ERROR]
    if not failed:
        return own
    names = f"{failed[0].job_name[:80]} {failed[0].run_id[:80]}" + (f" and {len(failed) - 1:,} more" * (len(failed) > 1))
    words = f"Another run here is in trouble: {names}."
    level = max(own.level, Severity.WARNING, key=lambda level: level.value)
    return Health(level, f"{own.text} {words}", f"{own.gist} {words}")


def _evidence_of(run: RunView | None, evidence: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the artifacts of a run's ranks, including earlier incarnations."""
    names = {rank.incarnation: rank.rank for rank in run.ranks} if run else {}
    for one in evidence:
        if one["incarnation"] in names or (run and (one["job_name"], one["run_id"]) == (run.job_name, run.run_id)):
            yield {**one, "rank": names.get(one["incarnation"], f"{one['rank']}-{one['incarnation'][:DIGITS]}")}


def page(model: Model, problems: Sequence[str], links: Sequence[tuple[str, str]]) -> Html:
    """Return the document. ``links``: the exporter's other pages, as (path, name)."""
    alerts = [tag("p", tag("strong", problem), role="alert", class_="problem") for problem in problems]
    parts = [
        tag("section", content, id=name, aria_label=PARTS[name][0], tabindex="-1" if name == "ranks" else None)
        for name, content in rendered(model).items()
    ]
    body = tag(
        "body",
        tag("a", "Skip to the ranks", href="#ranks", class_="skip"),
        _header(model, links),
        tag("main", *alerts, *parts),
        tag("footer", tag("p", f"torchobs {__version__}")),
        data_stream=stream_of(model.choice),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title(model)),
        tag("link", rel="icon", href="data:,"),
        tag("link", rel="stylesheet", href=f".{STYLE_PATH}"),
        tag("script", src=f".{SCRIPT_PATH}", defer=True),
    )
    return Html(f"<!doctype html>\n{tag('html', head, body, lang='en')}\n")


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


def _run(run: RunView, *, chosen: bool) -> Html:
    """Return a line of the list of runs, which begins with how the run is."""
    how = health(run)
    class_, symbol = LEVELS[how.level]
    sign = tag("span", symbol, class_="sign", role="img", aria_label=f"{BADGES[how.level]}:")
    name = _link(Choice(run=run.key), run.job_name, "health", current=chosen)
    return tag("li", sign, " ", name, " ", named(run.run_id), " ", tag("span", how.text, class_="quiet"), class_=class_)


def _figures(model: Model) -> Html:
    return EMPTY if model.run is None or model.focus is None else html.figures(figures(model.focus, model.run))


def _curves(model: Model) -> Html:
    focus = model.focus
    if focus is None:
        return EMPTY
    number = text_format.number
    had_loss, had_norm = (bool(focus.steps) and focus.value(one) is not None for one in (catalog.LOSS, catalog.GRAD_NORM))
    norm_name = "Gradient norm of its shard" if (focus.value(catalog.GRAD_NORM_RANKS) or 1.0) > 1.0 else "Gradient norm"
    times = charts.curve([(one.step, one.duration_s) for one in focus.steps if one.duration_s is not None])
    cards = [
        _card("Loss", focus.loss, charts.sparkline(charts.curve(focus.losses.items()), "Loss", number, stale=had_loss)),
        _card(
            norm_name,
            focus.grad_norm,
            charts.sparkline(charts.curve(focus.norms.items()), norm_name, number, stale=had_norm),
        ),
        _card(
            "Step time",
            times.last if times else None,
            charts.sparkline(times, "Step time", text_format.duration),
            text_format.duration,
        ),
    ]
    for name, points in focus.events.scalars.items():  # the script's own, since the run began
        chart = charts.sparkline(charts.curve(points), name[:_LONGEST_NAME], number, stale=True)
        cards.append(_card(named(name[:_LONGEST_NAME]), focus.value(catalog.SCALAR_VALUE, name), chart))
    return joined([tag("h2", "Rank ", named(focus.rank), " over its last steps"), tag("div", *cards, class_="cards")])


def _card(name: str, last: float | None, chart: Html, rounded: Callable[[float | None], str] = text_format.number) -> Html:
    """Return a card with a quantity's name, last value and curve."""
    return tag("div", tag("h3", name), tag("p", exact(rounded(last), last), class_="value"), chart, class_="card")


def _ranks(model: Model) -> Html:
    if model.run is None:
        return joined([tag("h2", "Ranks"), tag("p", "None yet.", class_="none")])
    head = [_heading(model, *column) for column in _COLUMNS]
    body = [_row(model, rank) for rank in model.ranks]
    foot = [_summary_row(model.run.ranks)] if len(model.run.ranks) > 1 else []
    keys = (tag("span", charts.stacked([(phase, 1.0)]), phase, class_="key") for phase in PHASES)
    legend = tag("p", "Phases: ", joined(keys, " "), class_="legend")
    listed = table("Ranks", _caption(model, len(model.run.ranks)), head, body, foot)
    return joined([tag("h2", "Ranks"), listed, legend, _pager(model)])


def _heading(model: Model, words: str, sort: str, class_: str) -> Html:
    content = _link(model.choice._replace(sort=sort, page=1), words, "ranks") if sort else tag("span", words)
    order = "ascending" if sort in {"rank", "step"} else "descending"
    return heading_cell(content, class_, order if sort == model.choice.sort else None)


def _caption(model: Model, count: int) -> str:
    order = {"worst": "the worst first", "rank": "in their order", "step": "the least advanced first"}
    first = (model.choice.page - 1) * PER_PAGE
    numbers = f"{count:,}" if model.pages == 1 else f"{first + 1:,}–{first + len(model.ranks):,} of {count:,}"
    return f"{numbers} on this node, {order.get(model.choice.sort, 'the highest first')}"


def _row(model: Model, rank: RankView) -> Html:
    chosen, pace = rank is model.focus, rank.pace
    words = _link(model.choice._replace(rank=rank.rank), rank.rank, "curves", label=f"Show rank {rank.rank}", current=chosen)
    slow = rank.slowness
    limit = f" ({rank.memory_limit})" if rank.memory_limit and rank.memory is not None else ""
    cells = [
        tag("td", _state(rank)),
        _number(text_format.count, rank.done if rank.value(catalog.STEPS) is not None else None),
        _number(text_format.duration, pace.step_s if pace else None),
        tag("td", charts.phases(pace.shares) if pace else text_format.NONE, class_="phases"),
        tag("td", _slowdown(rank), class_="n slow" if slow and slow.is_slow else "n"),
        _number(text_format.number, rank.loss),
        _number(text_format.number, rank.grad_norm),
        number_cell(joined([exact(text_format.size(rank.memory), rank.memory), limit])),
        number_cell(last_step(rank)),
    ]
    return tag("tr", tag("th", words, scope="row", class_="n"), *cells, class_="chosen" if chosen else None)


def _state(status: RankView) -> Html:
    """Return the state with its symbol, how the rank ended, and its active anomalies."""
    symbol = tag("span", SYMBOLS.get(status.state, "●"), aria_hidden="true")
    details = [status.exception or status.reason.replace("_", " ")] if status.reason not in {"", status.state} else []
    details += [status.phase] if status.up and status.phase in PATIENT_PHASES else []
    details += [kind.replace("_", " ") for kind in status.anomalies]
    state = tag("span", symbol, " ", status.state, class_=f"state {status.state}")
    return joined([state, " ", tag("span", ", ".join(details), class_="why")]) if details else state


def _number(rounded: Callable[[float | None], str], value: float | None) -> Html:
    return number_cell(exact(rounded(value), value))


def _slowdown(status: RankView) -> Html:
    slow = status.slowness
    if slow is None or not status.up:
        return tag("span", text_format.NONE)
    words = exact(f"{slow.factor:.2f}×", slow.factor)
    return joined([words, f" {PHASES[slow.phase]}"]) if slow.is_slow else words


def _summary_row(ranks: Sequence[RankView]) -> Html:
    """Return the number of ranks by state, and the range of each value."""
    counts = Counter(rank.state for rank in ranks)
    states = ", ".join(f"{counts[name]:,} {name}" for name in catalog.RANK_STATES if counts[name])
    paces = [rank.pace for rank in ranks if rank.pace]
    mean = [sum(column) / len(paces) for column in zip(*(pace.shares for pace in paces), strict=True)]
    memory = [size for rank in ranks if (size := rank.memory) is not None]
    cells = [
        tag("td", states),
        number_cell(_range(text_format.count, [rank.done for rank in ranks])),
        number_cell(text_format.duration(median(pace.step_s for pace in paces) if paces else None)),
        tag("td", charts.phases(mean) if mean else text_format.NONE, class_="phases"),
        tag("td", ""),
        number_cell(_range(text_format.number, [rank.loss for rank in ranks])),
        number_cell(_range(text_format.number, [rank.grad_norm for rank in ranks])),
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


def _pager(model: Model) -> Html:
    if model.pages == 1:
        return EMPTY
    at = model.choice.page
    wanted = sorted({1, 2, at - 1, at, at + 1, model.pages - 1, model.pages} & set(range(1, model.pages + 1)))
    links = [
        _link(model.choice._replace(page=number), f"{number:,}", "ranks", label=f"Page {number:,}", current=number == at)
        for number in wanted
    ]
    return tag("nav", joined(links, " "), aria_label="Pages of ranks", class_="pager")


def _details(model: Model) -> Html:
    """Return the chosen rank's panels, without empty ones."""
    focus = model.focus
    if focus is None:
        return EMPTY
    tables = {
        "Memory": sections.memory_table(focus),
        "Mixed precision": sections.precision_table(focus),
        "torch.compile": sections.compile_table(focus),
        "Checkpoints and gradients": sections.checkpoint_table(focus, model.now_s),
    }
    panels = {"Where the time since the start went": _goodput(focus)}
    panels |= {name: definitions((what, value) for what, value in one.rows) for name, one in tables.items() if one is not None}
    cards = [tag("div", tag("h3", name), content, class_="card") for name, content in panels.items() if content]
    return joined([tag("h2", "Rank ", named(focus.rank), " in detail"), tag("div", *cards, class_="cards")])


def _goodput(rank: RankView) -> Html:
    times = {key[0]: value for key, value in rank.of(catalog.GOODPUT_TIME).items() if key and value > 0}
    whole = sum(times.values())
    if not whole:
        return EMPTY
    order = sorted(times, key=lambda name: -times[name])
    bar = charts.stacked([(f"goodput-{name}", times[name] / whole) for name in order if name in _GOODPUT])
    lines = [
        (name, joined([charts.stacked([(f"goodput-{name}", 1.0)]) if name in _GOODPUT else EMPTY,
                       exact(text_format.duration(times[name]), times[name]),
                       f" ({text_format.percent(times[name] / whole)})"]))
        for name in order
    ]  # fmt: skip
    return joined([bar, definitions(lines, "keyed")])


def _events(model: Model) -> Html:
    log = log_of(rows_of(rank.rank, rank.events) for rank in (model.run.ranks if model.run else ()))
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


def _when(now_s: float, at_s: float) -> Html:
    moment = time.localtime(at_s)
    local = time.strftime("%H:%M:%S" if now_s - at_s < 43_200 else "%Y-%m-%d %H:%M", moment)  # noqa: PLR2004  # half a day
    return tag("time", local, datetime=time.strftime("%Y-%m-%dT%H:%M:%S%z", moment))


def _evidence(model: Model) -> Html:
    """Return the list of the ranks' artifacts, if there are any."""
    if not model.evidence:
        return EMPTY
    head = [heading_cell("when"), heading_cell("rank", "n"), heading_cell("what"), heading_cell("size", "n")]
    rows = [
        tag("tr", tag("td", tag("time", one["time"][:19].replace("T", " "), datetime=one["time"])),
            number_cell(named(one["rank"])),
            tag("td", tag("a", one["kind"].replace("_", " "), href=f".{one['href']}")),
            number_cell(exact(text_format.size(one["size_bytes"]), one["size_bytes"])))
        for one in model.evidence
    ]  # fmt: skip
    return joined([tag("h2", "Evidence"), table("Evidence", f"{len(rows):,}, the newest first, in UTC", head, rows)])


def _layers(model: Model) -> Html:
    values: dict[str, dict[str, float]] = {}
    for column, (metric, _) in LAYERS.items():
        for key, value in model.focus.of(metric).items() if model.focus else ():
            values.setdefault(key[0] if key else "", {})[column] = value
    if not values or model.focus is None:
        return EMPTY
    sort, columns = model.choice.layers, [name for name in LAYERS if any(name in row for row in values.values())]
    rows = list(values.items())
    if sort != "model":
        rows.sort(key=(lambda row: row[0]) if sort == "name" else (lambda row: descending(row[1].get(sort))))
    head = []
    for name, words, class_ in (("name", "layer", ""), *((name, LAYERS[name][1], "n") for name in columns)):
        order = "ascending" if name == "name" else "descending"
        content = _link(model.choice._replace(layers=name), words, "layers")
        head.append(heading_cell(content, class_, order if name == sort else None))
    body = [
        tag("tr", tag("th", named(name), scope="row"), *(_number(text_format.number, row.get(column)) for column in columns))
        for name, row in rows
    ]
    order = {"model": "largest layers as the model has them", "name": "by name"}.get(sort, "the highest first")
    return joined([tag("h2", "Layers"), table("Layers", f"Of rank {model.focus.rank}, {order}", head, body)])


PARTS: dict[str, tuple[str, Callable[[Model], Html]]] = {
    "health": ("Health", _health),
    "runs": ("Runs", _runs),
    "figures": ("Key figures", _figures),
    "curves": ("Curves", _curves),
    "ranks": ("Ranks", _ranks),
    "details": ("Details", _details),
    "events": ("Events", _events),
    "evidence": ("Evidence", _evidence),
    "layers": ("Layers", _layers),
}
"""By ``id``: the section's name for screen readers, and the function that renders it"""
