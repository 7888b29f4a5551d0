"""The exporter's own metrics, of each rank's state and of itself, for the metrics page and the OTLP push."""

from __future__ import annotations

import platform
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs._version import __version__
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchobs.catalog import Metric
    from torchobs.ranks.snapshot import Rank, RankStanding, RunSummary, Snapshot

_BUILD = {"version": __version__, "python": platform.python_version()}


NO_FAILED_WRITES = dict.fromkeys(catalog.EXPORTER_WRITE_ERRORS.attributes[0].values, 0)


class Scrapes(NamedTuple):
    """Metrics pages served since the start."""

    served: int = 0
    seconds: float = 0.0
    """from a request to its last byte, of all together"""


class PushCounts(NamedTuple):
    """Data points, spans or log records of one signal of the OTLP push."""

    sent: int
    dropped: Mapping[str, int]
    """by reason"""
    queued: int
    failures: int
    """requests that failed and are retried"""


class ScrapeInput(NamedTuple):
    """Input of a metrics page."""

    snapshot: Snapshot
    timeouts: int = 0
    """scans that took too long"""
    problems: tuple[str, ...] = ()
    """configuration problems besides those in the snapshot"""
    pushed: Mapping[str, PushCounts] | None = None
    """counts of the OTLP push by signal; ``None``: nothing is pushed"""
    failed_writes: Mapping[str, int] = NO_FAILED_WRITES
    """by what was to be written"""
    scrapes: Scrapes = Scrapes()
    host: HostFacts | None = None
    """the machine's metrics; ``None``: not collected, or not yet"""


class Sample(NamedTuple):
    """One sample of a metric in the catalog; its attributes do not include the rank's identity."""

    metric: Metric
    attributes: Mapping[str, str]
    value: float


class HostFacts(NamedTuple):
    """The machine's metrics."""

    said: tuple[Sample, ...]
    collection: tuple[Sample, ...]
    """samples about the collection itself"""
    booted_ns: int
    """boot time, when the machine's counters were 0, Unix ns"""


# the same attribute objects at every scrape, so that renderers compare them by identity
_NO_LABELS: Mapping[str, str] = MappingProxyType({})
_STATES = {
    state: tuple(Sample(catalog.RANK_STATE_SET, {"state": other}, float(other == state)) for other in catalog.RANK_STATES)
    for state in catalog.RANK_STATES
}
"""A state set: all states of a rank are on the page, so that averages and absences are right"""
_ENDINGS = {reason: Sample(catalog.RANK_EXIT, {"reason": reason}, 1.0) for reason in catalog.EXIT_REASONS}
_STALL_PHASES = {phase: {"phase": phase} for phase in catalog.STALL_PHASES}
_UP = {up: Sample(catalog.RANK_UP, _NO_LABELS, float(up)) for up in (False, True)}


def of_rank(rank: Rank) -> Iterator[Sample]:
    """Yield the exporter's samples of a rank: its state, how it ended, its description."""
    header, live = rank.view.header, rank.view.live
    yield from _STATES[rank.state]
    yield _UP[rank.up]
    if live.heartbeat_ns:
        yield Sample(catalog.RANK_HEARTBEAT_TIMESTAMP, _NO_LABELS, header.wall_s(live.heartbeat_ns))
    if rank.progress_age_s is not None:
        yield Sample(catalog.RANK_PROGRESS_AGE, _NO_LABELS, rank.progress_age_s)
    yield Sample(catalog.RANK_START_TIME, _NO_LABELS, header.wall_ns / 1e9)
    yield Sample(catalog.RANK_RESTARTS, _NO_LABELS, labels.number(header.resource, "restart") or 0)
    if not rank.up:
        yield _ENDINGS[rank.reason]
    if rank.reason == "exception" and rank.exception:
        yield Sample(catalog.RANK_EXCEPTION, rank.exception, 1.0)
    yield Sample(catalog.RANK_INFO, rank.info, 1.0)
    world_size = labels.number(header.resource, "world_size")
    if world_size is not None:
        yield Sample(catalog.WORLD_SIZE, _NO_LABELS, world_size)
    if rank.standing is not None:
        yield from _of_standing(rank.standing)


def _of_standing(standing: RankStanding) -> Iterator[Sample]:
    if standing.behind is not None:
        yield Sample(catalog.RANK_BEHIND, _NO_LABELS, standing.behind)
    if standing.slowdown is not None:
        yield Sample(catalog.RANK_SLOWDOWN, _NO_LABELS, standing.slowdown)
    yield from by_attribute(catalog.RANK_EXCESS, standing.excess_s)
    if standing.stalled is not None:
        yield Sample(catalog.RANK_STALL_POSITION, _STALL_PHASES[standing.stalled.phase], standing.stalled.place)


def _of_run(run: RunSummary) -> Iterator[Sample]:
    identity = {"job_name": run.job_name, "run_id": run.run_id}
    yield Sample(catalog.RUN_LOCAL_RANKS, identity, run.here)
    yield Sample(catalog.RUN_STEP_SPREAD, identity, run.step_spread)
    if run.missing is not None:
        yield Sample(catalog.RUN_MISSING_RANKS, identity, run.missing)
    if run.grad_norm is not None:
        yield Sample(catalog.RUN_GRAD_NORM, identity, run.grad_norm)


def of_exporter(scrape: ScrapeInput, dropped: Mapping[str, int]) -> Iterator[Sample]:
    """Yield the exporter's samples of itself; ``dropped``: numbers of series not on the page, by reason."""
    snapshot = scrape.snapshot
    yield Sample(catalog.BUILD_INFO, _BUILD, 1.0)
    yield from by_attribute(catalog.EXPORTER_FILES, snapshot.files)
    yield from by_attribute(catalog.EXPORTER_READ_ERRORS, {**snapshot.errors, "timeout": scrape.timeouts})
    yield Sample(catalog.EXPORTER_SCAN_DURATION, {}, snapshot.duration_s)
    yield Sample(catalog.EXPORTER_SCRAPES, {}, scrape.scrapes.served)
    yield Sample(catalog.EXPORTER_SCRAPE_TIME, {}, scrape.scrapes.seconds)
    yield Sample(catalog.EXPORTER_CONFIG_OK, {}, float(not snapshot.problems and not scrape.problems))
    yield Sample(catalog.EXPORTER_DUPLICATES, {}, snapshot.duplicates)
    yield from by_attribute(catalog.EXPORTER_SERIES_DROPPED, dropped)
    yield from by_attribute(catalog.EXPORTER_WRITE_ERRORS, scrape.failed_writes)
    for run in snapshot.runs:
        yield from _of_run(run)
    for signal, counts in (scrape.pushed or {}).items():
        yield from _of_push({"signal": signal}, counts)
    if scrape.host is not None:
        yield from scrape.host.collection


def _of_push(signal: Mapping[str, str], counts: PushCounts) -> Iterator[Sample]:
    yield Sample(catalog.OTLP_SENT, signal, counts.sent)
    for reason, number in counts.dropped.items():
        yield Sample(catalog.OTLP_DROPPED, {**signal, "reason": reason}, number)
    yield Sample(catalog.OTLP_QUEUED, signal, counts.queued)
    yield Sample(catalog.OTLP_FAILURES, signal, counts.failures)


def by_attribute(metric: Metric, values: Mapping[str, float], common: Mapping[str, str] = _NO_LABELS) -> Iterator[Sample]:
    """Yield one sample for each value of the metric's only attribute besides the ``common`` ones."""
    (attribute,) = (attribute for attribute in metric.attributes if attribute.name not in common)
    return (Sample(metric, {**common, attribute.name: name}, value) for name, value in values.items())
