"""Comparison of a run's ranks on this machine, within each replica group, and the run's summary.

Across machines recording rules do this: every exporter sees only its own ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import groupby
from math import isfinite, sqrt
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect import hangs, speed
from torchobs.detect.hangs import GroupProgress
from torchobs.detect.speed import Spent
from torchobs.ranks import labels
from torchobs.ranks.snapshot import Rank, RankStanding, Reader, Readings, RunSummary, Stalled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchobs.catalog import Metric


COLLECTIVE_METRICS = (
    catalog.COLLECTIVE_ENQUEUED, catalog.COLLECTIVE_COMPLETED, catalog.COLLECTIVE_PENDING_AGE,
    catalog.COLLECTIVE_PENDING_SIZE,
)  # fmt: skip
"""The metrics that :func:`group_progress` reads"""


def collectives_called(values_of: Callable[[Metric], Mapping[tuple[str, ...], float]]) -> dict[str, int]:
    """Return how many collectives a rank has called in each process group that is known; ``values_of``: as below."""
    counts = values_of(catalog.COLLECTIVE_ENQUEUED).items()
    return {f"{key[1]} ({key[0]})": int(number) for key, number in counts if len(key) == 2 and isfinite(number)}  # noqa: PLR2004  # attributes


def group_progress(values_of: Callable[[Metric], Mapping[tuple[str, ...], float]]) -> dict[str, GroupProgress]:
    """Return a rank's progress in each process group while it makes no step; empty while it makes steps, and if unknown.

    ``values_of``: looks up a metric's values by those of its attributes, which are sorted by name.
    """
    counters = values_of(catalog.COLLECTIVE_ENQUEUED), values_of(catalog.COLLECTIVE_COMPLETED)
    sizes = values_of(catalog.COLLECTIVE_PENDING_SIZE)
    progress = {}
    for key, age_s in values_of(catalog.COLLECTIVE_PENDING_AGE).items():
        numbers = [number for counter in counters if (number := counter.get(key[:2])) is not None]
        if len(key) == 3 and len(numbers) == len(counters) and all(map(isfinite, (*numbers, age_s))):  # noqa: PLR2004  # attributes
            backend, group, operation = key
            enqueued, completed = map(int, numbers)
            progress[f"{group} ({backend})"] = GroupProgress(enqueued, completed, age_s, operation, sizes.get(key))
    return progress


LEAST_STEPS = 16
"""Fewest steps over which a rank is compared."""
WINDOW_NS = 30_000_000_000
"""Shortest time over which a rank is compared, so that a rank with 1 ms steps is not judged by 16 ms."""
_PHASE_KEYS = [(phase,) for phase in catalog.PHASES]
_SAMPLE_NS = 1_000_000_000
_METRICS = (catalog.STEPS, catalog.STEP_PHASE_TIME, catalog.GRAD_NORM, catalog.GRAD_NORM_RANKS)


class RankComparator:
    """Compares the ranks of successive snapshots; keeps each rank's history."""

    def __init__(self) -> None:
        self._reader = Reader(_METRICS)
        self._histories: dict[str, _History] = {}

    def compare(self, ranks: Sequence[Rank], now_ns: int) -> tuple[dict[str, RankStanding], tuple[RunSummary, ...]]:
        """Return the standing of every living rank by incarnation, and a summary of every run; ``ranks`` are sorted by run."""
        self._reader.keep(ranks)
        histories = {rank.incarnation: self._histories.get(rank.incarnation) or _History() for rank in ranks}
        self._histories = histories
        standings: dict[str, RankStanding] = {}
        runs = []
        for _, group in groupby(ranks, lambda rank: (rank.job_name, rank.run_id)):
            read = [(rank, self._reader.read(rank)) for rank in group]
            of_rank = {rank.incarnation: readings for rank, readings in read}
            spread = 0
            for team in labels.teams([rank for rank, _ in read]):
                living = [(rank, of_rank[rank.incarnation]) for rank in team if rank.up]
                for rank, readings in living:
                    histories[rank.incarnation].add(now_ns, readings)
                standings |= _compared(living, histories, is_hung=any(rank.state == "hung" for rank in team))
                steps = [_steps(readings) for rank, readings in living if _is_counted(rank)]
                spread = max(spread, max(steps) - min(steps)) if steps else spread
            runs.append(_summarise(read, spread))
        return standings, tuple(runs)


class _History:
    """History of one rank for the comparison: steps and time in each phase, sampled once a second."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int, tuple[float, ...]]] = deque()

    def add(self, now_ns: int, readings: Readings) -> None:
        steps = _steps(readings)
        times = readings.values(catalog.STEP_PHASE_TIME)
        phases = tuple([times.get(key, 0.0) for key in _PHASE_KEYS])
        marks = self._marks
        if marks and steps == marks[-1][1]:
            return
        if marks and steps < marks[-1][1]:
            marks.clear()
        if len(marks) > 1 and now_ns - marks[-2][0] < _SAMPLE_NS:
            marks.pop()  # replace the newest mark; the others are a second apart
        marks.append((now_ns, steps, phases))
        while len(marks) > 2 and steps - marks[1][1] >= LEAST_STEPS and now_ns - marks[1][0] >= WINDOW_NS:  # noqa: PLR2004  # oldest and newest
            marks.popleft()

    def spent(self) -> Spent | None:
        """Return the times of the steps between the oldest and the newest sample; ``None`` if there are too few."""
        (_, first, before), (_, last, after) = self._marks[0], self._marks[-1]
        steps = last - first
        if steps < LEAST_STEPS:
            return None
        return Spent(steps, [max(0.0, now - then) / steps for now, then in zip(after, before, strict=True)])


def _is_counted(rank: Rank) -> bool:
    """Return whether all steps of the rank were recorded, i.e. recording was never off."""
    return rank.view.live.steps_since_ns == 0


def _compared(
    living: Sequence[tuple[Rank, Readings]], past: Mapping[str, _History], *, is_hung: bool
) -> dict[str, RankStanding]:
    """Return the standing of the living ranks of a replica group. ``is_hung``: whether one of its ranks hangs."""
    furthest = max((_steps(readings) for rank, readings in living if _is_counted(rank)), default=0)
    has_peers = len(living) >= speed.LEAST_RANKS
    spent = {rank.incarnation: times for rank, _ in living if (times := past[rank.incarnation].spent()) is not None}
    slow = speed.slowness(spent)
    return {
        rank.incarnation: RankStanding(
            behind=furthest - _steps(readings) if has_peers and _is_counted(rank) else None,
            slowness=slow.get(rank.incarnation),
            stalled=_stalled(rank, readings) if is_hung and _is_counted(rank) else None,
        )
        for rank, readings in living
        if has_peers or is_hung
    }


def _stalled(rank: Rank, readings: Readings) -> Stalled | None:
    """Return where the rank is; ``None`` if its phase is unknown."""
    phase = rank.view.live.phase
    return None if phase is None else Stalled(phase, hangs.place(_steps(readings), phase))


def _summarise(read: Sequence[tuple[Rank, Readings]], step_spread: int) -> RunSummary:
    ranks = [rank for rank, _ in read]
    here = sum(rank.up for rank, _ in read)
    resources = [rank.view.header.resource for rank in ranks]
    started: dict[int | None, int] = {}  # by replica group: each has ranks of its own
    for resource in resources:
        group, size = labels.number(resource, "replica_group"), labels.number(resource, "local_world_size") or 0
        started[group] = max(started.get(group, 0), size)
    served = Counter(labels.number(resource, "replica_group") for resource in resources)
    return RunSummary(
        job_name=ranks[0].job_name,
        run_id=ranks[0].run_id,
        here=here,
        missing=sum(max(0, size - served[group]) for group, size in started.items()) if any(started.values()) else None,
        step_spread=step_spread,
        grad_norm=whole_norm(
            [(readings.get(catalog.GRAD_NORM), readings.get(catalog.GRAD_NORM_RANKS)) for _, readings in read],
            max(labels.number(resource, "world_size") or 0 for resource in resources),
        ),
    )


def whole_norm(parts: Sequence[tuple[float | None, float | None]], world_size: int) -> float | None:
    """Return the whole gradient's L2 norm from each rank's norm and number of shards N (None: one).

    The squares of N shards add up to the square of the whole. Where several groups of N ranks hold the same shards, or every
    rank holds everything (N = 1), this equals the mean over all ranks of N times the square. ``None`` unless all
    ``world_size`` ranks have a norm.
    """
    squares = [norm * norm * (ranks or 1.0) for norm, ranks in parts if norm is not None]
    if not squares or len(squares) != len(parts) or len(squares) != max(world_size, 1):
        return None
    return sqrt(sum(squares) / len(squares))


def _steps(readings: Readings) -> int:
    return int(readings.get(catalog.STEPS) or 0)
