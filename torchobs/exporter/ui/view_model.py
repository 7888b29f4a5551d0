"""What the page shows for one choice of a viewer, and the URLs of such choices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from math import inf, isnan
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlencode

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import Health, health
from torchobs.diagnosis.status import RankStatus, RunStatus, last_grad_norm, left_s, recent_anomalies, status_of
from torchobs.exporter.ui.data import NO_DETAILS, log_of, recent_kinds
from torchobs.ranks import comparison, labels
from torchobs.ranks.rank_file import DIGITS
from torchobs.ranks.snapshot import Reader, grouped
from torchobs.report.charts import curve
from torchobs.report.html import Html, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torchobs.exporter.ui.data import Curves, Details, EventLog, RankDetails
    from torchobs.flight.metrics.throughput import Throughput
    from torchobs.ranks.snapshot import Rank, Readings, Snapshot
    from torchobs.report.charts import Curve


T = TypeVar("T")

PER_PAGE = 50
MOST_RUNS = 50
MOST_EVIDENCE = 50

WHOLES = {"cgroup": "container", "machine": "machine"}
"""What a limit on the host's memory is the limit of"""
SORTS = ("worst", "rank", "step", "time", "loss", "norm", "memory")
LAYERS = {
    "gradient": (catalog.GRAD_LAYER_NORM, "gradient norm"),
    "weights": (catalog.PARAM_LAYER_NORM, "weight norm"),
    "update": (catalog.UPDATE_LAYER_RATIO, "update / weights"),
    "output": (catalog.ACTIVATION_LAYER_MEAN_ABS, "mean output"),
    "spread": (catalog.ACTIVATION_LAYER_STD, "its deviation"),
    "zero": (catalog.ACTIVATION_LAYER_ZERO, "its zeros"),
}
"""Columns of the layers' table: the metric, and its heading. The last three at level extreme: the mean absolute value of what
a layer puts out, its standard deviation, and the share that is exactly zero."""
LAYER_SORTS = ("model", "name", *LAYERS)

METRICS = (
    catalog.STEPS, catalog.LOSS, catalog.LEARNING_RATE, catalog.STEPS_PLANNED, catalog.GRAD_NORM,
    catalog.GRAD_CLIPPED_STEPS, catalog.GRAD_NONFINITE_STEPS, catalog.ANOMALIES, catalog.ANOMALY_ACTIVE,
    catalog.GOODPUT_TIME, catalog.AMP_SCALE, catalog.AMP_STEPS_SKIPPED, catalog.AMP_SKIP_STREAK,
    catalog.AMP_AUTOCAST, catalog.COMPILE_TIME, catalog.COMPILE_COMPILATIONS, catalog.COMPILE_GRAPH_BREAKS,
    catalog.COMPILE_CACHE_LOOKUPS, catalog.COMPILE_FAILURES, catalog.COMPILE_IN_PROGRESS, catalog.MEMORY_DEVICE_ALLOCATED,
    catalog.MEMORY_DEVICE_RESERVED, catalog.MEMORY_DEVICE_PEAK, catalog.MEMORY_DEVICE_LIMIT, catalog.MEMORY_HOST_RSS,
    catalog.MEMORY_HOST_CHILDREN_RSS, catalog.MEMORY_HOST_UTILIZATION, catalog.MEMORY_TIME_TO_LIMIT,
    catalog.CGROUP_MEMORY_WORKING_SET, catalog.CGROUP_MEMORY_LIMIT, catalog.CHECKPOINTS, catalog.CHECKPOINT_TIMESTAMP,
    catalog.CHECKPOINT_SIZE, catalog.CHECKPOINT_FAILURE_STREAK,
    catalog.SCALAR_VALUE, catalog.DATA_STARVED, catalog.GRAD_UNMOVED_LAYERS, catalog.STEP_PHASE_TIME, catalog.PROBE_DISABLED,
    catalog.DISTRIBUTED_INFO, catalog.GRAD_NORM_RANKS, catalog.MFU, *comparison.COLLECTIVE_METRICS,
    catalog.DATA_WORKERS_DIED, catalog.HW_STATUS,
    *(metric for metric, _ in LAYERS.values()),
)  # fmt: skip
"""Metrics read from a rank."""


NO_RANK = Health(
    Severity.INFO,
    "No rank has been seen yet. One appears as soon as a training calls torchobs.init().",
    "No rank has been seen yet.",
)
MISSING = Health(Severity.INFO, "No such run (any more). Once it is there it is shown here.", "No such run (any more).")
"""Health of a chosen run that does not exist"""


class Choice(NamedTuple):
    """A viewer's choice of run, rank and sorting, from a query string; any part may be invalid."""

    run: str = ""
    """``job_name/run_id``; empty: the first run"""
    rank: str = ""
    """the rank with curves and details; invalid: the first rank"""
    sort: str = SORTS[0]
    page: int = 1
    layers: str = LAYER_SORTS[0]


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. Times in seconds."""

    incarnation: str
    status: RankStatus
    readings: Readings
    pace: Throughput | None
    """its throughput over its last steps, whatever it does now"""
    grad_norm: float | None
    """the last gradient norm that was measured, finite or not"""
    memory: float | None
    """bytes in use: on its devices, or by its process if it has none"""
    memory_limit: str
    """which share of what is in use, in words: of the fullest device, else of the container or the machine; empty if unknown"""

    @property
    def rank(self) -> str:
        """The rank's label."""
        return self.status.rank

    @property
    def speed(self) -> Throughput | None:
        """Its throughput while it trains; ``None`` if it has ended, hangs or does something else."""
        return self.pace if self.status.per_s else None

    @property
    def left_s(self) -> float | None:
        """Estimated time for the remaining steps, in seconds; ``None`` if unknown."""
        return left_s(self.readings.get, self.speed)


@dataclass(frozen=True, slots=True)
class Run:
    """The ranks of one run on this node, in the order of their numbers."""

    job_name: str
    run_id: str
    rows: tuple[Row, ...]
    status: RunStatus
    health: Health

    @property
    def key(self) -> str:
        """The run's key in links."""
        return f"{self.job_name}/{self.run_id}"


@dataclass(frozen=True, slots=True)
class Model:
    """The content of the page for one choice."""

    choice: Choice
    runs: tuple[Run, ...]
    run: Run | None
    """``None``: there is no run, or not the chosen one"""
    health: Health
    """of the run shown; failed other runs are mentioned, too"""
    focus: Row | None
    rows: tuple[Row, ...]
    """the rows shown: one page of the sorted table"""
    pages: int
    curves: Curves
    scalars: Mapping[str, Curve | None]
    """curves of the chosen rank's logged scalars, by name"""
    events: EventLog
    layers: tuple[tuple[str, Mapping[str, float]], ...]
    """name, and values by column as far as it has any"""
    evidence: tuple[Mapping[str, Any], ...]
    """as in the API, newest first; ``rank``: its label, for an earlier incarnation with that one's first digits behind it"""
    total_steps: int | None
    left_s: float | None
    now_s: float
    """Unix time"""


class Modeller:
    """Builds the runs of a snapshot; caches where each rank's values are in its file."""

    def __init__(self) -> None:
        self._reader = Reader(METRICS)

    def runs(self, snapshot: Snapshot, details: Details, asked: Collection[str] = ()) -> tuple[Run, ...]:
        """Return the runs in order: the first ones, and those with a key in ``asked``."""
        self._reader.keep(snapshot.ranks)
        runs = enumerate(grouped(snapshot.ranks))
        return tuple(self._run(ranks, details) for index, ranks in runs if index < MOST_RUNS or _key(ranks) in asked)

    def _run(self, ranks: Sequence[Rank], details: Details) -> Run:
        sizes = ("world_size", "local_world_size")
        world_size, here = (max(labels.number(rank.view.header.resource, name) or 0 for rank in ranks) for name in sizes)
        rows = tuple(self._row(rank, details.get(rank.incarnation, NO_DETAILS)) for rank in ranks)
        return run_of(ranks[0].job_name, ranks[0].run_id, rows, expected=here or world_size, world_size=world_size)

    def _row(self, rank: Rank, details: RankDetails) -> Row:
        readings = self._reader.read(rank)
        status = status_of(
            rank,
            readings,
            details.newest,
            pace=details.pace,
            replicas=details.replicas._replace(losses=details.newest.losses),
            events=details.summary,
            lately=recent_anomalies(recent_kinds(details.events.newest), time.time()),
        )
        grad_norm = last_grad_norm(readings.get, details.newest.grad_norm)
        return Row(rank.incarnation, status, readings, details.pace, grad_norm, *_memory(readings))


def run_of(job_name: str, run_id: str, rows: Sequence[Row], *, expected: int, world_size: int) -> Run:
    """Return a run with its health; ``expected``: number of its ranks that this node should have."""
    status = RunStatus([row.status for row in rows], max(expected, len(rows)), max(world_size, len(rows)))
    return Run(job_name, run_id, tuple(rows), status, health(status))


def model(
    runs: tuple[Run, ...], choice: Choice, details: Details, evidence: Iterable[Mapping[str, Any]], now_s: float
) -> Model:
    """Return the model for one viewer. ``evidence``: the API's list of artifacts, newest first; ``now_s``: Unix time."""
    run = _chosen({run.key: run for run in runs}, choice)
    rows = run.rows if run else ()
    focus = next((row for row in rows if row.rank == choice.rank), rows[0] if rows else None)
    focused = details.get(focus.incarnation, NO_DETAILS) if focus else NO_DETAILS
    pages = max(1, -(-len(rows) // PER_PAGE))
    choice = _sane(choice, run, focus, pages)
    first = (choice.page - 1) * PER_PAGE
    total = max((int(row.readings.get(catalog.STEPS_PLANNED) or 0) for row in rows), default=0)
    return Model(
        choice=choice,
        runs=runs,
        run=run,
        health=health_beside(run, runs) if run else MISSING if choice.run else NO_RANK,
        focus=focus,
        rows=tuple(_ordered_rows(rows, choice.sort)[first : first + PER_PAGE]),
        pages=pages,
        curves=focused.curves,
        scalars={name: curve(points) for name, points in focused.scalars.items()},
        events=log_of(details.get(row.incarnation, NO_DETAILS).events for row in rows),
        layers=_layers(focus.readings, choice.layers) if focus else (),
        evidence=tuple(islice(_evidence_of(run, evidence), MOST_EVIDENCE)),
        total_steps=total or None,
        left_s=max((seconds for row in rows if (seconds := row.left_s) is not None), default=None),
        now_s=now_s,
    )


def health_beside(run: Run, runs: Iterable[Run]) -> Health:
    """Return the health of a run among others: failed ones are mentioned, too."""
    failed = [other for other in runs if other is not run and other.health.level is Severity.ERROR]
    if not failed:
        return run.health
    names = f"{failed[0].job_name[:80]} {failed[0].run_id[:80]}" + (f" and {len(failed) - 1:,} more" * (len(failed) > 1))
    text = f"Another run here is in trouble: {names}."
    level = max(run.health.level, Severity.WARNING, key=lambda level: level.value)
    return Health(level, f"{run.health.text} {text}", f"{run.health.gist} {text}")


def _sane(choice: Choice, run: Run | None, focus: Row | None, pages: int) -> Choice:
    """Return the choice without its invalid parts, so that links do not repeat them.

    The run becomes the one shown, so that an open page stays with it, whatever begins or ends. A chosen run that does not exist
    is kept with its rank, because it may begin soon.
    """
    return Choice(
        run=run.key if run else choice.run,
        rank=choice.rank if focus is None or focus.rank == choice.rank else "",
        sort=choice.sort if choice.sort in SORTS else SORTS[0],
        page=min(max(choice.page, 1), pages) if run else max(choice.page, 1),
        layers=choice.layers if choice.layers in LAYER_SORTS else LAYER_SORTS[0],
    )


def focused(ranks: Iterable[Rank], choice: Choice) -> str | None:
    """Return the incarnation of the chosen rank, which is shown with curves and details."""
    members = _chosen({_key(run): run for run in grouped(ranks)}, choice) or []
    return next((rank.incarnation for rank in members if rank.rank == choice.rank), members[0].incarnation if members else None)


def _chosen(runs: Mapping[str, T], choice: Choice) -> T | None:
    """Return the chosen run (``runs``: by key). If the chosen one does not exist, no other is shown in its place."""
    return runs.get(choice.run) if choice.run else next(iter(runs.values()), None)


def _trouble(status: RankStatus) -> float:
    """Return a score of how urgently a rank needs attention; by default the table is sorted by it, worst first."""
    by_state = {"lost": 6.0, "failed": 6.0, "hung": 5.0, "unresponsive": 4.0}.get(status.state, 0.0)
    slow = status.slowness.factor - 1 if status.slowness and status.slowness.factor > 1 else 0.0
    return by_state + 3.0 * bool(status.standstill) + 2.0 * bool(status.anomalies) + min(slow, 1.0)


def _ordered_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return the ranks sorted; where values are equal or missing, by rank number."""
    keys: dict[str, Callable[[Row], float]] = {
        "worst": lambda row: -round(_trouble(row.status), 1),
        "step": lambda row: row.status.steps,
        "time": lambda row: -(row.pace.step_s if row.pace else -1.0),
        "loss": lambda row: _descending(row.status.loss),
        "norm": lambda row: _descending(row.grad_norm),
        "memory": lambda row: _descending(row.memory),
    }
    return sorted(rows, key=keys[sort]) if sort in keys else list(rows)


def _descending(value: float | None) -> float:
    """Return a sort key for descending order: NaN first, missing values last."""
    return inf if value is None else -inf if isnan(value) else -value


def _key(ranks: Sequence[Rank]) -> str:
    return f"{ranks[0].job_name}/{ranks[0].run_id}"


def _memory(readings: Readings) -> tuple[float | None, str]:
    """Return the bytes that a rank has on its devices, or its process has if there are none, and how full what they are in is.

    The process's bytes are not all that fill the machine, or the container: so it is said which of the two is how full.
    """
    allocated, limits = readings.of(catalog.MEMORY_DEVICE_RESERVED), readings.of(catalog.MEMORY_DEVICE_LIMIT)
    if allocated:
        shares = {device: value / limits[device] for device, value in allocated.items() if limits.get(device)}
        device = max(shares, key=lambda name: shares[name], default=None)
        words = f"{text_format.percent(shares[device])} of {device[0]}" if device is not None else ""
        return sum(allocated.values()), words
    used = {limit: share for (limit,), share in readings.of(catalog.MEMORY_HOST_UTILIZATION).items()}
    fullest = max(used, key=lambda limit: used[limit], default=None)
    words = f"{WHOLES.get(fullest, fullest)} {text_format.percent(used[fullest])} full" if fullest is not None else ""
    return readings.get(catalog.MEMORY_HOST_RSS), words


def _evidence_of(run: Run | None, evidence: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the artifacts of a run's ranks, including earlier incarnations."""
    names = {row.incarnation: row.rank for row in run.rows} if run else {}
    for one in evidence:
        if one["incarnation"] in names or (run and (one["job_name"], one["run_id"]) == (run.job_name, run.run_id)):
            yield {**one, "rank": names.get(one["incarnation"], f"{one['rank']}-{one['incarnation'][:DIGITS]}")}


def _layers(readings: Readings, sort: str) -> tuple[tuple[str, Mapping[str, float]], ...]:
    values: dict[str, dict[str, float]] = {}
    for column, (metric, _) in LAYERS.items():
        for key, value in readings.of(metric).items():
            values.setdefault(key[0] if key else "", {})[column] = value
    if sort == "model":
        return tuple(values.items())
    return tuple(sorted(values.items(), key=lambda row: row[0] if sort == "name" else _descending(row[1].get(sort))))


STREAM_PATH = "/live/stream"

_MOST_QUERY = 16_000
"""Enough for the longest name of a run: it is from a header of 4 KiB, and each byte may take three in a query"""

_MOST_PAGE = 1000


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


def link(choice: Choice, words: str, section: str, *, label: str | None = None, current: bool = False) -> Html:
    """Return a link to the page with another choice."""
    target = f"./{query_of(choice)}#{section}"
    return tag("a", words, href=target, aria_label=label, aria_current="true" if current else None)
