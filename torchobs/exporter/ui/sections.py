"""The live page as HTML: the document, and its sections from health to layers.

Sections are rendered separately, so that only changed ones are sent to viewers.
"""

from __future__ import annotations

import time
from collections import Counter
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs._version import __version__
from torchobs.catalog import GRAD_NORM, GRAD_NORM_RANKS, LOSS, PHASES, SCALAR_VALUE, Severity
from torchobs.detect.hangs import PATIENT_PHASES
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import BADGES, last_step
from torchobs.document import charts
from torchobs.document.markup import EMPTY, Html, definitions, exact, heading_cell, joined, named, number_cell, table, tag, text
from torchobs.exporter.ui.view_model import LAYERS, PER_PAGE, WHOLES, Choice, EventGroup, link, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torchobs.catalog import Metric
    from torchobs.diagnosis.status import RankStatus
    from torchobs.exporter.ui.view_model import Model, Row, Run
    from torchobs.ranks.snapshot import Readings


Line = tuple[str, Html]
"""A term and its value"""


def key_figures(model: Model) -> Html:
    """Return the row of key figures below the health summary."""
    if model.run is None or model.focus is None:
        return EMPTY
    figures = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", more, class_="more") if more else EMPTY)
        for name, value, more in _key_lines(model, model.focus)
    ]
    return tag("dl", *figures, class_="figures")


def _key_lines(model: Model, focus: Row) -> Iterator[tuple[str, Html, Html]]:
    total, steps = model.total_steps, model.run.status.steps if model.run else 0
    bar = (
        joined([charts.meter(steps / total), f"{text_format.percent(min(steps / total, 1.0))} of {total:,}"])
        if total
        else EMPTY
    )
    yield "Step", exact(f"{steps:,}", steps), bar
    if model.left_s is not None:
        aside = any(focus.readings.get(catalog.GOODPUT_TIME, state) for state in ("evaluation", "checkpoint"))
        speed = "with evaluations and checkpoints as so far" if aside else "at the present speed"
        yield "Time left", tag("span", text_format.span(model.left_s)), tag("span", speed)
    yield from _speed(focus)
    goodput = focus.readings.of(catalog.GOODPUT_TIME)
    if sum(goodput.values()):
        productive = goodput.get(("productive",), 0.0) / sum(goodput.values())
        yield "Goodput", exact(text_format.percent(productive), productive), tag("span", "of the time since the start")
    yield from _rate(focus.readings)
    share = focus.readings.get(catalog.MFU)
    if share is not None and focus.status.standstill is None:
        yield "MFU", exact(text_format.percent(share), share), tag("span", "of the devices' peak, by the model's operations")


def _speed(focus: Row) -> Iterator[tuple[str, Html, Html]]:
    pace, still = focus.speed, focus.status.standstill
    if still is not None:
        yield "Speed", text("–"), tag("span", f"no step for {text_format.span(still.seconds)}")
    if pace is None:
        return
    work = ((pace.tokens_per_s, "tokens"), (pace.samples_per_s, "samples"))
    parts = [joined([exact(text_format.rate(value, what), value), " on this rank, over its "]) for value, what in work if value]
    over = tag("span", f"{'' if parts else 'over its '}last {pace.steps:,} steps ({text_format.duration(pace.window_s)})")
    yield "Speed", exact(text_format.rate(pace.per_s, "steps"), pace.per_s), joined([*parts[:1], over])


def _rate(readings: Readings) -> Iterator[tuple[str, Html, Html]]:
    rates = readings.of(catalog.LEARNING_RATE)
    if rates:
        first = rates.get(("0",), next(iter(rates.values())))
        groups = f"first of {len(rates)} groups" if len(rates) > 1 else ""
        yield "Learning rate", exact(text_format.number(first), first), tag("span", groups)


def details(model: Model) -> Html:
    """Return the chosen rank's panels, without empty ones."""
    focus = model.focus
    if focus is None:
        return EMPTY
    panels = {
        "Where the time since the start went": _goodput(focus.readings),
        "Memory": definitions(_memory(focus.readings)),
        "Mixed precision": definitions(_amp(focus.readings)),
        "torch.compile": definitions(_compile(focus.readings)),
        "Checkpoints and gradients": definitions(_checkpoints(focus.readings, model.now_s)),
    }
    cards = [tag("div", tag("h3", name), content, class_="card") for name, content in panels.items() if content]
    return joined([tag("h2", "Rank ", named(focus.rank), " in detail"), tag("div", *cards, class_="cards")])


def _goodput(readings: Readings) -> Html:
    times = {key[0]: value for key, value in readings.of(catalog.GOODPUT_TIME).items() if key and value > 0}
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


_GOODPUT = frozenset({*catalog.GOODPUT_STATES, catalog.STARTUP})


def _memory(readings: Readings) -> Iterator[Line]:
    limits = readings.of(catalog.MEMORY_DEVICE_LIMIT)
    for device, reserved in readings.of(catalog.MEMORY_DEVICE_RESERVED).items():
        yield f"{device[0]} reserved", _of(reserved, limits.get(device))
        for word, metric in (("in use", catalog.MEMORY_DEVICE_ALLOCATED), ("peak", catalog.MEMORY_DEVICE_PEAK)):
            value = readings.get(metric, *device)
            if value is not None:
                yield f"{device[0]} {word}", exact(text_format.size(value), value)
    for word, metric in (("process", catalog.MEMORY_HOST_RSS), ("its workers", catalog.MEMORY_HOST_CHILDREN_RSS)):
        value = readings.get(metric)
        if value:
            yield word, exact(text_format.size(value), value)
    working_set = readings.get(catalog.CGROUP_MEMORY_WORKING_SET)
    if working_set is not None:
        yield "container", _of(working_set, readings.get(catalog.CGROUP_MEMORY_LIMIT))
    for (limit,), part in readings.of(catalog.MEMORY_HOST_UTILIZATION).items():
        yield f"{WHOLES.get(limit, limit)} full", joined([charts.meter(part), exact(text_format.percent(part), part)])
    for (space,), left_s in readings.of(catalog.MEMORY_TIME_TO_LIMIT).items():
        yield f"{space} memory full in", exact(text_format.span(left_s), left_s)


def _of(value: float, limit: float | None) -> Html:
    used = exact(text_format.size(value), value)
    return joined([charts.meter(value / limit), used, " of ", exact(text_format.size(limit), limit)]) if limit else used


def _amp(readings: Readings) -> Iterator[Line]:
    kinds = [f"{dtype} on {device}" for device, dtype in readings.of(catalog.AMP_AUTOCAST)]
    if kinds:
        yield "autocast", tag("span", ", ".join(kinds))
    scales = readings.of(catalog.AMP_SCALE)
    for (scaler,), scale in scales.items():
        yield "loss scale" if len(scales) == 1 else f"loss scale {scaler}", exact(text_format.number(scale), scale)
    if scales:
        yield from _counts(readings, (("steps skipped", catalog.AMP_STEPS_SKIPPED), ("in a row now", catalog.AMP_SKIP_STREAK)))


def _compile(readings: Readings) -> Iterator[Line]:
    times = sum(readings.of(catalog.COMPILE_TIME).values())
    if not times and not readings.get(catalog.COMPILE_IN_PROGRESS):
        return
    yield "now", tag("span", "compiling" if readings.get(catalog.COMPILE_IN_PROGRESS) else "idle")
    yield "time spent", exact(text_format.duration(times), times)
    first, again = (int(readings.get(catalog.COMPILE_COMPILATIONS, cause) or 0) for cause in ("first", "recompile"))
    yield "compilations", tag("span", f"{first:,}, and {again:,} again")
    breaks = sum(readings.of(catalog.COMPILE_GRAPH_BREAKS).values())
    failures = sum(readings.of(catalog.COMPILE_FAILURES).values())
    yield "graph breaks", exact(text_format.count(breaks), breaks)
    if failures:
        yield "given up", exact(text_format.count(failures), failures)
    hits = sum(value for (_, result), value in readings.of(catalog.COMPILE_CACHE_LOOKUPS).items() if result == "hit")
    lookups = sum(readings.of(catalog.COMPILE_CACHE_LOOKUPS).values())
    if lookups:
        yield "cache hits", tag("span", f"{text_format.count(hits)} of {text_format.count(lookups)}")


def _checkpoints(readings: Readings, now_s: float) -> Iterator[Line]:
    saved, failed = readings.get(catalog.CHECKPOINTS, "saved"), readings.get(catalog.CHECKPOINTS, "failed")
    if saved or failed:
        failures = f", {text_format.count(failed)} failed" if failed else ""
        yield "checkpoints", joined([exact(text_format.count(saved), saved), failures])
    at_s, size = readings.get(catalog.CHECKPOINT_TIMESTAMP), readings.get(catalog.CHECKPOINT_SIZE)
    if at_s:
        yield "last one", tag("span", f"{text_format.span(now_s - at_s)} ago" + (f", {text_format.size(size)}" if size else ""))
    yield from _counts(readings, (("steps clipped", catalog.GRAD_CLIPPED_STEPS), ("not finite", catalog.GRAD_NONFINITE_STEPS)))
    for (kind,), value in readings.of(catalog.ANOMALIES).items():
        if value:
            yield kind.replace("_", " "), exact(f"{text_format.count(value)} so far", value)


def _counts(readings: Readings, wanted: Sequence[tuple[str, Metric]]) -> Iterator[Line]:
    for word, metric in wanted:
        value = readings.get(metric)
        if value is not None:
            yield word, exact(text_format.count(value), value)


_COLUMNS = (
    ("rank", "rank", "n"), ("state", "worst", ""), ("step", "step", "n"), ("step time", "time", "n"), ("phases", "", ""),
    ("slowdown", "", "n"), ("loss", "loss", "n"), ("gradient norm", "norm", "n"), ("memory", "memory", "n"),
    ("last step", "", "n"),
)  # fmt: skip
"""Heading, the sort order it links to, and its CSS class"""

SYMBOLS = {"alive": "●", "finished": "✓", "unresponsive": "▲", "hung": "▲", "failed": "✕", "lost": "✕"}
"""Symbols beside the state's name, so that its meaning does not depend on colour"""


def _ranks(model: Model) -> Html:
    if model.run is None:
        return joined([tag("h2", "Ranks"), tag("p", "None yet.", class_="none")])
    head = [_heading(model, *column) for column in _COLUMNS]
    body = [_row(model, row) for row in model.rows]
    foot = [_summary_row(model.run.rows)] if len(model.run.rows) > 1 else []
    caption = _caption(model, len(model.run.rows))
    keys = (tag("span", charts.stacked([(phase, 1.0)]), phase, class_="key") for phase in PHASES)
    legend = tag("p", "Phases: ", joined(keys, " "), class_="legend")
    return joined([tag("h2", "Ranks"), table("Ranks", caption, head, body, foot), legend, _pager(model)])


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
    limit = f" ({row.memory_limit})" if row.memory_limit and row.memory is not None else ""
    cells = [
        tag("td", _state(row.status)),
        _number(text_format.count, step),
        _number(text_format.duration, row.pace.step_s if row.pace else None),
        tag("td", charts.phases(row.pace.shares) if row.pace else text_format.NONE, class_="phases"),
        tag("td", _slowdown(row.status), class_="n slow" if slow and slow.is_slow else "n"),
        _number(text_format.number, row.status.loss),
        _number(text_format.number, row.grad_norm),
        number_cell(joined([exact(text_format.size(row.memory), row.memory), limit])),
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
        tag("tr", tag("td", tag("time", one["time"][:19].replace("T", " "), datetime=one["time"])),
            number_cell(named(one["rank"])),
            tag("td", tag("a", one["kind"].replace("_", " "), href=f".{one['href']}")),
            number_cell(exact(text_format.size(one["size_bytes"]), one["size_bytes"])))
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
    columns = [name for name in LAYERS if any(name in values for _, values in model.layers)]

    def heading(name: str, words: str, class_: str, order: str) -> Html:
        sorting = link(model.choice._replace(layers=name), words, "layers")
        return heading_cell(sorting, class_, order if name == sort else None)

    head = [
        heading("name", "layer", "", "ascending"),
        *(heading(name, LAYERS[name][1], "n", "descending") for name in columns),
    ]
    rows = []
    for name, by_column in model.layers:
        values = [by_column.get(column) for column in columns]
        cells = [number_cell(exact(text_format.number(value), value)) for value in values]
        rows.append(tag("tr", tag("th", named(name), scope="row"), *cells))
    order = {"model": "largest layers as the model has them", "name": "by name"}.get(sort, "the highest first")
    return joined([tag("h2", "Layers"), table("Layers", f"Of rank {model.focus.rank}, {order}", head, rows)])


PARTS: dict[str, tuple[str, Callable[[Model], Html]]] = {
    "health": ("Health", _health),
    "runs": ("Runs", _runs),
    "figures": ("Key figures", key_figures),
    "curves": ("Curves", _curves),
    "ranks": ("Ranks", _ranks),
    "details": ("Details", details),
    "events": ("Events", _events),
    "evidence": ("Evidence", _evidence),
    "layers": ("Layers", _layers),
}
"""By ``id``: the section's name for screen readers, and the function that renders it"""
