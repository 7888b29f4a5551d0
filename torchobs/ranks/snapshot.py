"""What one scan of the flight files has found: ranks as they are served, and how they stand among each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchobs import catalog
from torchobs.detect.stragglers import Slowness
from torchobs.flight.reader.reader import View
from torchobs.ranks.exemplars import Shown

STATUSES = ("served", "superseded", "expired", "bad")
REASONS = catalog.EXPORTER_READ_ERRORS.attributes[0].values


class RankStanding(NamedTuple):
    """How a rank stands among those of its run on this machine that live."""

    behind: int | None
    """steps by which the one that has done most is ahead; None: not all of its own were recorded"""
    slowness: Slowness | None
    """by ``detect.stragglers``, which the page and the commands show as well; None: too few steps yet"""

    @property
    def slowdown(self) -> float | None:
        """Its step time over that of its peers, both without waiting."""
        return self.slowness.factor if self.slowness else None

    @property
    def excess_s(self) -> Mapping[str, float]:
        """Seconds per step above the median of its peers, by ``catalog.OWN_PHASES``; empty where there is no slowdown."""
        excess = self.slowness.excess_s if self.slowness else ()
        return {phase: own_s for phase, own_s in zip(catalog.PHASES, excess, strict=False) if phase in catalog.OWN_PHASES}


class RunSummary(NamedTuple):
    """The ranks of a run on this machine."""

    job_name: str
    run_id: str
    here: int
    """that live"""
    missing: int | None
    """that the launcher started here, as it says, and that are not on the page; None: it does not say"""
    step_spread: int
    """steps between the first and the last of those that live, and of which all were recorded"""
    grad_norm: float | None
    """L2 norm of the whole gradient; None: the run has ranks elsewhere, or not all of them have measured one"""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank as it is served. Times in seconds."""

    job_name: str
    run_id: str
    rank: str
    incarnation: str
    info: Mapping[str, str]
    """what describes it, as labels: the same object as long as it is the same rank"""
    state: str
    up: bool
    view: View
    progress_age_s: float | None
    """None: it has ended, or its steps are not recorded"""
    beat_age_s: float
    """since the last heartbeat; for the dead, since their end"""
    ended_in: int | None
    """number of the snapshot in which it was first seen to be dead"""
    opened: int
    """which opening of a file the view is from: while it is the same, so are the objects that stand for its series"""
    standing: RankStanding | None = None
    """among the ranks of its run on this machine; None: it is alone, or does not live"""
    exemplars: Shown = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one scan found. ``taken_ns`` is the exporter's CLOCK_MONOTONIC when it began."""

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
    """those that another incarnation has replaced, as they ended; in each snapshot of ``replaced.TOLD_NS``, and on no page"""


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
"""Before the first scan."""
