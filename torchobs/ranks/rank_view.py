"""One rank, alive or dead, and its run, as page, ``top``, ``inspect``, report and API show them. No file, no clock.

A view comes from a rank of a snapshot (:func:`view_of`), or from its file alone (``ranks.runs``). Conclusions from its numbers
are properties, computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, isnan, nan
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.config.settings import PROBES
from torchobs.detect import speed
from torchobs.detect.hangs import LEAST_S, PATIENT_PHASES, GroupProgress, Standstill
from torchobs.detect.learning import NEGLIGIBLE, OTHER_GROUPS, ZeroRate, zero_rate
from torchobs.detect.speed import Slowness
from torchobs.detect.spikes import healthy_steps
from torchobs.flight.artifacts import ArtifactName
from torchobs.flight.details import History
from torchobs.flight.events import Event
from torchobs.flight.forward import NO_SHARE, ForwardShare, Gap, undivided
from torchobs.flight.layout import PHASE_NAMES, Header
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.throughput import Throughput, time_left_s
from torchobs.ranks import labels, state
from torchobs.ranks.comparison import collectives_called, group_progress
from torchobs.ranks.events import NO_EVENTS, Events
from torchobs.ranks.snapshot import Rank, Readings
from torchobs.ranks.state import MemoryUse
from torchobs.support import text

MOST_COMPARED = 256
"""Living ranks of a run up to which they are compared by their last steps: with more that takes as long as all else"""
WHOLES = {"cgroup": "container", "machine": "machine"}
"""Names for people of the limits on the host's memory"""
SORTS = ("worst", "rank", "step", "time", "loss", "norm", "memory")
_CLOCKS_DIFFER_S = 0.001
"""Tolerance: one time stamp is in microseconds, and both are converted between clocks."""
_SETTLED_S = 2.0
"""Time without a step after which counts that are published once a second are complete"""
_ENDED_BY_ITSELF = frozenset({"finished", "exception", "exit_code"})


class Step(NamedTuple):
    """One step with all its values, late ones included. Times in seconds, ``end_s`` Unix; ``None`` where unknown."""

    step: int
    end_s: float
    duration_s: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    phases: tuple[float, ...]
    """seconds in each of ``PHASE_NAMES``, and the gap: the record's own tuples, for a thousand ranks a second"""
    tokens: int
    skipped: bool
    clipped: bool
    new_model: bool = False
    """the first step of a model: baselines of earlier steps do not apply"""
    losses: int = 0
    """backward passes that the loss sums over"""
    gap_s: Gap | None = None

    @property
    def phase_s(self) -> Mapping[str, float]:
        """Seconds by phase of this step alone, as far as they are finite."""
        return _named(undivided(self.phases, self.gap_s))

    def divided_s(self, share: ForwardShare) -> Mapping[str, float]:
        """Return the seconds by phase, for sums and means of steps."""
        return {**_named(self.phases), **_named(share.divide(self.phases, self.gap_s), ("forward", "other", "between"))}


def _named(phases: Sequence[float], names: Sequence[str] = PHASE_NAMES) -> dict[str, float]:
    return {name: seconds for name, seconds in zip(names, phases, strict=True) if isfinite(seconds)}


class Recorded(NamedTuple):
    """Contents of a rank's rings, beyond the metrics of a snapshot."""

    steps: tuple[Step, ...] = ()
    """the newest ones, oldest first"""
    pace: Throughput | None = None
    """over the latest steps"""
    events: Events = NO_EVENTS
    share: ForwardShare = NO_SHARE
    """by which sums and means of steps are divided"""


NOT_READ = Recorded()


@dataclass(frozen=True, eq=False)
class RankView:
    """One rank. Times are Unix seconds, ages seconds."""

    header: Header
    job_name: str
    run_id: str
    rank: str
    """these three as on the metrics page, not sanitised"""
    state: str
    """one of ``catalog.RANK_STATES``"""
    reason: str
    """one of ``catalog.EXIT_REASONS``; empty while it runs"""
    up: bool
    readings: Readings
    last_s: float
    """time of the last sign of life"""
    phase: str | None = None
    """the present phase, or that of its end"""
    phase_begun_s: float | None = None
    beat_age_s: float = 0.0
    progress_age_s: float | None = None
    """since the last step, or the start; ``None``: it has ended, or does not record"""
    recorded: bool = True
    """False if the rank lives and recording of steps was switched off"""
    standstill: Standstill | None = None
    """the time that a living rank has made no step"""
    slowness: Slowness | None = None
    """beside the other ranks of its replica group"""
    raised: Mapping[str, str] = field(default_factory=dict)
    """the newest exception of its main thread, as attributes of ``catalog.RANK_EXCEPTION``"""
    exit_code: int = 0
    steps: tuple[Step, ...] = ()
    """the newest ones, oldest first"""
    pace: Throughput | None = None
    """over its latest steps, whatever it does now"""
    events: Events = NO_EVENTS
    share: ForwardShare = NO_SHARE
    """of the forward pass, by which sums and means of its steps are divided"""
    # of a file alone:
    source: str = ""
    """the file's name"""
    problems: tuple[str, ...] = ()
    """parts that could not be read, or are not trustworthy"""
    same_boot: bool = True
    rebooted: bool = False
    """its machine is this one, and has been started again since"""
    memory_use: MemoryUse = field(default_factory=MemoryUse)
    details: Mapping[str, Any] = field(default_factory=dict)
    """how the run was started (``flight.details``); empty if that is turned off"""
    history: History = field(default_factory=History)
    """gauges over time, since the start"""
    left: tuple[ArtifactName, ...] = ()
    """non-empty artifacts of the rank"""
    frames: tuple[str, ...] = ()
    """frames of the training thread in the stacks written after its last step, the innermost first; empty: none are here"""
    crash: tuple[str, ...] = ()
    """frames of the thread that crashed, the innermost first; empty: none did, or it ran no Python code"""
    copied: bool = False
    """a copy or a part of a file, which does not show whether its process still runs"""
    partial: bool = False
    """some data is missing or damaged (see ``problems``): its absence proves nothing"""
    end_known: bool = True
    """True if the exit word is readable"""
    unwritten: bool = False
    """it ended without an exit record, its file on a disk: its last moments, 100 ms by intent, are missing"""

    # -- who it is -----------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, str]:
        """job_name and run_id, for people."""
        return text.clean(self.job_name), text.clean(self.run_id)

    @property
    def incarnation(self) -> str:
        """Id of its process, in hexadecimal."""
        return self.header.incarnation.hex()

    @property
    def restart(self) -> int:
        """Number of the attempt, from 0."""
        return labels.number(self.header.resource, "restart") or 0

    def described(self, name: str) -> str:
        """Return a fact of the process (``catalog.RANK_INFO``); empty if unknown."""
        value = self.header.resource.get(name)
        return "" if value is None else text.clean(value)

    # -- its numbers ---------------------------------------------------------------------------------------------------------

    def value(self, metric: Metric, *attributes: str) -> float | None:
        """Return the value of a series; ``None`` if absent."""
        return self.readings.get(metric, *attributes)

    def values(self, metric: Metric) -> Mapping[tuple[str, ...], float]:
        """Return the values of a metric's series by those of all its attributes, which are sorted by name."""
        return self.readings.values(metric)

    def count(self, metric: Metric, *attributes: str) -> int:
        """Return the value of a series that counts; 0 if absent."""
        return int(self.readings.get(metric, *attributes) or 0)

    def by_attribute(self, metric: Metric) -> dict[str, float]:
        """Return the values of a metric's series by their single attribute."""
        return {text.clean(key[0]): value for key, value in self.readings.values(metric).items() if len(key) == 1}

    def events_named(self, event: catalog.Event) -> list[Event]:
        """Return the events of that name, oldest first."""
        return self.events.select(event)

    # -- how long, how far ---------------------------------------------------------------------------------------------------

    @property
    def start_s(self) -> float:
        """When recording began."""
        return self.header.wall_ns / 1e9

    @property
    def progress_s(self) -> float:
        """When its last step ended, else when recording began."""
        return self.steps[-1].end_s if self.steps else self.start_s

    @property
    def begun_s(self) -> float:
        """The moment from which a report counts time: when the process began, else when recording did."""
        return self.header.begun_s

    @property
    def since(self) -> str:
        """That moment, in words."""
        return "the process began" if self.begun_s < self.start_s else "init()"

    @property
    def lifetime(self) -> str:
        """How long it has lived, and since when, in words: to its last sign of life, or by goodput, which covers its end."""
        lived_s = max(self.last_s - self.begun_s, sum(self.by_attribute(catalog.GOODPUT_TIME).values()))
        return f"{text.duration(lived_s)} since {self.since}"

    @property
    def ran_s(self) -> float:
        """From its start to its last sign of life."""
        return max(0.0, self.last_s - self.start_s)

    @property
    def last_step(self) -> int:
        """The number of the newest step; 0 before the first, and if unknown.

        In a partial file only the counter may have it.
        """
        newest = self.steps[-1].step if self.steps else 0
        return max(newest, self.count(catalog.STEPS)) if self.partial else newest

    @property
    def done(self) -> int:
        """Number of steps that it has made."""
        return self.count(catalog.STEPS) or self.last_step

    @property
    def newest_is_here(self) -> bool:
        """Whether ``steps`` includes the rank's last step."""
        counted = self.value(catalog.STEPS) is not None
        return not self.partial or (counted and bool(self.steps) and self.steps[-1].step >= self.count(catalog.STEPS))

    @property
    def speed(self) -> Throughput | None:
        """Its throughput while it trains; ``None`` if it has ended, hangs or does something else."""
        pace = self.pace if state.trains(self.state, self.phase, self.standstill, recorded=self.recorded) else None
        # backward passes without a step are no standstill, but what was measured before them says nothing about now
        age_s = 0.0 if self.phase in PATIENT_PHASES else self.progress_age_s or 0.0
        return pace if pace and pace.per_s and age_s <= max(LEAST_S, pace.window_s) else None

    @property
    def left_s(self) -> float | None:
        """Estimated time for the remaining steps, in seconds; ``None`` if unknown."""
        aside_s = sum(self.value(catalog.GOODPUT_TIME, name) or 0.0 for name in ("evaluation", "checkpoint"))
        return time_left_s(self.speed, self.count(catalog.STEPS), self.value(catalog.STEPS_PLANNED) or 0, aside_s)

    # -- loss, gradients, learning rate --------------------------------------------------------------------------------------

    @cached_property
    def losses(self) -> Mapping[int, float]:
        """The last losses by step."""
        return {step.step: step.loss for step in self.steps if step.loss is not None}

    @cached_property
    def norms(self) -> Mapping[int, float]:
        """The last gradient norms by step."""
        return {step.step: step.grad_norm for step in self.steps if step.grad_norm is not None}

    @property
    def loss(self) -> float | None:
        """The last loss, finite or not. NaN in such an anomaly without a record of it: the metric has the last finite loss."""
        return self._last(catalog.LOSS, "nonfinite_loss", (step.loss for step in reversed(self.steps)))

    @property
    def grad_norm(self) -> float | None:
        """The last one that was measured, likewise."""
        return self._last(catalog.GRAD_NORM, "nonfinite_gradient", (step.grad_norm for step in reversed(self.steps)))

    def _last(self, metric: Metric, anomaly: str, latest: Iterator[float | None]) -> float | None:
        # from the records: they distinguish NaN from infinity
        newest = next((value for value in latest if value is not None), None)
        if newest is not None and not isfinite(newest):
            return newest
        return nan if newest is None and anomaly in self.anomalies else self.value(metric)

    @property
    def measured_norms(self) -> int:
        """Number of steps in which the gradient norm was measured, of the whole run."""
        finite = self.readings.distribution(catalog.GRAD_NORM_DISTRIBUTION)
        return sum(finite.counts if finite else ()) + self.count(catalog.GRAD_NONFINITE_STEPS)

    @cached_property
    def anomalies(self) -> tuple[str, ...]:
        """Kinds that are active now."""
        active = self.values(catalog.ANOMALY_ACTIVE)
        return tuple(kind for kind in catalog.ANOMALY_KINDS if active.get((kind,)))

    @cached_property
    def counted(self) -> Mapping[str, int]:
        """Anomalies since the start, by kind."""
        numbers = self.values(catalog.ANOMALIES)
        return {kind: int(numbers.get((kind,), 0)) for kind in catalog.ANOMALY_KINDS}

    @cached_property
    def lately(self) -> Mapping[str, int]:
        """Anomalies of the last ten minutes by kind, and workers that died, as far as its events say."""
        return self.events.lately(self.last_s + self.beat_age_s)

    @cached_property
    def past(self) -> Mapping[str, int]:
        """Healthy steps since the last anomaly, of the kinds from which the training has recovered (``detect.spikes``)."""
        over = [kind for kind, count in self.counted.items() if count and kind not in self.anomalies]
        last = self.events.anomalies
        steps = {kind: healthy_steps(kind, self.counted[kind], last.get(kind), self.losses, self.norms) for kind in over}
        return {kind: number for kind, number in steps.items() if number}

    @cached_property
    def zero_rate(self) -> ZeroRate | None:
        """Since when all learning rates are zero, or almost."""
        began = next((step.step for step in reversed(self.steps) if step.new_model), 0)
        zero = zero_rate([(step.step, step.learning_rate) for step in self.steps], began)
        if zero is None:
            return None
        others = [self.value(catalog.LEARNING_RATE, str(group)) for group in range(1, OTHER_GROUPS + 1)]
        trains = others[-1] is not None or any((rate or 0.0) > NEGLIGIBLE * zero.highest for rate in others)
        return None if trains else zero

    @property
    def scale(self) -> float | None:
        """The smallest loss scale."""
        return min(self.values(catalog.AMP_SCALE).values(), default=None)

    # -- beside other ranks --------------------------------------------------------------------------------------------------

    @cached_property
    def alike_norms(self) -> Mapping[int, float]:
        """Its gradient norms if DistributedDataParallel makes them the same on all ranks; else none.

        Where a rank's norm is that of its own shard they are not.
        """
        # known before the first backward has been measured
        is_ddp = any("ddp" in kinds.split("+") for attributes in self.values(catalog.DISTRIBUTED_INFO) for kinds in attributes)
        return self.norms if is_ddp and (self.value(catalog.GRAD_NORM_RANKS) or 1.0) <= 1.0 else {}

    @cached_property
    def weights(self) -> Mapping[int, tuple[float, ...]]:
        """Values of its weights that it recorded to be compared, by step."""
        return self.events.replicas(catalog.EVENT_REPLICA_WEIGHTS)

    @cached_property
    def batches(self) -> Mapping[int, tuple[float, ...]]:
        """Values of its batches that it recorded to be compared, by step."""
        return self.events.replicas(catalog.EVENT_REPLICA_BATCHES)

    @cached_property
    def collectives(self) -> Mapping[str, GroupProgress]:
        """Progress in each process group while no step ends; empty: unknown."""
        return group_progress(self.values)

    @cached_property
    def called(self) -> Mapping[str, int]:
        """Collectives that it called in each process group, if it stands still or ended by itself."""
        # the counts are published once a second and at its end
        settled = self.reason in _ENDED_BY_ITSELF or (self.progress_age_s or 0.0) - self.beat_age_s >= _SETTLED_S
        return collectives_called(self.values) if settled else {}

    # -- time and memory -----------------------------------------------------------------------------------------------------

    @property
    def phase_times(self) -> dict[str, float]:
        """Seconds in each phase of its steps."""
        times = self.values(catalog.STEP_PHASE_TIME)
        return {phase: times.get((phase,), 0.0) for phase in catalog.PHASES}

    @property
    def waiting(self) -> float | None:
        """Share of step time spent waiting for data; ``None`` if it is acceptable.

        A living rank judges the last minute itself (``detect.speed``); before its first verdict, and after its end, the totals
        decide.
        """
        phases = self.phase_times
        trained_s = sum(phases.values())
        verdict = self.value(catalog.DATA_STARVED) if self.up else None
        if verdict:
            return phases["data"] / trained_s if trained_s > 0 else 0.0
        if verdict is not None and trained_s >= speed.WINDOW_S:
            return None
        return speed.waiting_share(phases["data"], trained_s)

    @property
    def between(self) -> float | None:
        """Share of step time in other and between, if it is large."""
        return speed.between_share(self.phase_times)

    @property
    def memory(self) -> float | None:
        """Bytes that the rank has on its devices; without devices those of its process."""
        reserved = self.values(catalog.MEMORY_DEVICE_RESERVED)
        return sum(reserved.values()) if reserved else self.value(catalog.MEMORY_HOST_RSS)

    @property
    def memory_limit(self) -> str:
        """How full the fullest device is, in words; without devices the container or the machine; empty if unknown."""
        reserved, limits = self.values(catalog.MEMORY_DEVICE_RESERVED), self.values(catalog.MEMORY_DEVICE_LIMIT)
        if reserved:
            shares = [(size / limits[device], device[0]) for device, size in reserved.items() if limits.get(device)]
            share, device = max(shares, default=(0.0, ""))
            return f"{text.percent(share)} of {device}" if device else ""
        used = [(share, limit) for (limit,), share in self.values(catalog.MEMORY_HOST_UTILIZATION).items()]
        share, limit = max(used, default=(0.0, ""))
        return f"{WHOLES.get(limit, limit)} {text.percent(share)} full" if limit else ""

    @property
    def probes_off(self) -> tuple[str, ...]:
        """Probes that failed."""
        disabled = self.values(catalog.PROBE_DISABLED)
        return tuple(probe for probe in PROBES if disabled.get((probe,)))

    # -- its end -------------------------------------------------------------------------------------------------------------

    @property
    def main_exceptions(self) -> list[Event]:
        """The exceptions that can have ended the rank: those of its main thread."""
        return [fact for fact in self.events.select(catalog.EVENT_EXCEPTION) if not fact.text("thread")]

    @property
    def exception(self) -> str:
        """The exception that ended the rank, in words; empty if none did, or it is unknown."""
        if self.reason != "exception":
            return ""
        last = [state.exception_attributes(fact.attributes) for fact in self.main_exceptions[-1:]]
        return text.clean(state.exception_in_words(last[0] if last else self.raised))

    @property
    def trouble(self) -> float:
        """How urgently it needs attention."""
        by_state = {"lost": 6.0, "failed": 6.0, "hung": 5.0, "unresponsive": 4.0}.get(self.state, 0.0)
        slow = self.slowness.factor - 1 if self.slowness and self.slowness.factor > 1 else 0.0
        # rounded, so that nearly equal ranks keep their order
        return round(by_state + 3.0 * bool(self.standstill) + 2.0 * bool(self.anomalies) + min(slow, 1.0), 1)


@dataclass(frozen=True, eq=False)
class RunView:
    """The ranks of one run, in the order of their numbers."""

    ranks: tuple[RankView, ...]
    expected: int
    """number of ranks expected on this machine"""
    world_size: int

    @property
    def job_name(self) -> str:
        """As on the metrics page."""
        return self.ranks[0].job_name

    @property
    def run_id(self) -> str:
        """As on the metrics page."""
        return self.ranks[0].run_id

    @property
    def key(self) -> str:
        """The run's key in links."""
        return f"{self.job_name}/{self.run_id}"

    @property
    def steps(self) -> int:
        """Number of steps that the rank with the most has done."""
        return max((rank.done for rank in self.ranks), default=0)

    @property
    def total_steps(self) -> int:
        """Number of steps that are planned; 0 if unknown."""
        return max((rank.count(catalog.STEPS_PLANNED) for rank in self.ranks), default=0)

    @property
    def left_s(self) -> float | None:
        """Estimated time for the remaining steps of its slowest rank, in seconds; ``None`` if unknown."""
        return max((seconds for rank in self.ranks if (seconds := rank.left_s) is not None), default=None)


def view_of(rank: Rank, readings: Readings, recorded: Recorded = NOT_READ) -> RankView:
    """Return the view of a snapshot's rank, with the contents of its rings as far as they have been read."""
    header, live, up = rank.view.header, rank.view.live, rank.up
    begun_s = None if live.phase_begun_ns is None else header.wall_s(live.phase_begun_ns)
    # a signal's mark is later than the last heartbeat
    marked_s = 0.0 if rank.terminated_age_s is None else max(0.0, rank.beat_age_s - rank.terminated_age_s)
    last_step_s = recorded.steps[-1].end_s if recorded.steps else None
    # the sampler thread writes the phase ten times a second, the training thread the step's end: code that holds the GIL
    # right after a step leaves the phase of an earlier one
    stale = begun_s is not None and last_step_s is not None and begun_s < last_step_s - _CLOCKS_DIFFER_S
    records = not up or live.steps_since_ns is not None
    return RankView(
        header=header,
        job_name=rank.job_name,
        run_id=rank.run_id,
        rank=rank.rank,
        state=rank.state,
        reason=rank.reason,
        up=up,
        readings=readings,
        last_s=header.wall_s(live.heartbeat_ns or rank.view.last_step_ns or header.monotonic_ns) + marked_s,
        phase=None if stale else live.phase,
        phase_begun_s=None if stale else begun_s,
        beat_age_s=rank.beat_age_s,
        progress_age_s=rank.progress_age_s,
        recorded=records,
        standstill=rank.standstill if up else None,
        slowness=rank.standing.slowness if rank.standing else None,
        raised=rank.exception,
        crash=rank.crash,
        exit_code=live.exit_code,
        steps=recorded.steps,
        pace=recorded.pace if records else None,
        events=recorded.events,
        share=recorded.share,
        memory_use=MemoryUse() if up else state.last_memory(rank.view),
    )


def run_of(ranks: Sequence[RankView], expected: int = 0, world_size: int = 0) -> RunView:
    """Return a run of one rank or more, with the slowness of its living ranks, or of all if none lives.

    By their last steps, unless the scanner has compared them over a longer time. ``expected``: number of its ranks that this
    node should have.
    """
    compared = [rank for rank in ranks if rank.up] or ranks
    if 1 < len(compared) <= MOST_COMPARED and not any(rank.slowness for rank in ranks):
        slow: dict[str, Slowness] = {}
        for team in labels.teams(compared):
            slow |= speed.slowness({rank.rank: rank.pace.spent for rank in team if rank.pace})
        if slow:
            ranks = [replace(rank, slowness=slow.get(rank.rank)) for rank in ranks]
    return RunView(tuple(ranks), max(expected, len(ranks)), max(world_size, expected, len(ranks)))


def run_at_end(ranks: Sequence[RankView]) -> RunView:
    """Return a run of views of files, at the last sign of life of any rank."""
    last_s = max(rank.last_s for rank in ranks)
    aged = [
        replace(rank, beat_age_s=max(0.0, last_s - rank.last_s), progress_age_s=max(0.0, last_s - rank.progress_s))
        for rank in ranks
    ]
    return run_of(aged, started_here(ranks), max(labels.number(rank.header.resource, "world_size") or 0 for rank in ranks))


def started_here(ranks: Sequence[RankView]) -> int:
    """Return how many ranks the launcher started on the machine of these; 0 if unknown, or of several machines."""
    sizes = {rank.header.resource.get("local_world_size") for rank in ranks}
    size = sizes.pop() if len(sizes) == 1 and len({rank.described("host") for rank in ranks}) == 1 else None
    return size if isinstance(size, int) else 0


def ordered(ranks: Sequence[RankView], sort: str) -> list[RankView]:
    """Return the ranks sorted by one of :data:`SORTS`; where values are equal or missing, by rank number."""
    keys: dict[str, Callable[[RankView], float]] = {
        "worst": lambda rank: -rank.trouble,
        "step": lambda rank: rank.done,
        "time": lambda rank: -(rank.pace.step_s if rank.pace else -1.0),
        "loss": lambda rank: descending(rank.loss),
        "norm": lambda rank: descending(rank.grad_norm),
        "memory": lambda rank: descending(rank.memory),
    }
    return sorted(ranks, key=keys[sort]) if sort in keys else list(ranks)


def descending(value: float | None) -> float:
    """Return a sort key for descending order: NaN first, missing values last."""
    return inf if value is None else -inf if isnan(value) else -value


def whole_steps(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records of the steps, oldest first, each with the values that devices delivered later."""
    late: dict[int, list[StepRecord]] = {}
    for record in records:
        if record.kind == RecordKind.LATE:
            late.setdefault(record.step, []).append(record)
    steps = [record for record in records if record.kind == RecordKind.STEP]
    return [_merged([record, *late[record.step]]) if record.step in late else record for record in steps]


def _merged(parts: Sequence[StepRecord]) -> StepRecord:
    first, flags = parts[0], 0
    loss, norm, rate = first.loss, first.grad_norm, first.learning_rate
    for part in parts:
        flags |= part.flags
        loss = part.loss if part.flags & StepFlag.LOSS else loss
        norm = part.grad_norm if part.flags & StepFlag.GRAD_NORM else norm
        rate = part.learning_rate if part.flags & StepFlag.LEARNING_RATE else rate
    return first._replace(
        flags=flags & ~StepFlag.UNTIMED | first.flags & StepFlag.UNTIMED, loss=loss, grad_norm=norm, learning_rate=rate,
        losses=max(part.losses for part in parts), tokens=sum(part.tokens for part in parts),
        samples=sum(part.samples for part in parts),
    )  # fmt: skip


def steps_of(records: Sequence[StepRecord], header: Header, earlier: Sequence[Step] = ()) -> tuple[Step, ...]:
    """Merge late records into their steps; oldest first. ``earlier``: steps from an earlier call with some of these records."""
    late = {record.step for record in records if record.kind == RecordKind.LATE}
    before = {step.step: step for step in earlier if step.step not in late}
    return tuple([before.get(record.step) or _step(record, header) for record in whole_steps(records)])


def _step(record: StepRecord, header: Header) -> Step:
    flags = record.flags
    return Step(
        step=record.step,
        end_s=header.wall_s(record.end_ns),
        duration_s=record.duration_s if not flags & StepFlag.UNTIMED and isfinite(record.duration_s) else None,
        loss=record.loss if flags & StepFlag.LOSS else None,
        grad_norm=record.grad_norm if flags & StepFlag.GRAD_NORM else None,
        learning_rate=record.learning_rate if flags & StepFlag.LEARNING_RATE else None,
        phases=record.phase_s,
        tokens=record.tokens,
        skipped=bool(flags & StepFlag.SKIPPED),
        clipped=bool(flags & StepFlag.CLIPPED),
        new_model=bool(flags & StepFlag.NEW_MODEL),
        losses=record.losses,
        gap_s=record.gap_s,
    )


def missing_records(records: Sequence[StepRecord], room: int, readings: Readings) -> int:
    """Return how many step records of a dead rank are missing from a ring with ``room`` for so many.

    Numbers are consecutive, except those that the fold counted as lost; the counter has the newest step. The oldest record may
    just have been overwritten.
    """
    first, newest = (records[0].seq, records[-1].seq) if records else (1, 0)
    oldest = max(1, newest - room + 1)
    if 1 < oldest == first - 1:
        oldest = first
    gaps = newest - oldest + 1 - len(records) - int(readings.get(catalog.FLIGHT_DROPPED, "record") or 0)
    last = max((record.step for record in records if record.kind == RecordKind.STEP), default=0)
    uncounted = int(readings.get(catalog.STEPS) or 0) - last
    return min(max(0, gaps) + max(0, uncounted), room)


def model_begins(steps: Sequence[Step], end: int) -> int:
    """Return the index of the first available step of the model that was trained in ``steps[end]``."""
    return next((index for index in range(min(end, len(steps) - 1), 0, -1) if steps[index].new_model), 0)
