"""A live page's model for tests: runs as a snapshot would give them, without a file."""

from __future__ import annotations

from torchobs.detect.stragglers import Slowness
from torchobs.exporter.live.model import Row, Run
from torchobs.exporter.live.readings import Readings
from torchobs.flight.pace import Pace

PACE = Pace(
    steps=64, step_s=0.5, mean_s=0.52, phases_s=(0.05, 0.15, 0.2, 0.08, 0.02), aside_s=0.0, window_s=33.0, per_s=1.9,
    tokens_per_s=31_000.0, samples_per_s=None,
)  # fmt: skip


def row(  # each is what some test is about
    rank: int = 0,
    state: str = "alive",
    *,
    reason: str = "",
    age_s: float = 0.1,
    slow: Slowness | None = None,
    phase: str = "backward",
    anomalies: tuple[str, ...] = (),
    **given: float | None,
) -> Row:
    """A rank 12,400 steps into its training, or as a test wants it."""
    values: dict[str, float | None] = {"steps": 12_400, "loss": 2.313, **given}
    return Row(
        rank=str(rank),
        incarnation=f"{rank:032x}",
        state=state,
        reason=reason,
        phase=None if reason else phase,
        beat_age_s=age_s,
        progress_age_s=None if reason else age_s,
        readings=Readings({f"torchobs.{name}": {(): value} for name, value in values.items() if value is not None}),
        pace=None if reason else PACE,
        slowness=slow,
        anomalies=anomalies,
        memory=None,
        memory_share=None,
    )


def run(*rows: Row, expected: int = 0, world_size: int = 0) -> Run:
    """A run of these ranks."""
    return Run("gpt", "run-1", rows, expected or len(rows), world_size or expected or len(rows))
