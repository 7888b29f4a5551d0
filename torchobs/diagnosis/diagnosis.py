"""All findings on a rank and on a run, in the order of importance. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from torchobs.catalog.findings import BADGES, Finding, finding
from torchobs.diagnosis import endings, from_events, hangs
from torchobs.diagnosis.endings import compare, first_failed, launcher_ending, stalled_together
from torchobs.diagnosis.health import LEVELS, Health, diagnose, health, standing_still
from torchobs.ranks import labels
from torchobs.ranks.rank_view import RankView, run_at_end


class RunDiagnosis(NamedTuple):
    """The findings on a run: what report, JSON and summary show of it."""

    health: Health
    """as on the live page"""
    together: list[Finding]
    """on the ranks compared with each other, and on processes that only started them"""
    by_rank: list[list[Finding]]
    """:func:`diagnose` of each rank"""
    principal: int
    """index of the rank to show in full: the others of a hung run wait for it; else it failed first; else it hangs; else the
    others had a NaN from it; else it is slow; else it is the first"""

    @property
    def verdict(self) -> Finding:
        """The health's headline, with the worst severity of all findings."""
        levels = (LEVELS[item.severity] for item in chain(self.together, *self.by_rank))
        level = max(self.health.level, *levels, key=lambda level: level.value)
        badge = self.health.badge if level is self.health.level else BADGES[level]
        return finding("verdict", severity=level, badge=badge, headline=self.health.headline)


def diagnose_run(ranks: Sequence[RankView], launchers: Iterable[RankView] = ()) -> RunDiagnosis:
    """Return the findings on a run of one rank or more; ``launchers``: processes that only started the ranks."""
    run = run_at_end(ranks)
    still = {rank.rank for rank in standing_still(run)}  # others wait for a rank that evaluates, saves or compiles
    ranks = [rank if rank.rank in still else replace(rank, standstill=None) for rank in run.ranks]
    together = [*chain.from_iterable(map(launcher_ending, launchers)), *compare(ranks)]
    teams = labels.teams(ranks)
    failed = [first for team in teams if (first := first_failed(team)[0]) is not None]
    first = min(failed, key=lambda report: report.last_s, default=None)
    stuck = (report for report in ranks if report.state not in {"alive", "finished"})
    waited_for = endings.awaited_at_timeout(ranks) or {name for team in teams for name in hangs.blamed(stalled_together(team))}
    named = next((report for report in ranks if report.rank in waited_for), None)
    slow = next((report for report in ranks if report.slowness and report.slowness.is_slow), ranks[0])
    principal = ranks.index(named or first or next(stuck, from_events.source(ranks) or slow))
    return RunDiagnosis(health(run), together, [diagnose(report) for report in ranks], principal)
