"""The runs in a directory of flight files, each in a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchobs.diagnosis import load
from torchobs.diagnosis.load import RunFiles
from torchobs.diagnosis.rank_report import RankReport, last_known
from torchobs.flight.format.event_ring import plain

VERSION = 1
_RECORDS = 64
_WORST_FIRST = ("failed", "lost", "hung", "unresponsive", "alive", "finished")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Times in Unix seconds; ``state`` is the worst of its ranks', ``ended_by`` that rank's reason."""

    job_name: str
    run_id: str
    ranks: int
    world_size: int | None
    attempt: int
    state: str
    ended_by: str
    started: float
    last_seen: float
    steps: int
    loss: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; a non-finite loss is its name."""
        made: dict[str, Any] = plain(asdict(self))
        return made


class RunList(NamedTuple):
    """The runs in a directory, the latest first; the unreadable files with reasons; files that are not read, in words."""

    runs: list[RunSummary]
    bad: list[tuple[str, str]]
    left_out: int
    notes: list[str]


def list_runs(directory: Path) -> RunList:
    """Return the runs in a directory. Raises ``OSError`` when it cannot be read."""
    listed = load.listing(directory)
    bad = list(listed.bad)
    found = []
    for run in load.runs_of(listed.found):
        newest, _ = load.newest(run.files)
        reports, worse = load.load_reports([item.path for item in newest], _RECORDS, evidence=False)
        bad += worse
        if reports:
            found.append(_summary(run, reports))
    return RunList(found, bad, listed.left_out, listed.notes)


def _summary(run: RunFiles, reports: Sequence[RankReport]) -> RunSummary:
    worst = min(reports, key=lambda report: _WORST_FIRST.index(report.state) if report.state in _WORST_FIRST else 0)
    world = worst.header.resource.get("world_size")
    job_name, run_id, _ = worst.identity
    first = min(run.files, key=lambda item: item.header.wall_ns)
    return RunSummary(
        job_name=job_name, run_id=run_id, ranks=len(reports), world_size=world if isinstance(world, int) else None,
        attempt=max(report.restart for report in reports) + 1, state=worst.state, ended_by=worst.reason,
        started=first.header.begun_s, last_seen=max(report.last_s for report in reports),
        steps=max(report.last_step for report in reports),
        loss=last_known([step.loss for step in reports[0].steps]),
    )  # fmt: skip
