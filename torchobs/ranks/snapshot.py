"""Result of one scan of the flight files: the served ranks, and their values by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.catalog import BY_NAME, Metric, cumulative
from torchobs.detect.hangs import Standstill
from torchobs.detect.speed import Slowness
from torchobs.flight.files import cgroup_limit
from torchobs.flight.reader import DecodedBlock, Distribution, View
from torchobs.ranks.labels import Shown
from torchobs.ranks.state import ending, last_memory, trains

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.exporter.config import ExporterConfig
    from torchobs.flight.series import Series


RESERVED_BYTES = 48 << 20
"""Bytes for everything else: 37 MiB idle, API, live page, many connections."""

PUSH_BYTES = 16 << 20
"""Additional bytes for OTLP push: its queue and libraries."""

SERIES_BYTES = 2_750
"""Bytes per series: 1,850 for its line, and 900 for one and a half in the files, see :data:`SERIES_IN_FILES`.

Measured: 2,060 for a rank's own series, 2,440 for 9,600 of an application with lines of 91 characters, 2,820 with 131.
"""

PUSHED_SERIES_BYTES = 3_650
"""Bytes per series with OTLP push, which needs as much again as the files."""

SERIES_IN_FILES = 1.5
"""Series allowed in the files per series on the page. The page drops single series, the files only whole ranks, and only when
they are opened: a rank that grows afterwards is still served."""

MOST_SERIES = 1_000_000


def series_limit(config: ExporterConfig) -> int:
    """Return the number of series that fit into memory, so that the exporter is not killed for memory.

    Computed once, at the start, from the memory limit of the container's cgroup, or ``--memory-limit``; at least a sixth of it
    is for series. A series is a line of the metrics page, as Prometheus counts them: a histogram counts its buckets plus two.
    The bytes above are resident memory after scrapes in two formats, minus that of an exporter without ranks (Python 3.11,
    x86-64), for lines of some 100 characters. Labels of 1,000 characters take more: ``--series-limit-total`` sets another
    limit.
    """
    limit = config.memory_limit or cgroup_limit()
    if limit is None:
        return MOST_SERIES
    pushes = config.push is not None
    room = max(limit - RESERVED_BYTES - PUSH_BYTES * pushes, limit / 6)
    return min(MOST_SERIES, int(room / (PUSHED_SERIES_BYTES if pushes else SERIES_BYTES)))


STATUSES = catalog.EXPORTER_FILES.attributes[0].values
REASONS = catalog.EXPORTER_READ_ERRORS.attributes[0].values


class Stalled(NamedTuple):
    """Where a rank is while a rank of its run hangs."""

    phase: str
    """one of ``catalog.STALL_PHASES``"""
    place: float
    """in steps, by ``detect.hangs.place``"""


class RankStanding(NamedTuple):
    """Comparison of a rank with the living ranks of its replica group on this machine."""

    behind: int | None
    """steps behind the rank with the most; None: not all of its own steps were recorded"""
    slowness: Slowness | None
    """by ``detect.speed``, as in the page and the commands; None: too few steps yet"""
    stalled: Stalled | None = None
    """where it is; None: no rank of its group on this machine hangs, or unknown"""

    @property
    def slowdown(self) -> float | None:
        """Its step time over the same without the time that its peers wait for it."""
        return self.slowness.factor if self.slowness else None

    @property
    def excess_s(self) -> Mapping[str, float]:
        """Seconds per step that its peers wait for it, by ``catalog.LATE_PHASES``; empty without a slowdown."""
        excess = self.slowness.excess_s if self.slowness else ()
        return {phase: own_s for phase, own_s in zip(catalog.PHASES, excess, strict=False) if phase in catalog.LATE_PHASES}


class RunSummary(NamedTuple):
    """The ranks of a run on this machine."""

    job_name: str
    run_id: str
    here: int
    """number of living ranks"""
    missing: int | None
    """ranks that the launcher started on this machine and that are not served; None: unknown"""
    step_spread: int
    """steps between the first and the last of the living ranks with all steps recorded"""
    grad_norm: float | None
    """L2 norm of the whole gradient; None: the run has ranks on other machines, or not all have measured a norm"""


@dataclass(frozen=True, slots=True)
class Rank:
    """A served rank. Times in seconds."""

    job_name: str
    run_id: str
    rank: str
    incarnation: str
    info: Mapping[str, str]
    """descriptive labels: the same object for the whole life of the rank"""
    state: str
    up: bool
    view: View
    progress_age_s: float | None
    """since the last step; None: the rank has ended, or its steps are not recorded"""
    beat_age_s: float
    """since the last heartbeat; for a dead rank, since its end"""
    ended_in: int | None
    """number of the snapshot in which it was first seen to be dead"""
    opened: int
    """counts openings of files: while it is unchanged, the view's series objects are the same"""
    standing: RankStanding | None = None
    """comparison within its run on this machine; None: it is alone or dead"""
    exemplars: Shown = field(default_factory=dict)
    exception: Mapping[str, str] = field(default_factory=dict)
    """attributes of ``catalog.RANK_EXCEPTION``: the newest exception of its main thread; empty: none is in its event ring"""
    crash: tuple[str, ...] = ()
    """frames of the thread that crashed, the innermost first; empty: none did, or it ran no Python code"""
    standstill: Standstill | None = None
    """its time without a step; None: it makes steps, has ended, or does something else that may take long"""
    terminated_age_s: float | None = None
    """since a SIGTERM that it has no handler for; None: none is known"""

    @property
    def trains(self) -> bool:
        """Whether it makes steps, so that it has a speed."""
        live = self.view.live
        return trains(self.state, live.phase, self.standstill, recorded=live.steps_since_ns is not None)

    @property
    def reason(self) -> str:
        """Why it ended, one of ``catalog.EXIT_REASONS``; empty while it lives."""
        live = self.view.live
        return "" if self.up else ending(live.exit_reason, live.exit_code, last_memory(self.view))[1]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Result of one scan. ``taken_ns``: the exporter's CLOCK_MONOTONIC at its begin."""

    number: int
    taken_ns: int
    ranks: tuple[Rank, ...]
    files: Mapping[str, int]
    errors: Mapping[str, int]
    duplicates: int
    problems: tuple[str, ...]
    fading: bool
    duration_s: float
    runs: tuple[RunSummary, ...] = ()
    left: tuple[Rank, ...] = ()
    """superseded ranks with their final state, for ``rank_file.REPORTED_NS`` after their end; not on any page"""


EMPTY = Snapshot(
    number=0,
    taken_ns=0,
    ranks=(),
    files=dict.fromkeys(STATUSES, 0),
    errors=dict.fromkeys(REASONS, 0),
    duplicates=0,
    problems=(),
    fading=False,
    duration_s=0.0,
)
"""The snapshot before the first scan."""


def grouped(ranks: Iterable[Rank]) -> list[list[Rank]]:
    """Return the ranks grouped by run, ordered within each run.

    Runs with a living rank come first, then the most recently started, then by name. This order changes only when a run begins
    or ends, so that nothing moves under the mouse or the eye.
    """
    runs: dict[tuple[str, str], list[Rank]] = {}
    for rank in ranks:
        runs.setdefault((rank.job_name, rank.run_id), []).append(rank)
    return sorted(
        runs.values(),
        key=lambda run: (
            not any(rank.up for rank in run),
            -max(rank.view.header.wall_ns for rank in run),
            f"{run[0].job_name}/{run[0].run_id}",
        ),
    )


Key = tuple[str, ...]
"""Attribute values of a series, in its own order."""
_Place = tuple[int, str, Key, bool]
"""Index of a value in its block, name and key of its series, and whether it stays once the rank is dead"""


class Readings:
    """A rank's values by metric and attribute values. For a dead rank those that stay on the metrics page."""

    __slots__ = ("_distributions", "_values")

    def __init__(self, values: dict[str, dict[Key, float]], distributions: Mapping[str, Distribution] | None = None) -> None:
        self._values, self._distributions = values, distributions or {}

    def get(self, metric: Metric, *key: str) -> float | None:
        """Return one value; ``None`` if absent."""
        values = self._values.get(metric.name)
        return None if values is None else values.get(key)

    def values(self, metric: Metric) -> dict[Key, float]:
        """Return all values of a metric, by the values of its attributes."""
        return self._values.get(metric.name, {})

    def distribution(self, metric: Metric) -> Distribution | None:
        """Return the histogram of a metric without attributes; ``None`` if absent, or not read."""
        return self._distributions.get(metric.name)


def readings_of(rank: Rank) -> Readings:
    """Return all values in a rank's file; for a dead rank also those that do not stay on the metrics page."""
    values: dict[str, dict[Key, float]] = {}
    distributions: dict[str, Distribution] = {}
    for series, value in rank.view.points:
        if series.scope is None and isinstance(value, Distribution):
            distributions[series.name] = value
        elif series.scope is None and not isinstance(value, Distribution):
            values.setdefault(series.name, {})[tuple(str(text) for _, text in series.attributes)] = value
    return Readings(values, distributions)


class Reader:
    """Reads a fixed set of metrics repeatedly."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._names = frozenset(metric.name for metric in metrics)
        self._places: dict[int, dict[int, tuple[tuple[Series, ...], list[_Place]]]] = {}
        """by opening of a file and block: the block's series, and where the values are"""

    def read(self, rank: Rank) -> Readings:
        """Return the rank's values of these metrics."""
        places = self._places.setdefault(rank.opened, {})
        values: dict[str, dict[Key, float]] = {}
        for number, block in enumerate(rank.view.blocks):
            if number not in places or places[number][0] is not block.series:
                places[number] = block.series, list(self._find(block))
            for index, name, key, survives in places[number][1]:
                value = block.values[index]
                if value is not None and (rank.up or survives) and not isinstance(value, Distribution):
                    values.setdefault(name, {})[key] = value
        return Readings(values)

    def keep(self, ranks: Iterable[Rank]) -> None:
        """Drop cached state of all other ranks."""
        kept = {rank.opened for rank in ranks}
        for gone in self._places.keys() - kept:
            del self._places[gone]

    def _find(self, block: DecodedBlock) -> Iterator[_Place]:
        for index, series in enumerate(block.series):
            if series.name in self._names and series.scope is None:
                key = tuple(str(value) for _, value in series.attributes)
                yield index, series.name, key, cumulative(series.kind) or BY_NAME[series.name].survives
