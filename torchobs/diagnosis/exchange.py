"""Finding on ranks that exchange nothing, though they are in one process group. Pure.

A stage of a pipeline may send and receive without a collective; but only its last stage has a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import WARNING, Finding
from torchobs.diagnosis.rank_report import RankReport

LEAST_STEPS, LEAST_LIVE_STEPS = 200, 1000
"""Steps without a collective until the rank's end; and while it lives, in which local SGD would have exchanged something"""


def no_exchange(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield that no rank has called a collective for so long, if nothing is known of how they divide the training."""
    apart = [_steps_apart(report) for report in ranks]
    if not apart or not all(apart) or not all(map(_has_loss, ranks)):
        return
    size = max(fact.count("world_size") for report in ranks for fact in report.events_named(catalog.EVENT_NO_COLLECTIVES))
    steps = text_format.plural(min(apart), "step")
    text = f"The {size:,} ranks exchanged nothing in {steps}: no collective was called, and each trains a model of its own"
    yield Finding(
        WARNING, "no_exchange", f"{text}, unless that is meant. Is the model wrapped (DDP, FSDP), and called as such?"
    )


def _has_loss(report: RankReport) -> bool:
    return any(step.loss is not None for step in report.steps[-LEAST_STEPS:])


def _steps_apart(report: RankReport) -> int:
    """Return how many of the last steps were without a collective; 0 if too few."""
    told = report.events_named(catalog.EVENT_NO_COLLECTIVES)
    last = told[-1] if told else None
    if last is None or last.step is None or not last.count("steps"):
        return 0
    known = last.count("steps")
    if report.up:
        return known if known >= LEAST_LIVE_STEPS else 0
    return max(known, report.last_step - last.step + known) if known >= LEAST_STEPS else 0
