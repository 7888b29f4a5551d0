"""Status and health of a run from its rank reports, with the same texts as the live page. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect import stragglers
from torchobs.diagnosis import health
from torchobs.diagnosis.status import RankStatus, RunStatus, last_loss, rank_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.diagnosis.health import Health
    from torchobs.diagnosis.rank_report import RankReport


def run_health(ranks: Sequence[RankReport], now_s: float | None = None) -> Health:
    """Return the health of a run. ``now_s``: Unix time; by default the last sign of life of any rank."""
    last_s = max(facts.last_s for facts in ranks) if now_s is None else now_s
    local = {facts.header.resource.get("local_world_size") for facts in ranks}
    expected = local.pop() if len(local) == 1 and len({facts.described("host") for facts in ranks}) == 1 else None
    world_size = max((size for facts in ranks if isinstance(size := facts.header.resource.get("world_size"), int)), default=0)
    here = max(expected if isinstance(expected, int) else 0, len(ranks))
    return health.health(RunStatus(statuses(ranks, last_s), here, max(world_size, here)))


def statuses(ranks: Sequence[RankReport], now_s: float | None = None) -> list[RankStatus]:
    """Return the status of each rank of a run, compared with the others by their latest steps."""
    slow = stragglers.slowness({facts.rank: facts.pace.spent for facts in ranks if facts.pace})
    return [replace(status(facts, now_s), slowness=slow.get(facts.rank)) for facts in ranks]


def status(facts: RankReport, now_s: float | None = None) -> RankStatus:
    """Return a rank's status. ``now_s``: Unix time, by default its last sign of life."""
    last_s = facts.last_s if now_s is None else now_s
    trains = facts.state == "alive" and facts.phase != "idle" and facts.pace is not None
    newest = next((step.loss for step in reversed(facts.steps) if step.loss is not None), None)
    return rank_status(
        facts.value,
        rank=facts.rank,
        state=facts.state,
        reason=facts.reason,
        up=facts.up,
        phase=facts.phase,
        recorded=True,
        beat_age_s=max(0.0, last_s - facts.last_s),
        progress_age_s=max(0.0, last_s - (facts.steps[-1].end_s if facts.steps else facts.start_s)),
        per_s=facts.pace.per_s if trains and facts.pace else None,
        loss=last_loss(facts.value, newest),
        steps=int(facts.value(catalog.STEPS) or facts.last_step),
    )
