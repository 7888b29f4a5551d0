"""The runs of a directory, with a verdict on those that have ended: for the API and for messages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchobs.diagnosis.action import Verdict, end_of, verdict
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.ranks.live import MOST_RUNS, DetailsReader, RunsReader
from torchobs.ranks.rank_view import NOT_READ, view_of
from torchobs.ranks.snapshot import readings_of

if TYPE_CHECKING:
    from torchobs.detect.action import End
    from torchobs.ranks.rank_view import RankView, RunView
    from torchobs.ranks.scanner import Scanner
    from torchobs.ranks.snapshot import Snapshot

_MOST_ENDS = 4096


class Outcomes:
    """Reads runs, and keeps how their ranks ended: the scanner soon drops the attempt before."""

    def __init__(self) -> None:
        self._details, self._runs = DetailsReader(), RunsReader()
        self._ends: dict[tuple[str, str, str], dict[str, End]] = {}
        """the last two ends of a rank, by incarnation"""
        self._verdicts: dict[object, Verdict] = {}
        """verdicts on runs that have ended, until something changes: thousands of ranks take a second"""

    def read(self, scan: Scanner, snapshot: Snapshot) -> tuple[RunView, ...]:
        """Return the runs; to be called in the scan thread."""
        details = self._details.gather(scan, replace(snapshot, ranks=(*snapshot.left, *snapshot.ranks)), ())
        runs = self._runs.runs(snapshot, details)
        left = [view_of(rank, readings_of(rank), details.get(rank.incarnation, NOT_READ)) for rank in snapshot.left]
        for view in (*left, *(rank for run in runs for rank in run.ranks)):
            if not view.up:
                self._remember(view)
        return runs

    def verdict(self, run: RunView) -> Verdict:
        """Return the verdict on a run that has ended."""
        key = run.key, tuple((rank.incarnation, rank.reason, len(rank.events.facts)) for rank in run.ranks)
        if key not in self._verdicts:
            self._verdicts = dict([*self._verdicts.items()][-MOST_RUNS:])
            self._verdicts[key] = self._decide(run)
        return self._verdicts[key]

    def _decide(self, run: RunView) -> Verdict:
        principal = diagnose_run(run.ranks).principal
        first = run.ranks[principal]
        ends = self._ends.get((run.job_name, run.run_id, first.rank), {})
        return verdict(run.ranks, principal, next((end for name, end in ends.items() if name != first.incarnation), None))

    def _remember(self, view: RankView) -> None:
        key = (view.job_name, view.run_id, view.rank)
        ends = self._ends.pop(key, {})
        ends[view.incarnation] = end_of(view)
        self._ends[key] = dict([*ends.items()][-2:])
        if len(self._ends) > _MOST_ENDS:
            del self._ends[next(iter(self._ends))]


def has_ended(run: RunView) -> bool:
    """Return whether none of its ranks lives."""
    return not any(rank.up for rank in run.ranks)
