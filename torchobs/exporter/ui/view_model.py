"""View model of the page: a pure function of a snapshot and of the details read with it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from math import inf, isnan
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchobs import catalog
from torchobs.diagnosis.status import NOTHING_NEW, Newest, last_grad_norm, last_loss
from torchobs.exporter import exporter_metrics
from torchobs.exporter.ui import event_groups
from torchobs.exporter.ui.data import Curves
from torchobs.exporter.ui.sparkline_data import curve
from torchobs.flight.metrics.throughput import time_left_s
from torchobs.ranks import labels
from torchobs.ranks.incarnations import DIGITS
from torchobs.ranks.metric_values import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torchobs.detect.stragglers import Slowness
    from torchobs.exporter.ui.data import Details
    from torchobs.exporter.ui.events import EventRow
    from torchobs.exporter.ui.sparkline_data import Curve
    from torchobs.flight.metrics.throughput import Throughput
    from torchobs.ranks.metric_values import Readings
    from torchobs.ranks.snapshot import Rank, Snapshot

T = TypeVar("T")

PER_PAGE = 50
MOST_RUNS = 50
MOST_EVIDENCE = 50
LATELY_S = 600.0
"""Window of recent anomalies, equal to that of the alerts on them"""

SORTS = ("worst", "rank", "step", "time", "loss", "norm", "memory")
LAYER_SORTS = ("model", "name", "gradient", "weights", "update")

METRICS = (
    catalog.STEPS, catalog.LOSS, catalog.LEARNING_RATE, catalog.STEPS_PLANNED, catalog.TOKENS, catalog.SAMPLES, catalog.EPOCHS,
    catalog.GRAD_NORM, catalog.GRAD_CLIPPED_STEPS, catalog.GRAD_NONFINITE_STEPS, catalog.ANOMALIES, catalog.ANOMALY_ACTIVE,
    catalog.GOODPUT_TIME, catalog.AMP_SCALE, catalog.AMP_STEPS_SKIPPED, catalog.AMP_SKIP_STREAK, catalog.AMP_GROWTH_TRACKER,
    catalog.AMP_AUTOCAST, catalog.COMPILE_TIME, catalog.COMPILE_COMPILATIONS, catalog.COMPILE_GRAPH_BREAKS,
    catalog.COMPILE_CACHE_LOOKUPS, catalog.COMPILE_FAILURES, catalog.COMPILE_IN_PROGRESS, catalog.MEMORY_DEVICE_ALLOCATED,
    catalog.MEMORY_DEVICE_RESERVED, catalog.MEMORY_DEVICE_PEAK, catalog.MEMORY_DEVICE_LIMIT, catalog.MEMORY_HOST_RSS,
    catalog.MEMORY_HOST_CHILDREN_RSS, catalog.MEMORY_HOST_AVAILABLE, catalog.MEMORY_HOST_UTILIZATION,
    catalog.MEMORY_TIME_TO_LIMIT, catalog.MEMORY_GROWTH_PER_STEP, catalog.CGROUP_MEMORY_WORKING_SET,
    catalog.CGROUP_MEMORY_LIMIT, catalog.CHECKPOINTS, catalog.CHECKPOINT_TIMESTAMP, catalog.CHECKPOINT_SIZE,
    catalog.CHECKPOINT_DURATION, catalog.GRAD_LAYER_NORM, catalog.PARAM_LAYER_NORM, catalog.UPDATE_LAYER_RATIO,
    catalog.SCALAR_VALUE, catalog.DATA_STARVED, catalog.GRAD_UNMOVED_LAYERS, catalog.STEP_PHASE_TIME, catalog.PROBE_DISABLED,
)  # fmt: skip
"""Metrics read from a rank."""


class Choice(NamedTuple):
    """A viewer's choice of run, rank and sorting, from a query string; any part may be invalid."""

    run: str = ""
    """``job_name/run_id``; empty: the first run"""
    rank: str = ""
    """the rank with curves and details; invalid: the first rank"""
    sort: str = SORTS[0]
    page: int = 1
    layers: str = LAYER_SORTS[0]


class LayerRow(NamedTuple):
    """One row of the layers' table: norms, and the ratio of an update to the weights."""

    name: str
    gradient: float | None
    weights: float | None
    update: float | None


class ArtifactLink(NamedTuple):
    """A rank's artifact: stacks or a profile."""

    href: str
    kind: str
    rank: str
    """the rank's label; for an earlier incarnation followed by that incarnation's first digits"""
    time: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. Times in seconds."""

    rank: str
    incarnation: str
    state: str
    reason: str
    """how it ended; empty while it lives"""
    phase: str | None
    """its present phase"""
    beat_age_s: float
    progress_age_s: float | None
    readings: Readings
    pace: Throughput | None
    slowness: Slowness | None
    anomalies: tuple[str, ...]
    """the anomalies active now"""
    memory: float | None
    """bytes in use: on its devices, or by its process if it has none"""
    memory_share: float | None
    """share of the limit, if one is known"""
    lately: Mapping[str, int] = field(default_factory=dict)
    """number of anomalies in the last ten minutes by kind, from events"""
    recorded: bool = True
    """whether its steps are recorded: recording may be switched off"""
    newest: Newest = NOTHING_NEW
    """the last loss and norm in its records"""

    @property
    def up(self) -> bool:
        """True if its process is alive."""
        return not self.reason

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return int(self.readings.get(catalog.STEPS) or 0)

    @property
    def loss(self) -> float | None:
        """The last loss, finite or not."""
        return last_loss(self.readings.get, self.newest.loss)

    @property
    def grad_norm(self) -> float | None:
        """The last gradient norm that was measured, finite or not."""
        return last_grad_norm(self.readings.get, self.newest.grad_norm)

    @property
    def speed(self) -> Throughput | None:
        """Its throughput while it trains; ``None`` if it has ended, hangs or does something else."""
        trains = self.state == "alive" and self.phase != "idle" and self.recorded
        return self.pace if trains and self.pace and self.pace.per_s else None

    @property
    def left_s(self) -> float | None:
        """Estimated time for the remaining steps, in seconds; ``None`` if unknown."""
        aside = [self.readings.get(catalog.GOODPUT_TIME, state) or 0.0 for state in ("evaluation", "checkpoint")]
        return time_left_s(self.speed, self.steps, self.readings.get(catalog.STEPS_PLANNED) or 0, sum(aside))


@dataclass(frozen=True, slots=True)
class Run:
    """The ranks of one run on this node, in the order of their numbers."""

    job_name: str
    run_id: str
    rows: tuple[Row, ...]
    expected: int
    """number of its ranks that this node should have"""
    world_size: int

    @property
    def key(self) -> str:
        """The run's key in links."""
        return f"{self.job_name}/{self.run_id}"

    @property
    def steps(self) -> int:
        """Number of steps that all its ranks have done."""
        return max((row.steps for row in self.rows), default=0)


@dataclass(frozen=True, slots=True)
class Model:
    """The content of the page for one choice."""

    choice: Choice
    runs: tuple[Run, ...]
    run: Run | None
    """``None``: there is no run, or not the chosen one"""
    focus: Row | None
    rows: tuple[Row, ...]
    """the rows shown: one page of the sorted table"""
    pages: int
    curves: Curves
    scalars: Mapping[str, Curve | None]
    """curves of the chosen rank's logged scalars, by name"""
    events: event_groups.Log
    layers: tuple[LayerRow, ...]
    evidence: tuple[ArtifactLink, ...]
    """newest first"""
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
        shown = (ranks for place, ranks in enumerate(grouped(snapshot.ranks)) if place < MOST_RUNS or _key(ranks) in asked)
        return tuple(self._run(ranks, details) for ranks in shown)

    def _run(self, ranks: Sequence[Rank], details: Details) -> Run:
        world_size = max(_resource(rank, "world_size") for rank in ranks)
        here = max(_resource(rank, "local_world_size") for rank in ranks) or world_size
        rows = tuple(self._row(rank, details) for rank in ranks)
        return Run(
            ranks[0].job_name, ranks[0].run_id, rows, expected=max(here, len(ranks)), world_size=max(world_size, len(ranks))
        )

    def _row(self, rank: Rank, details: Details) -> Row:
        readings = self._reader.read(rank)
        memory, limit = _memory(readings)
        return Row(
            rank=rank.rank,
            incarnation=rank.incarnation,
            state=rank.state,
            reason="" if rank.up else exporter_metrics.ending(rank),
            phase=rank.view.live.phase if rank.up else None,
            beat_age_s=rank.beat_age_s,
            progress_age_s=rank.progress_age_s,
            readings=readings,
            pace=details.paces.get(rank.incarnation),
            slowness=rank.standing.slowness if rank.standing else None,
            anomalies=tuple(kind for (kind,), value in readings.of(catalog.ANOMALY_ACTIVE).items() if value),
            memory=memory,
            memory_share=limit,
            lately=_lately(details.events.get(rank.incarnation, event_groups.NOTHING).newest, time.time()),
            recorded=rank.view.live.steps_since_ns is not None,
            newest=details.newest.get(rank.incarnation, NOTHING_NEW),
        )


def _lately(events: Iterable[EventRow], now_s: float) -> Mapping[str, int]:
    found = Counter[str]()
    for event in events:
        if event.anomaly and abs(now_s - event.at_s) <= LATELY_S:
            found[event.anomaly] += event.number
    return found


def model(
    runs: tuple[Run, ...], choice: Choice, details: Details, evidence: Iterable[Mapping[str, Any]], now_s: float
) -> Model:
    """Return the model for one viewer. ``evidence``: the API's list of artifacts, newest first; ``now_s``: Unix time."""
    run = _chosen({run.key: run for run in runs}, choice)
    rows = run.rows if run else ()
    focus = next((row for row in rows if row.rank == choice.rank), rows[0] if rows else None)
    ordered = ordered_rows(rows, choice.sort)
    pages = max(1, -(-len(ordered) // PER_PAGE))
    first = (_sane(choice, run, focus, pages).page - 1) * PER_PAGE
    total = max((int(row.readings.get(catalog.STEPS_PLANNED) or 0) for row in rows), default=0)
    return Model(
        choice=_sane(choice, run, focus, pages),
        runs=runs,
        run=run,
        focus=focus,
        rows=tuple(ordered[first : first + PER_PAGE]),
        pages=pages,
        curves=details.curves.get(focus.incarnation, Curves()) if focus else Curves(),
        scalars={name: curve(points) for name, points in details.scalars.get(focus.incarnation, {}).items()} if focus else {},
        events=event_groups.log_of(details.events.get(row.incarnation, event_groups.NOTHING) for row in rows),
        layers=_layers(focus.readings, choice.layers) if focus else (),
        evidence=tuple(islice(_left_by(run, evidence), MOST_EVIDENCE)),
        total_steps=total or None,
        left_s=max((left_s for row in rows if (left_s := row.left_s) is not None), default=None),
        now_s=now_s,
    )


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


def grouped(ranks: Iterable[Rank]) -> list[list[Rank]]:
    """Return the ranks grouped by run, ordered within each run.

    Runs with a living rank come first, then the most recently started, then by name. This order changes only when a run begins
    or ends, so that nothing moves under the mouse.
    """
    runs: dict[tuple[str, str], list[Rank]] = {}
    for rank in ranks:
        runs.setdefault((rank.job_name, rank.run_id), []).append(rank)
    return sorted(runs.values(), key=_place)


def focused(ranks: Iterable[Rank], choice: Choice) -> str | None:
    """Return the incarnation of the chosen rank, which is shown with curves and details."""
    members = _chosen({_key(run): run for run in grouped(ranks)}, choice) or []
    return next((rank.incarnation for rank in members if rank.rank == choice.rank), members[0].incarnation if members else None)


def _chosen(runs: Mapping[str, T], choice: Choice) -> T | None:
    """Return the chosen run (``runs``: by key). If the chosen one does not exist, no other is shown in its place."""
    return runs.get(choice.run) if choice.run else next(iter(runs.values()), None)


def trouble(row: Row) -> float:
    """Return a score of how urgently a rank needs attention; by default the table is sorted by it, worst first."""
    by_state = {"lost": 6.0, "failed": 6.0, "hung": 5.0, "unresponsive": 4.0}.get(row.state, 0.0)
    slow = row.slowness.factor - 1 if row.slowness and row.slowness.factor > 1 else 0.0
    return by_state + 2.0 * bool(row.anomalies) + min(slow, 1.0)


def ordered_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return the ranks sorted; where values are equal or missing, by rank number."""
    keys: dict[str, Callable[[Row], float]] = {
        "worst": lambda row: -round(trouble(row), 1),
        "step": lambda row: row.steps,
        "time": lambda row: -(row.pace.step_s if row.pace else -1.0),
        "loss": lambda row: _descending(row.loss),
        "norm": lambda row: _descending(row.grad_norm),
        "memory": lambda row: _descending(row.memory),
    }
    return sorted(rows, key=keys[sort]) if sort in keys else list(rows)


def _descending(value: float | None) -> float:
    """Return a sort key for descending order: NaN first, missing values last."""
    return inf if value is None else -inf if isnan(value) else -value


def _place(members: Sequence[Rank]) -> tuple[bool, int, str]:
    up = any(rank.up for rank in members)
    return not up, -max(rank.view.header.wall_ns for rank in members), _key(members)


def _key(members: Sequence[Rank]) -> str:
    return f"{members[0].job_name}/{members[0].run_id}"


def _resource(rank: Rank, name: str) -> int:
    return labels.number(rank.view.header.resource, name) or 0


def _memory(readings: Readings) -> tuple[float | None, float | None]:
    """Return a rank's memory in use in bytes, and its share of the limit: of its fullest device, or of its process."""
    allocated, limits = readings.of(catalog.MEMORY_DEVICE_RESERVED), readings.of(catalog.MEMORY_DEVICE_LIMIT)
    if allocated:
        shares = [value / limits[device] for device, value in allocated.items() if limits.get(device)]
        return sum(allocated.values()), max(shares, default=None)
    return readings.get(catalog.MEMORY_HOST_RSS), max(readings.of(catalog.MEMORY_HOST_UTILIZATION).values(), default=None)


def _left_by(run: Run | None, evidence: Iterable[Mapping[str, Any]]) -> Iterator[ArtifactLink]:
    """Yield the artifacts of a run's ranks, including earlier incarnations."""
    names = {row.incarnation: row.rank for row in run.rows} if run else {}
    for one in evidence:
        rank, incarnation = one["rank"], one["incarnation"]
        if incarnation in names or (run and (one["job_name"], one["run_id"]) == (run.job_name, run.run_id)):
            called = names.get(incarnation, f"{rank}-{incarnation[:DIGITS]}")
            yield ArtifactLink(one["href"], one["kind"], called, one["time"], one["size_bytes"])


def _layers(readings: Readings, sort: str) -> tuple[LayerRow, ...]:
    columns = [
        readings.of(metric) for metric in (catalog.GRAD_LAYER_NORM, catalog.PARAM_LAYER_NORM, catalog.UPDATE_LAYER_RATIO)
    ]
    names = dict.fromkeys(key for column in columns for key in column)
    rows = [LayerRow(key[0] if key else "", *(column.get(key) for column in columns)) for key in names]
    keys: dict[str, Callable[[LayerRow], Any]] = {
        "name": lambda row: row.name,
        "gradient": lambda row: _descending(row.gradient),
        "weights": lambda row: _descending(row.weights),
        "update": lambda row: _descending(row.update),
    }
    return tuple(sorted(rows, key=keys[sort]) if sort in keys else rows)
