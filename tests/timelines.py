"""Timelines of steps as tests tell them: times in, times out."""

from __future__ import annotations

from torchobs.probes.segments import OPTIMIZER, OTHER, Segments

ORDER = ("data", "forward", "backward", "optimizer", "other", "evaluation", "checkpoint", "compile")


def spent(segments: Segments, now: int) -> dict[str, int]:
    """Close the step; return what is not zero."""
    return {name: value for name, value in zip(ORDER, segments.close(now), strict=True) if value}


def one_step(segments: Segments, start: int) -> int:
    """A step of 100 ns: data 10, forward 30, backward 40, other 5, optimizer 15."""
    segments.fetch_begins(1, start)
    segments.fetch_ends(start + 10, exhausted=False, gradients=True)
    segments.backward_begins(start + 40)
    segments.turn(OTHER, start + 80)
    segments.turn(OPTIMIZER, start + 85)
    return start + 100


def evaluate(segments: Segments, loader: int, at: int) -> int:
    """Three batches of 10 ns each, which are looked at for 30, and the loader's end."""
    for begun in range(at, at + 120, 40):
        segments.fetch_begins(loader, begun)
        segments.fetch_ends(begun + 10, exhausted=False, gradients=True)
    segments.fetch_begins(loader, at + 120)
    segments.fetch_ends(at + 125, exhausted=True, gradients=True)
    return at + 125
