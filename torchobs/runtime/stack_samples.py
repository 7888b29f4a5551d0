"""Samples of the training thread's stack: the line of the user's code where it most often is between steps.

Ten a second, by the sampler thread, which gets the GIL where the training thread gives it up: biased, so they say where and
never how long. What counts is outside of fetch, forward, backward and optimizer; the line is the innermost one outside of
installed packages, Python's own files and torchobs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.detect.speed import LEAST_OF_LINE, LEAST_SAMPLES
from torchobs.probes.timeline import FORWARD, OTHER
from torchobs.support.rate_limit import RateLimiter
from torchobs.support.source_lines import is_users
from torchobs.taps.taps import ThreadFrames

if TYPE_CHECKING:
    from types import FrameType

    from torchobs.probes.context import ProbeContext

MOST_SAMPLES = 600
"""A minute of samples; then all count half, so that the line is a recent one"""
_EVERY_S = 60.0
_DEEPEST = 128
_MODULE_FILE, _MODULE_CALL = "torch/nn/modules/module.py", "_call_impl"


class Place(NamedTuple):
    """A line of the user's code."""

    location: str
    """file:line"""
    function: str


class StackSamples:
    """Counts places while a step stands in ``other`` or ``between``; reports the most frequent one. In the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._counts: dict[Place, float] = {}
        self._total = 0.0
        self._reported: Place | None = None
        self._limiter = RateLimiter(_EVERY_S)

    def sample(self) -> None:
        """Take a sample if the training thread is between the phases of a step."""
        recorder, training = self._context.recorder, self._context.training
        phase, since_ns = recorder.phase()
        is_between = phase == OTHER or (phase == FORWARD and time.monotonic_ns() - since_ns < training.to_call_ns)
        if not (recorder.ended and is_between) or training.idle or training.evaluating_since_ns:
            return
        with ThreadFrames() as frames:
            place = innermost(frames.get(training.thread))
        if place is None:
            return
        self._counts[place] = self._counts.get(place, 0.0) + 1.0
        self._total += 1.0
        if self._total >= MOST_SAMPLES:
            self._total /= 2
            self._counts = {line: count / 2 for line, count in self._counts.items() if count > 1.0}
        self._report()

    def _report(self) -> None:
        most = max(self._counts, key=self._counts.__getitem__)
        is_clear = self._total >= LEAST_SAMPLES and self._counts[most] >= LEAST_OF_LINE * self._total
        if is_clear and most != self._reported and self._limiter.take(time.monotonic()):
            self._reported = most
            self._context.event(catalog.EVENT_STEP_BETWEEN, most._asdict())


def innermost(frame: FrameType | None) -> Place | None:
    """Return the user's innermost line; ``None`` without one, and within a module's call: that is the forward pass."""
    place, depth = None, 0
    while frame is not None and depth < _DEEPEST:
        code = frame.f_code
        file = code.co_filename
        if code.co_name == _MODULE_CALL and file.endswith(_MODULE_FILE):
            return None
        if place is None and is_users(file):
            place = Place(f"{file}:{frame.f_lineno}", code.co_name)
        frame, depth = frame.f_back, depth + 1
    return place
