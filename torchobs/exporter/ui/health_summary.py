"""Health of a run for the page: converts the page's rows to the input of ``diagnosis.health``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.catalog import Severity
from torchobs.diagnosis import health as narrator
from torchobs.diagnosis.health import Health
from torchobs.diagnosis.status import RankStatus, RunStatus, rank_status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.exporter.ui.view_model import Row, Run

NOTHING = Health(
    Severity.INFO,
    "No rank has been seen yet. One appears as soon as a training calls torchobs.init().",
    "No rank has been seen yet.",
)


MISSING = Health(
    Severity.INFO,
    "No such run (any more). Once it is there it is shown here.",
    "No such run (any more).",
)
"""Health of a chosen run that does not exist"""


def health(run: Run | None, beside: Iterable[Run] = ()) -> Health:
    """Return the health of a run. ``beside``: the other runs; failed ones are mentioned, too."""
    if run is None:
        return NOTHING
    own = narrator.health(_status(run))
    trouble = [other for other in beside if other is not run and health(other).level is Severity.ERROR]
    if not trouble:
        return own
    names = f"{trouble[0].job_name[:80]} {trouble[0].run_id[:80]}" + (f" and {len(trouble) - 1:,} more" * (len(trouble) > 1))
    text = f"Another run here is in trouble: {names}."
    level = max(own.level, Severity.WARNING, key=lambda level: level.value)
    return Health(level, f"{own.text} {text}", f"{own.gist} {text}")


def _status(run: Run) -> RunStatus:
    return RunStatus([_rank_status(row) for row in run.rows], run.expected, run.world_size)


def _rank_status(row: Row) -> RankStatus:
    return rank_status(
        row.readings.get,
        rank=row.rank,
        state=row.state,
        reason=row.reason,
        up=row.up,
        phase=row.phase,
        recorded=row.recorded,
        beat_age_s=row.beat_age_s,
        progress_age_s=row.progress_age_s,
        per_s=row.speed.per_s if row.speed else None,
        loss=row.loss,
        slowness=row.slowness,
        lately=row.lately,
    )
