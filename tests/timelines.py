"""Timelines of steps as tests tell them: times in, times out."""

from __future__ import annotations

from torchobs.flight.layout import PHASE_NAMES
from torchobs.probes.timeline import OPTIMIZER, OTHER, PhaseTimeline

ORDER = PHASE_NAMES


def spent(timeline: PhaseTimeline, now: int) -> dict[str, int]:
    """Close the step; return what is not zero."""
    return {name: value for name, value in zip(ORDER, timeline.close(now), strict=True) if value}


def one_step(timeline: PhaseTimeline, start: int) -> int:
    """A step of 100 ns: data 10, forward 30, backward 40, other 5, optimizer 15."""
    timeline.fetch_begins(1, start)
    timeline.fetch_ends(start + 10, exhausted=False, gradients=True)
    timeline.backward_begins(start + 40)
    timeline.turn(OTHER, start + 80)
    timeline.turn(OPTIMIZER, start + 85)
    return start + 100


def evaluate(timeline: PhaseTimeline, loader: int, at: int) -> int:
    """Three batches of 10 ns each, which are looked at for 30, and the loader's end."""
    for begun in range(at, at + 120, 40):
        timeline.fetch_begins(loader, begun)
        timeline.fetch_ends(begun + 10, exhausted=False, gradients=True)
    timeline.fetch_begins(loader, at + 120)
    timeline.fetch_ends(at + 125, exhausted=True, gradients=True)
    return at + 125
