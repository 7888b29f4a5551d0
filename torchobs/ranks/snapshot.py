"""Result of one scan of the flight files: the served ranks, and their comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchobs import catalog
from torchobs.detect.stall import Standstill
from torchobs.detect.stragglers import Slowness
from torchobs.flight.reader.reader import View
from torchobs.ranks.exemplars import Shown
from torchobs.ranks.state import ending, last_memory, trains

STATUSES = catalog.EXPORTER_FILES.attributes[0].values
REASONS = catalog.EXPORTER_READ_ERRORS.attributes[0].values


class Stalled(NamedTuple):
    """Where a rank is while a rank of its run hangs."""

    phase: str
    """one of ``catalog.STALL_PHASES``"""
    place: float
    """in steps, by ``detect.hang.place``"""


class RankStanding(NamedTuple):
    """Comparison of a rank with the living ranks of its replica group on this machine."""

    behind: int | None
    """steps behind the rank with the most; None: not all of its own steps were recorded"""
    slowness: Slowness | None
    """by ``detect.stragglers``, as in the page and the commands; None: too few steps yet"""
    stalled: Stalled | None = None
    """where it is; None: no rank of its group on this machine hangs, or unknown"""

    @property
    def slowdown(self) -> float | None:
        """Its step time over what it would be if its peers did not wait for it."""
        return self.slowness.factor if self.slowness else None

    @property
    def excess_s(self) -> Mapping[str, float]:
        """Seconds per step that its peers wait for it, by ``catalog.OWN_PHASES``; empty without a slowdown."""
        excess = self.slowness.excess_s if self.slowness else ()
        return {phase: own_s for phase, own_s in zip(catalog.PHASES, excess, strict=False) if phase in catalog.OWN_PHASES}


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
    standstill: Standstill | None = None
    """that it makes no step; None: it does, or has ended, or does something else that may take long"""

    @property
    def trains(self) -> bool:
        """True while it makes steps, so that it has a speed."""
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
    return sorted(runs.values(), key=_order)


def _order(ranks: Sequence[Rank]) -> tuple[bool, int, str]:
    up = any(rank.up for rank in ranks)
    return not up, -max(rank.view.header.wall_ns for rank in ranks), f"{ranks[0].job_name}/{ranks[0].run_id}"
