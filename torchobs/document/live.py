"""Living runs as documents: for the live page with a viewer's choice, and for ``top``. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from torchobs import catalog
from torchobs._version import __version__
from torchobs.catalog import PHASES, Severity
from torchobs.catalog.findings import BADGES, finding
from torchobs.detect.hangs import PATIENT_PHASES
from torchobs.detect.speed import LEAST_STEPS
from torchobs.diagnosis.from_events import remembered
from torchobs.diagnosis.health import Health, health, last_step
from torchobs.document import sections
from torchobs.document.blocks import Cell, Document, Figure, Figures, Item, Items, Link, Table, Text, section
from torchobs.document.event_log import EventGroup, log_of, rows_of
from torchobs.ranks.live import LAYERS
from torchobs.ranks.rank_file import DIGITS
from torchobs.ranks.rank_view import SORTS, descending, ordered
from torchobs.support import text as text_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchobs.document.blocks import Section
    from torchobs.flight.throughput import Throughput
    from torchobs.ranks.rank_view import RankView, RunView

PER_PAGE = 50
MOST_EVIDENCE = 50
LAYER_SORTS = ("model", "name", *LAYERS)
NO_RANK = Health(
    Severity.INFO,
    "No rank has been seen yet. One appears as soon as a training calls torchobs.init().",
    "No rank has been seen yet.",
)
MISSING = Health(Severity.INFO, "No such run (any more). Once it is there it is shown here.", "No such run (any more).")
"""Health of a chosen run that does not exist"""
WAITING = "wait"
"""Severity of the badge while there is no run"""
_SCREEN_HEAD = (
    "rank", "state", "step", "steps/s", "last step", "loss", "grad norm", "slow", "memory", "anomalies", "tokens/s",
    "samples/s", "MFU", "data", "fwd", "bwd", "opt", "other", "between",
)  # fmt: skip
_ORDERS = {"rank": "ascending", "step": "ascending", "name": "ascending"}
"""Order of columns that are not sorted with the highest value first"""
_MOST_NAMED = 4
_MOST_CURVES = 7
_HALF_A_DAY_S = 43_200

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

    @property
    def query(self) -> str:
        """The query string; empty for the default choice."""
        chosen = {name: str(value) for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return f"?{urlencode(chosen, errors='replace')}" if chosen else ""

    def link(self, section: str, label: str = "", *, current: bool = False, **changed: str | int) -> Link:
        """Return a link to a section of the page with this choice, or a changed one."""
        return Link(f"./{self._replace(**changed).query}#{section}", label, current)  # type: ignore[arg-type]  # its fields


@dataclass(frozen=True, slots=True)
class Model:
    """The content of the page for one choice."""

    choice: Choice
    runs: tuple[RunView, ...]
    run: RunView | None
    """``None``: there is no run, or not the chosen one"""
    focus: RankView | None
    ranks: tuple[RankView, ...]
    """ranks shown: one page of the sorted table"""
    pages: int
    evidence: Sequence[Any]
    """of all runs, as in the API, newest first"""
    now_s: float
    """Unix time"""


def chosen_run(runs: Mapping[str, T], choice: Choice) -> T | None:
    """Return the chosen run (``runs``: by key). If the chosen one does not exist, no other is shown in its place."""
    return runs.get(choice.run) if choice.run else next(iter(runs.values()), None)


def model(runs: tuple[RunView, ...], choice: Choice, evidence: Sequence[Any], now_s: float) -> Model:
    """Return the model for one viewer. ``evidence``: the API's list of artifacts, newest first; ``now_s``: Unix time."""
    run = chosen_run({view.key: view for view in runs}, choice)
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
    shown = tuple(ordered(ranks, choice.sort)[first : first + PER_PAGE])
    return Model(choice, runs, run, focus, shown, pages, evidence, now_s)


def health_beside(run: RunView, runs: Iterable[RunView]) -> Health:
    """Return the health of a run among others: failed ones are mentioned, too."""
    verdict, failed = health(run), [other for other in runs if other is not run and health(other).level is Severity.ERROR]
    if not failed:
        return verdict
    name = f"{failed[0].job_name[:80]} {failed[0].run_id[:80]}"
    other = finding("other_run", name=name, more=len(failed) - 1 or None)
    level = max(verdict.level, Severity.WARNING, key=lambda level: level.value)
    return verdict._replace(
        level=level, badge=BADGES[level], text=f"{verdict.text} {other.short}", gist=f"{verdict.gist} {other.short}",
        findings=(*verdict.findings, other),
    )  # fmt: skip


# -- documents ---------------------------------------------------------------------------------------------------------------


def page_document(shown: Model) -> Document:
    """Return the live page; sections without content are left out."""
    run, focus = shown.run, shown.focus
    how = health_beside(run, shown.runs) if run else MISSING if shown.choice.run else NO_RANK
    parts = [_runs(shown)]
    if run is None or focus is None:
        parts += [section("ranks", "Ranks", Text("None yet.", "note"))]
    else:
        of = f"Rank {focus.rank}"
        parts += [
            section("figures", "", figures(focus, run)),
            section("curves", f"{of} over its last steps", *sections.curves(focus), cards=True),
            section("ranks", "Ranks", _rank_table(shown, run)),
            section(
                "details", f"{of} in detail", sections.goodput(focus), sections.epoch_table(focus),
                sections.memory_table(focus), sections.precision_table(focus), sections.compile_table(focus),
                sections.checkpoint_table(focus), cards=True,
            ),
        ]  # fmt: skip
    parts += [section("events", "Events", _events(shown)), section("evidence", "Evidence", _evidence(shown))]
    parts += [section("layers", "Layers", _layers(shown))]
    return Document(
        title=run.job_name if run else shown.choice.run or "torchobs exporter",
        subtitle=run.run_id if run else "",
        badge=(how.level.name.lower(), how.badge) if run else (WAITING, "Waiting"),
        headline=how.text,
        sections=tuple(part for part in parts if part.blocks),
        footer=(f"torchobs {__version__}",),
        gist=how.gist,
    )


def screen_document(run: RunView, *, crowded: bool = False) -> Document:
    """Return a run as ``top`` shows it. ``crowded``: without curves, the ranks in trouble first."""
    how = health(run)
    quiet, said_anyway = how.level is Severity.INFO, {"between", "ranks_wait"}
    words = [
        finding.long if finding.kind in {"progress", "between"} else finding.short
        for finding in how.findings
        if not quiet or finding.kind in said_anyway
    ]
    states = Counter(rank.state for rank in run.ranks)
    done = ""
    if run.total_steps:
        left = "" if run.left_s is None else f", {text_format.duration(run.left_s)} left"
        done = f"step {run.steps:,} of {run.total_steps:,}{left}"
    count = ", ".join(f"{count} {state}" for state, count in states.items())
    ranks = ordered(run.ranks, "worst" if crowded else "rank")
    drawn = [chart for chart in sections.curves(run.ranks[0]) if chart.series]
    return Document(
        title=text_format.clean(run.job_name),
        subtitle=" · ".join(filter(None, (text_format.clean(run.run_id), count, done))),
        badge=(how.level.name.lower(), how.badge),
        headline=text_format.clean(" ".join(words), 10_000),
        sections=(
            section("curves", "", *([] if crowded else drawn[:_MOST_CURVES])),
            section("ranks", "", Table("", _SCREEN_HEAD, tuple(map(_screen_row, ranks)), frozenset({1, 9}))),
        ),
    )


def _runs(shown: Model) -> Section:
    """Return the list of runs to choose from, if there are others than the one shown; each begins with its health."""
    items = [
        Item(
            health(run).level.name.lower(),
            health(run).text,
            run=Cell(run.job_name, run.run_id, link=Choice(run=run.key).link("health", current=run is shown.run)),
        )
        for run in shown.runs
    ]
    return section("runs", "Runs", *([Items(tuple(items))] if any(run is not shown.run for run in shown.runs) else []))


def figures(rank: RankView, run: RunView) -> Figures:
    """Return the key figures of a run, by the rank that is shown in full."""
    still, total = rank.standstill, run.total_steps
    goodput, rates = rank.by_attribute(catalog.GOODPUT_TIME), rank.values(catalog.LEARNING_RATE)
    whole, done = sum(goodput.values()), f"{text_format.percent(min(run.steps / total, 1.0))} of {total:,}, " if total else ""
    productive = goodput.get("productive", 0.0) / whole if whole and run.steps else None
    rate = rates.get(("0",), next(iter(rates.values()), None))
    peaks = [size for size in rank.by_attribute(catalog.MEMORY_DEVICE_PEAK).values() if size]
    rss = [value for _, value in rank.history.curves(catalog.MEMORY_HOST_RSS.name).get("", [])]
    pace, share = rank.speed if rank.up else rank.pace, rank.value(catalog.MFU)
    subject = f"of rank {rank.rank}’s" if len(run.ranks) > 1 else "of the"
    entries = [
        Figure("State", rank.state, rank.reason if rank.reason not in {"", rank.state} else ""),
        Figure("Steps", f"{run.steps:,}", f"{done}counted from 1, in {rank.lifetime}", run.steps)
        if run.steps or rank.newest_is_here else None,
        Figure("Time left", text_format.span(run.left_s), "at the present speed") if run.left_s is not None else None,
        Figure("Loss", text_format.number(rank.loss), _sum_of(rank), rank.loss) if rank.loss is not None else None,
        Figure("Step time", text_format.duration(rank.pace.step_s), "typical of the last steps", rank.pace.step_s)
        if rank.pace else None,
        Figure("Speed", "–", f"no step for {text_format.span(still.seconds)}") if still is not None else None,
        Figure("Speed", text_format.rate(pace.per_s, "steps"), _work(pace, share), pace.per_s)
        if pace and pace.per_s and (rank.up or pace.steps >= LEAST_STEPS) else None,
        Figure("Goodput", text_format.percent(productive), f"{subject} time since {rank.since}", productive)
        if productive is not None else None,
        Figure("Learning rate", text_format.number(rate), f"first of {len(rates)} groups" if len(rates) > 1 else "", rate)
        if rate is not None else None,
        _parameters(rank),
        Figure("Device memory", text_format.size(max(peaks)), "peak of a device") if peaks else None,
        Figure("Host memory", text_format.size(max(rss)), "greatest RSS seen") if rss else None,
        Figure("Ranks", f"{len(run.ranks):,}", "") if len(run.ranks) > 1 else None,
    ]  # fmt: skip
    return Figures(tuple(figure for figure in entries if figure is not None))


def _sum_of(rank: RankView) -> str:
    """Describe the last loss; the sum over micro-batches with their mean."""
    passes, loss = next(((step.losses, step.loss) for step in reversed(rank.steps) if step.loss is not None), (0, None))
    if loss is None or passes <= 1:
        return "the last one"
    return f"the last one, sum of {passes} backward passes, mean {text_format.number(loss / passes)}"


def _parameters(rank: RankView) -> Figure | None:
    """Return how many parameters the rank's models have, and which of them are not trained."""
    by_state = rank.by_attribute(catalog.MODEL_PARAMETERS)
    whole, frozen = sum(by_state.values()), by_state.get("frozen", 0.0)
    if not whole:
        return None
    parts = [f"{text_format.count(whole - frozen)} trained, {text_format.count(frozen)} frozen" if frozen else "all trained"]
    for event in rank.events_named(catalog.EVENT_FROZEN_BETWEEN)[-1:] if frozen else ():
        layers, number = event.attributes.get("layers"), event.attributes.get("layers_affected")
        if isinstance(layers, (list, tuple)) and isinstance(number, int):
            names = [text_format.clean(layer) for layer in layers]
            more = [f"{number - len(names):,} more"] if number > len(names) else []
            parts.append(f"frozen between trained ones: layer{'s' * (number > 1)} {text_format.joined([*names, *more])}")
    return Figure("Parameters", text_format.count(whole), "; ".join(parts), whole)


def _work(pace: Throughput, share: float | None) -> str:
    rates = ((pace.tokens_per_s, "tokens"), (pace.samples_per_s, "samples"))
    more = [text_format.rate(per_s, what) for per_s, what in rates if per_s]
    more += [f"MFU {text_format.percent(share)}"] if share is not None else []
    return ", ".join([*more, f"over {text_format.plural(pace.steps, 'step')}"])


# -- the table of ranks ------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the page's table of ranks. ``sort``: the order that its heading links to."""

    name: str
    cell: Callable[[RankView], str]
    sort: str = ""


def _number(rounded: Callable[[float | None], str], value: float | None, more: str = "") -> Cell:
    return Cell(rounded(value), more, exact=value)


def _state(rank: RankView) -> Cell:
    """Return the state, how the rank ended, and its active anomalies."""
    details = [rank.exception or rank.reason.replace("_", " ")] if rank.reason not in {"", rank.state} else []
    details += [rank.phase] if rank.up and rank.phase in PATIENT_PHASES else []
    details += [kind.replace("_", " ") for kind in rank.anomalies]
    return Cell(rank.state, ", ".join(details), tone=rank.state)


def _steps(rank: RankView) -> Cell:
    return _number(text_format.count, None if rank.value(catalog.STEPS) is None else rank.done)


def _phases(shares: Sequence[float]) -> str:
    """Return the phases' shares, in words the largest one's."""
    if not shares:
        return text_format.NONE
    parts = tuple(zip(PHASES, shares, strict=True))
    largest = max(parts, key=lambda part: part[1])
    return Cell(f"{largest[0]} {text_format.percent(largest[1])}", shares=parts, tone="phases")


def _slowdown(rank: RankView) -> str:
    slow = rank.slowness
    if slow is None or not rank.up:
        return text_format.NONE
    words = f"{slow.factor:.2f}×"
    return Cell(words, PHASES[slow.phase], exact=slow.factor, tone="slow") if slow.is_slow else Cell(words, exact=slow.factor)


def _memory(rank: RankView) -> Cell:
    limit = f"({rank.memory_limit})" if rank.memory_limit and rank.memory is not None else ""
    return _number(text_format.size, rank.memory, limit)


_COLUMNS = (
    Column("rank", lambda rank: rank.rank, "rank"),
    Column("state", _state, "worst"),
    Column("step", _steps, "step"),
    Column("step time", lambda rank: _number(text_format.duration, rank.pace.step_s if rank.pace else None), "time"),
    Column("phases", lambda rank: _phases(rank.pace.shares if rank.pace else ())),
    Column("slowdown", _slowdown),
    Column("loss", lambda rank: _number(text_format.number, rank.loss), "loss"),
    Column("gradient norm", lambda rank: _number(text_format.number, rank.grad_norm), "norm"),
    Column("memory", _memory, "memory"),
    Column("last step", last_step),
)


def _screen_row(rank: RankView) -> tuple[str, ...]:
    pace, shares = rank.speed, rank.pace.shares if rank.pace else [None] * len(PHASES)
    tokens, samples = (pace.tokens_per_s, pace.samples_per_s) if pace else (None, None)
    flops = rank.value(catalog.MFU) if pace else None
    state = f"{rank.state}, {rank.phase}" if rank.state == "alive" and rank.phase in PATIENT_PHASES else rank.state
    anomalies = (f"{kind.replace('_', ' ')} {count:,}" for kind, count in rank.counted.items() if count)
    return (
        Cell(rank.rank, tone="warning" if rank.up and (rank.anomalies or rank.standstill) else ""),
        Cell(state, tone=rank.state), _steps(rank), text_format.rate(pace.per_s if pace else None), last_step(rank),
        text_format.number(rank.loss), text_format.number(rank.grad_norm), _slowdown(rank), _memory(rank),
        ", ".join(anomalies), text_format.rate(tokens) if tokens else "",
        text_format.rate(samples) if samples and not tokens else "", "" if flops is None else text_format.percent(flops),
        *map(text_format.percent, shares),
    )  # fmt: skip


def _rank_table(shown: Model, run: RunView) -> Table:
    choice, first, count = shown.choice, (shown.choice.page - 1) * PER_PAGE, len(run.ranks)
    rows = []
    for rank in shown.ranks:
        chosen = rank is shown.focus
        link = choice.link("curves", f"Show rank {rank.rank}", current=chosen, rank=rank.rank)
        cells = (column.cell(rank) for column in _COLUMNS[1:])
        rows.append((Cell(rank.rank, link=link, tone="chosen" if chosen else ""), *cells))
    order = {"worst": "the worst first", "rank": "in their order", "step": "the least advanced first"}
    numbers = f"{count:,}" if shown.pages == 1 else f"{first + 1:,}–{first + len(shown.ranks):,} of {count:,}"
    at, last = choice.page, shown.pages
    pages = sorted({1, 2, at - 1, at, at + 1, last - 1, last} & set(range(1, last + 1))) if last > 1 else []
    return Table(
        f"{numbers} on this node, {order.get(choice.sort, 'the highest first')}",
        tuple(_heading(name, sort, choice.sort, choice.link("ranks", sort=sort, page=1)) for name, _, sort in _COLUMNS),
        tuple(rows),
        frozenset({1, 4}),
        name="Ranks",
        foot=_all(run) if count > 1 else (),
        keys=PHASES,
        pages=tuple(
            Cell(f"{page:,}", link=choice.link("ranks", f"Page {page:,}", current=page == at, page=page)) for page in pages
        ),
    )


def _heading(name: str, sort: str, chosen: str, link: Link) -> Cell:
    """Return a column's heading; its tone is the order of the table, if sorted by this column."""
    if not sort:
        return Cell(name)
    return Cell(name, link=link, tone=_ORDERS.get(sort, "descending") if sort == chosen else "")


@remembered
def _all(run: RunView) -> tuple[str, ...]:
    """Return the number of ranks by state, and the range of each value."""
    ranks = run.ranks
    counts = Counter(rank.state for rank in ranks)
    paces = [rank.pace for rank in ranks if rank.pace]
    mean = [sum(column) / len(paces) for column in zip(*(pace.shares for pace in paces), strict=True)]
    memory = [size for rank in ranks if (size := rank.memory) is not None]
    return (
        "all",
        ", ".join(f"{counts[name]:,} {name}" for name in catalog.RANK_STATES if counts[name]),
        _range(text_format.count, [rank.done for rank in ranks]),
        text_format.duration(median(pace.step_s for pace in paces) if paces else None),
        _phases(mean),
        "",
        _range(text_format.number, [rank.loss for rank in ranks]),
        _range(text_format.number, [rank.grad_norm for rank in ranks]),
        text_format.size(sum(memory) if memory else None),
        "",
    )


def _range(rounded: Callable[[float | None], str], values: Iterable[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    finite = [value for value in numbers if isfinite(value)]
    nonfinite = dict.fromkeys(rounded(value) for value in numbers if not isfinite(value))
    ends = dict.fromkeys([rounded(min(finite)), rounded(max(finite))]) if finite else ()
    return ", ".join([*([" – ".join(ends)] if ends else []), *nonfinite]) or text_format.NONE


# -- events, evidence, layers ------------------------------------------------------------------------------------------------


def _events(shown: Model) -> Table | Text:
    log = log_of(rows_of(rank.rank, rank.events) for rank in (shown.run.ranks if shown.run else ()))
    if not log.lines:
        return Text("None yet.", "note")
    rows = [_event(line, shown.now_s) for line in log.lines]
    if log.cause is not None and len(log.lines) > 1:
        rows.insert(0, _event(EventGroup(1, log.cause, log.cause), shown.now_s, "First: "))
    caption = f"{len(log.lines):,}, the newest first, many of a kind as one, with this machine’s time"
    return Table(caption, ("when", "rank", "step", "what"), tuple(rows), frozenset({0, 3}), name="Events")


def _event(line: EventGroup, now_s: float, before: str = "") -> tuple[str, ...]:
    event, (step, title) = line.last, sections.event_words(line)
    since = f"since {_when(now_s, line.first.at_s)}, last: " if line.number > 1 else ""
    tone = "" if event.severity is Severity.INFO else event.severity.name.lower()
    when = Cell(_when(now_s, event.at_s), at_s=event.at_s, tone="first" if before else "")
    return when, _who(event.ranks), step, Cell(f"{before}{title}", f"{since}{event.text}", tone=tone)


def _who(ranks: Sequence[str]) -> str:
    """Return ranks as a short list: ``0–7``, or the first few."""
    numbers = sorted({int(rank) for rank in ranks if rank.isdecimal()})
    if len(numbers) == len(ranks) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:  # noqa: PLR2004  # two are no range
        return f"{numbers[0]}–{numbers[-1]}"
    return text_format.joined(numbers if len(numbers) == len(ranks) else ranks, _MOST_NAMED)


def _when(now_s: float, at_s: float) -> str:
    return text_format.moment(at_s, "%H:%M:%S" if now_s - at_s < _HALF_A_DAY_S else "%Y-%m-%d %H:%M")


def _evidence(shown: Model) -> Table | None:
    """Return the list of the artifacts of the run's ranks and of their earlier incarnations, if there are any."""
    run = shown.run
    labels = {rank.incarnation: rank.rank for rank in run.ranks} if run else {}
    artifacts = [
        artifact
        for artifact in shown.evidence
        if artifact.incarnation in labels or (run and (artifact.job_name, artifact.run_id) == (run.job_name, run.run_id))
    ]
    rows = tuple(
        (
            artifact.time[:19].replace("T", " "),
            labels.get(artifact.incarnation, f"{artifact.rank}-{artifact.incarnation[:DIGITS]}"),
            Cell(artifact.kind.replace("_", " "), link=Link(f".{artifact.href}")),
            _number(text_format.size, artifact.size_bytes),
        )
        for artifact in artifacts[:MOST_EVIDENCE]
    )
    caption = f"{len(rows):,}, the newest first, in UTC"
    return Table(caption, ("when", "rank", "what", "size"), rows, frozenset({0, 2}), name="Evidence") if rows else None


def _layers(shown: Model) -> Table | None:
    values: dict[str, dict[str, float]] = {}
    for column, (metric, _) in LAYERS.items():
        for key, value in shown.focus.values(metric).items() if shown.focus else ():
            values.setdefault(key[0] if key else "", {})[column] = value
    if not values or shown.focus is None:
        return None
    sort, columns = shown.choice.layers, [name for name in LAYERS if any(name in row for row in values.values())]
    rows = list(values.items())
    if sort != "model":
        rows.sort(key=(lambda row: row[0]) if sort == "name" else (lambda row: descending(row[1].get(sort))))
    names = (("name", "layer"), *((name, LAYERS[name][1]) for name in columns))
    order = {"model": "largest layers as the model has them", "name": "by name"}.get(sort, "the highest first")
    return Table(
        f"Of rank {shown.focus.rank}, {order}",
        tuple(_heading(words, name, sort, shown.choice.link("layers", layers=name)) for name, words in names),
        tuple((name, *(_number(text_format.number, row.get(column)) for column in columns)) for name, row in rows),
        name="Layers",
    )
