"""Status of ranks and runs: the input of :mod:`torchobs.diagnosis.health`, from a snapshot or from flight files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.catalog.findings import Finding
from torchobs.config.settings import PROBES
from torchobs.detect import speed
from torchobs.detect.growth import NEAR_S
from torchobs.detect.hangs import GroupProgress, Standstill
from torchobs.detect.learning import NEGLIGIBLE, OTHER_GROUPS, ZeroRate, zero_rate
from torchobs.detect.speed import Slowness
from torchobs.detect.spikes import LastAnomaly, healthy_steps
from torchobs.diagnosis.from_events import from_events
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.throughput import Throughput, time_left_s
from torchobs.ranks import labels, state
from torchobs.ranks.comparison import collectives_called, group_progress
from torchobs.ranks.rank_view import Fact, RankView, by_attributes, last_known, zero_rate_of
from torchobs.ranks.snapshot import Rank, Readings
from torchobs.support import text as text_format

LAST_LOSSES = 64
LATELY_S = 600.0
"""Window of recent anomalies, equal to that of the alerts on them"""
_SETTLED_S = 2.0
"""Time without a step after which what is published once a second is no more of a step"""
_ENDED_BY_ITSELF = frozenset({"finished", "exception", "exit_code"})
WORKER_DIED = catalog.EVENT_WORKER_DIED.name


class Get(Protocol):
    """Looks up a value of a rank."""

    def __call__(self, metric: Metric, /, *attributes: str) -> float | None:
        """Return the value of a series; ``None`` if absent."""


class Newest(NamedTuple):
    """The last delivered loss and gradient norm among some records, finite or not; ``None`` if they have none."""

    loss: float | None = None
    grad_norm: float | None = None
    norms: Mapping[int, float] = MappingProxyType({})
    """All gradient norms among them, by step"""
    losses: Mapping[int, float] = MappingProxyType({})
    """The last losses among them, by step"""
    zero_rate: ZeroRate | None = None
    """Of the first parameter group"""


NOTHING_NEW = Newest()


class EventSummary(NamedTuple):
    """What the events of a rank say about its training, as far as they are known."""

    found: Mapping[str, Finding] = MappingProxyType({})
    """findings that events make (``from_events``)"""
    anomalies: Mapping[str, LastAnomaly] = MappingProxyType({})
    """the last one by kind"""
    between: tuple[str, str] = ("", "")
    """function and line of the script at which the training thread most often is between the phases of a step"""


NO_EVENTS = EventSummary()


class Replicas(NamedTuple):
    """What the ranks of DistributedDataParallel have written down, by step, to be compared."""

    weights: Mapping[int, tuple[float, ...]] = MappingProxyType({})
    batches: Mapping[int, tuple[float, ...]] = MappingProxyType({})
    losses: Mapping[int, float] = MappingProxyType({})
    """Of the last steps, where there are batches"""


NO_REPLICAS = Replicas()


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status of one rank. Times in seconds."""

    rank: str
    state: str
    """one of ``catalog.RANK_STATES``"""
    reason: str
    """one of ``catalog.EXIT_REASONS``; empty while it runs"""
    up: bool
    phase: str | None
    """its present phase"""
    recorded: bool
    """False if recording of steps was switched off"""
    beat_age_s: float
    progress_age_s: float | None
    steps: int
    loss: float | None
    """the last one, finite or not"""
    per_s: float | None
    """steps per second while it trains"""
    grad_norm: float | None = None
    """the last one that was measured, finite or not"""
    exception: str = ""
    """the exception that ended it, in words; empty if none did, or it is unknown"""
    ran_s: float = 0.0
    """from its start to its last sign of life"""
    standstill: Standstill | None = None
    anomalies: tuple[str, ...] = ()
    """kinds that are active now"""
    counted: Mapping[str, int] = field(default_factory=dict)
    """anomalies since the start, by kind"""
    past: Mapping[str, int] = field(default_factory=dict)
    """healthy steps since the last anomaly, of the kinds from which the training has recovered (``detect.spikes``)"""
    lately: Mapping[str, int] = field(default_factory=dict)
    """anomalies of the last ten minutes by kind, and workers that died (:data:`WORKER_DIED`), as far as known from events"""
    events: EventSummary = NO_EVENTS
    scaled: bool = False
    """a loss scaler has skipped steps: non-finite gradients are normal"""
    unmoved_layers: int = 0
    saves_failed: int = 0
    """number of checkpoints whose saving raised"""
    saves_failed_last: float | None = None
    """number of those since the last checkpoint that was saved, if known"""
    skip_streak: int = 0
    """number of steps that a loss scaler has skipped in a row up to now"""
    scale: float | None = None
    """the smallest loss scale"""
    full_in_s: Mapping[str, float] = field(default_factory=dict)
    """seconds until memory that grows with the steps is full, by space, if that is near"""
    workers_died: int = 0
    failed_gpus: tuple[str, ...] = ()
    given_up: int = 0
    """number of functions that torch.compile no longer compiles"""
    waiting: float | None = None
    """share of step time spent waiting for data, if too large"""
    between: float | None = None
    """share of step time in other and between, if it is large"""
    slowness: Slowness | None = None
    frames: tuple[str, ...] = ()
    """innermost frames of the training thread, as for ``detect.hangs``; empty: unknown"""
    collectives: Mapping[str, GroupProgress] = field(default_factory=dict)
    """progress in each process group while no step ends; empty: unknown"""
    called: Mapping[str, int] = field(default_factory=dict)
    """number of collectives that a rank has called which stands still, or which ended by an exception, by process group"""
    probes_off: tuple[str, ...] = ()
    """probes that failed"""
    alike_norms: Mapping[int, float] = field(default_factory=dict)
    """gradient norms of the last steps, if they have to be the same on all ranks"""
    replicas: Replicas = NO_REPLICAS
    zero_rate: ZeroRate | None = None
    """since when all learning rates are zero, or next to it"""
    unwritten: bool = False
    """its last steps may be missing (``RankView.unwritten``)"""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The ranks of one run."""

    ranks: Sequence[RankStatus]
    expected: int
    """number of ranks expected on this machine"""
    world_size: int

    @property
    def steps(self) -> int:
        """Number of steps that all ranks have done."""
        return max((rank.steps for rank in self.ranks), default=0)


def newest(records: Iterable[StepRecord]) -> Newest:
    """Return the values of the latest steps; devices may deliver them out of order."""
    loss = norm = (0, -1, 0.0)
    norms, losses = dict[int, float](), dict[int, float]()
    rates, began = list[tuple[int, float | None]](), 0
    for record in records:
        began = record.step if record.flags & StepFlag.NEW_MODEL else began
        if record.kind == RecordKind.STEP:
            rates.append((record.step, record.learning_rate if record.flags & StepFlag.LEARNING_RATE else None))
        if record.flags & StepFlag.LOSS:
            loss = max(loss, (record.step, record.seq, record.loss), key=lambda found: found[:2])
            losses[record.step] = record.loss
        if record.flags & StepFlag.GRAD_NORM:
            norm = max(norm, (record.step, record.seq, record.grad_norm), key=lambda found: found[:2])
            norms[record.step] = record.grad_norm
    found_loss, found_norm = (found[2] if found[1] >= 0 else None for found in (loss, norm))
    return Newest(found_loss, found_norm, norms, last_losses(losses), zero_rate(rates, began))


def last_losses(losses: Mapping[int, float]) -> dict[int, float]:
    """Return those of the last steps, of which enough are kept to compare ranks by them."""
    return dict(sorted(losses.items())[-LAST_LOSSES:])


def alike_norms(
    norms: Mapping[int, float], distributed: Iterable[Sequence[str]], norm_ranks: float | None
) -> Mapping[int, float]:
    """Return the norms if DistributedDataParallel makes them the same on all ranks; else none.

    ``distributed``: the attributes of the rank's ``torchobs.distributed.info``, which is known before the first backward has
    been measured. ``norm_ranks``: ``torchobs.grad.norm_ranks``; above 1 a norm is that of a rank's own shard.
    """
    is_ddp = any("ddp" in kinds.split("+") for attributes in distributed for kinds in attributes)
    return norms if is_ddp and (norm_ranks or 1.0) <= 1.0 else {}


def last_loss(get: Get, known: float | None = None) -> float | None:
    """Return the last loss, NaN if an anomaly is active: the metric holds the last finite one (``flight.metrics.fold``).

    ``known``: the newest one in the records, if these were read; it distinguishes NaN from infinity.
    """
    return _last(get, catalog.LOSS, "nonfinite_loss", known)


def last_grad_norm(get: Get, known: float | None = None) -> float | None:
    """Return the last measured gradient norm, likewise."""
    return _last(get, catalog.GRAD_NORM, "nonfinite_gradient", known)


def _last(get: Get, metric: Metric, anomaly: str, known: float | None) -> float | None:
    if known is not None and not isfinite(known):
        return known
    return nan if known is None and get(catalog.ANOMALY_ACTIVE, anomaly) else get(metric)


def waiting_share(get: Get, *, up: bool) -> float | None:
    """Return the share of step time spent waiting for data; ``None`` if it is acceptable.

    For a living rank by its own verdict on the last minute (``detect.speed``), once there is one; before that, and for
    an ended rank, by the totals.
    """
    phases = {phase: get(catalog.STEP_PHASE_TIME, phase) or 0.0 for phase in catalog.PHASES}
    trained_s = sum(phases.values())
    verdict = get(catalog.DATA_STARVED) if up else None
    if verdict:
        return phases["data"] / trained_s if trained_s > 0 else 0.0
    if verdict is not None and trained_s >= speed.WINDOW_S:
        return None
    return speed.waiting_share(phases["data"], trained_s)


def completed(status: RankStatus, get: Get, of: Callable[[Metric], Mapping[tuple[str, ...], float]]) -> RankStatus:
    """Return the status with what the rank's values tell, and its norms and zero rate only as far as they mean something.

    ``get``, ``of``: look up a value of a metric, and all values of one by those of its attributes.
    """
    # counts of collectives are published once a second and at its end
    settled = status.reason in _ENDED_BY_ITSELF or (status.progress_age_s or 0.0) - status.beat_age_s >= _SETTLED_S
    return replace(
        status,
        anomalies=tuple(kind for kind in catalog.ANOMALY_KINDS if get(catalog.ANOMALY_ACTIVE, kind)),
        counted={kind: int(get(catalog.ANOMALIES, kind) or 0) for kind in catalog.ANOMALY_KINDS},
        scaled=bool(get(catalog.AMP_STEPS_SKIPPED)),
        unmoved_layers=int(get(catalog.GRAD_UNMOVED_LAYERS) or 0),
        saves_failed=int(get(catalog.CHECKPOINTS, "failed") or 0),
        saves_failed_last=get(catalog.CHECKPOINT_FAILURE_STREAK),
        skip_streak=int(get(catalog.AMP_SKIP_STREAK) or 0),
        scale=min(of(catalog.AMP_SCALE).values(), default=None),
        full_in_s={space: left_s for (space,), left_s in of(catalog.MEMORY_TIME_TO_LIMIT).items() if left_s <= NEAR_S},
        workers_died=int(get(catalog.DATA_WORKERS_DIED) or 0),
        failed_gpus=tuple(gpu for (gpu, _, state), is_so in of(catalog.HW_STATUS).items() if state == "failed" and is_so),
        given_up=int(get(catalog.COMPILE_FAILURES, "recompile_limit") or 0),
        waiting=waiting_share(get, up=status.up),
        between=speed.between_share({phase: get(catalog.STEP_PHASE_TIME, phase) or 0.0 for phase in catalog.PHASES}),
        probes_off=tuple(probe for probe in PROBES if get(catalog.PROBE_DISABLED, probe)),
        alike_norms=alike_norms(status.alike_norms, of(catalog.DISTRIBUTED_INFO), get(catalog.GRAD_NORM_RANKS)),
        zero_rate=_of_all_groups(status.zero_rate, get),
        collectives=group_progress(of),
        called=collectives_called(of) if settled else {},
    )


def status_of(
    rank: Rank, readings: Readings, known: Newest, *, pace: Throughput | None, replicas: Replicas, events: EventSummary,
    lately: Mapping[str, int],
) -> RankStatus:  # fmt: skip
    """Return the status of a rank of a snapshot, with what its records and events tell.

    ``pace``: its throughput over its last steps, whatever it does now.
    """
    live = rank.view.live
    status = RankStatus(
        rank=rank.rank,
        state=rank.state,
        reason=rank.reason,
        up=rank.up,
        phase=live.phase if rank.up else None,
        recorded=live.steps_since_ns is not None,
        beat_age_s=rank.beat_age_s,
        progress_age_s=rank.progress_age_s,
        steps=int(readings.get(catalog.STEPS) or 0),
        loss=last_loss(readings.get, known.loss),
        grad_norm=last_grad_norm(readings.get, known.grad_norm),
        per_s=pace.per_s if rank.trains and pace else None,
        exception=text_format.clean(state.exception_in_words(rank.exception)) if rank.reason == "exception" else "",
        ran_s=max(0.0, ((live.heartbeat_ns or 0) - rank.view.header.monotonic_ns) / 1e9),
        standstill=rank.standstill,
        lately=lately,
        events=events,
        past=past_anomalies(readings.get, events, known.losses, known.norms),
        slowness=rank.standing.slowness if rank.standing else None,
        alike_norms=known.norms,
        replicas=replicas,
        zero_rate=known.zero_rate,
    )
    return completed(status, readings.get, readings.of)


def _of_all_groups(found: ZeroRate | None, get: Get) -> ZeroRate | None:
    """Return it unless the learning rate of another parameter group is, or may be, above that."""
    others = [get(catalog.LEARNING_RATE, str(group)) for group in range(1, OTHER_GROUPS + 1)]
    if found is None or others[-1] is not None or any((rate or 0.0) > NEGLIGIBLE * found.highest for rate in others):
        return None
    return found


def left_s(get: Get, found: Throughput | None) -> float | None:
    """Return the estimated time for the remaining steps, in seconds, at that throughput; ``None`` if unknown."""
    aside_s = sum(get(catalog.GOODPUT_TIME, state) or 0.0 for state in ("evaluation", "checkpoint"))
    return time_left_s(found, int(get(catalog.STEPS) or 0), get(catalog.STEPS_PLANNED) or 0, aside_s)


def recent_anomalies(anomalies: Iterable[tuple[float, str, int]], now_s: float) -> Mapping[str, int]:
    """Return how many anomalies of each kind there were in the last :data:`LATELY_S`.

    ``anomalies``: Unix time, kind and number of each; ``now_s``: Unix time. A clock set meanwhile counts either way.
    """
    counts = Counter[str]()
    for at_s, kind, number in anomalies:
        if kind and abs(now_s - at_s) <= LATELY_S:
            counts[kind] += number
    return counts


def anomalies_of(events: Iterable[Fact]) -> Iterator[tuple[float, str, int]]:
    """Yield Unix time, kind and number (with those left out before it) of the anomalies among the events.

    And of loaders' workers that died, as :data:`WORKER_DIED`.
    """
    for event in events:
        if event.name == catalog.EVENT_ANOMALY.name:
            yield event.time_s, event.text("kind"), 1 + event.count("left_out")
        elif event.name == WORKER_DIED:
            yield event.time_s, WORKER_DIED, 1


def past_anomalies(
    get: Get, events: EventSummary, losses: Mapping[int, float], norms: Mapping[int, float]
) -> Mapping[str, int]:
    """Return the healthy steps since the last anomaly, of the kinds from which the training has recovered.

    ``losses``, ``norms``: by step, of the last steps.
    """
    counts = {kind: int(get(catalog.ANOMALIES, kind) or 0) for kind in catalog.ANOMALY_KINDS}
    over = [kind for kind, count in counts.items() if count and not get(catalog.ANOMALY_ACTIVE, kind)]
    steps = {kind: healthy_steps(kind, counts[kind], events.anomalies.get(kind), losses, norms) for kind in over}
    return {kind: number for kind, number in steps.items() if number}


def past_in(report: RankView) -> Mapping[str, int]:
    """Return the healthy steps since the last anomaly, of the kinds from which a rank's training has recovered."""
    losses = {step.step: step.loss for step in report.steps if step.loss is not None}
    norms = {step.step: step.grad_norm for step in report.steps if step.grad_norm is not None}
    return past_anomalies(report.value, summary_of(report.events), losses, norms)


def summary_of(events: Iterable[Fact], known: EventSummary = NO_EVENTS) -> EventSummary:
    """Return what the events say, with what is ``known`` from those before them."""
    events, anomalies, between = list(events), dict(known.anomalies), known.between
    for event in events:
        kind = event.text("kind")
        if event.name == catalog.EVENT_ANOMALY.name and kind in catalog.ANOMALY_KINDS and event.step is not None:
            before = anomalies.get(kind)
            reported = (before.reported if before else 0) + 1 + event.count("left_out")
            step = max(event.step, before.step if before else 0)
            anomalies[kind] = LastAnomaly(step, event.number("baseline"), reported)
        elif event.name == catalog.EVENT_STEP_BETWEEN.name:
            between = event.text("function", 60), event.text("location").rpartition("/")[2]
    return EventSummary(from_events(events, known.found), anomalies, between)


def replicas_of(events: Iterable[Fact], losses: Mapping[int, float], known: Replicas = NO_REPLICAS) -> Replicas:
    """Return what a rank has written down to be compared with others, with what was ``known`` before; ``losses``: by step."""
    weights, batches = dict(known.weights), dict(known.batches)
    found = {catalog.EVENT_REPLICA_WEIGHTS.name: weights, catalog.EVENT_REPLICA_BATCHES.name: batches}
    for event in events:
        values = tuple(map(float, event.attributes.get("values", ()))) if event.name in found else ()
        if values and event.step is not None and all(map(isfinite, values)):
            found[event.name][event.step] = values
    return Replicas(weights, batches, last_losses(losses) if batches else {})


def run_status(ranks: Sequence[RankView]) -> RunStatus:
    """Return the status of a run from its reports, at the last sign of life of any rank."""
    last_s = max(report.last_s for report in ranks)
    sizes = [size for report in ranks if isinstance(size := report.header.resource.get("world_size"), int)]
    here = max(started_here(ranks), len(ranks))
    return RunStatus(compared(ranks, last_s), here, max([*sizes, here]))


def started_here(ranks: Sequence[RankView]) -> int:
    """Return how many ranks the launcher started on the machine of the reports; 0 if unknown, or of several machines."""
    sizes = {report.header.resource.get("local_world_size") for report in ranks}
    size = sizes.pop() if len(sizes) == 1 and len({report.described("host") for report in ranks}) == 1 else None
    return size if isinstance(size, int) else 0


def compared(ranks: Sequence[RankView], now_s: float | None = None) -> list[RankStatus]:
    """Return the status of each rank of a run, compared with the others of its replica group by their latest steps."""
    teams = ({report.rank: report.pace.spent for report in team if report.pace} for team in labels.teams(ranks))
    slow = {rank: found for team in teams for rank, found in speed.slowness(team).items()}
    return [replace(reported(report, now_s), slowness=slow.get(report.rank), frames=report.frames) for report in ranks]


def reported(report: RankView, now_s: float | None = None) -> RankStatus:
    """Return the status of a rank from its report. ``now_s``: Unix time, by default its last sign of life."""
    last_s = report.last_s if now_s is None else now_s
    status = RankStatus(
        rank=report.rank,
        state=report.state,
        reason=report.reason,
        up=report.up,
        phase=report.phase,
        recorded=report.recorded,
        beat_age_s=max(0.0, last_s - report.last_s),
        progress_age_s=max(0.0, last_s - report.progress_s),
        steps=int(report.value(catalog.STEPS) or report.last_step),
        loss=last_loss(report.value, last_known([step.loss for step in report.steps])),
        grad_norm=last_grad_norm(report.value, last_known([step.grad_norm for step in report.steps])),
        per_s=report.pace.per_s if report.trains and report.pace else None,
        exception=report.exception,
        ran_s=max(0.0, report.last_s - report.start_s),
        standstill=report.standstill,
        lately=recent_anomalies(anomalies_of(report.events), last_s),
        events=summary_of(report.events),
        past=past_in(report),
        alike_norms={one.step: one.grad_norm for one in report.steps if one.grad_norm is not None},
        replicas=replicas_of(report.events, {step.step: step.loss for step in report.steps if step.loss is not None}),
        zero_rate=zero_rate_of(report),
        unwritten=report.unwritten,
    )
    return completed(status, report.value, partial(by_attributes, report.values))
