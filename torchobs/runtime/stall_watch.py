"""Writes the stacks of a rank that stands still, early: a scheduler, a collective's timeout or a person may kill it any moment.

An exporter has the stacks of a hung rank written, too, but only once it is sure (``ranks.state.hang_timeout_s``), and not every
run has one. Here no alert is raised: the file lies beside the flight file, and ``inspect`` reads it if the run ends there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect import hangs
from torchobs.detect.hangs import Durations
from torchobs.flight.format.layout import LIVE_PHASES
from torchobs.flight.metrics.totals import DURATION_SUM, Word
from torchobs.probes.core.timeline import CHECKPOINT, COMPILE, DATA, EVALUATION, FORWARD, OTHER
from torchobs.runtime.stack_dump import write_stacks

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

PAUSE_NS = 2_000_000_000
"""Time between two rounds of the sampler from which the process was stopped or starved, and did not stand still by itself"""

IDLE = LIVE_PHASES.index("idle")
_EVALUATION_PHASES = frozenset({DATA, FORWARD, OTHER})
"""Phases that the last boundary may indicate while a model is evaluated"""
_PATIENT = frozenset({EVALUATION, CHECKPOINT, COMPILE, IDLE})
"""They take what they take."""


def live_phase(context: ProbeContext) -> tuple[int, int]:
    """Return what the training thread does, as an index into ``LIVE_PHASES``, and since when, in ns.

    While an exception ends the training: the phase in which it was raised, for that is where the time went.
    """
    phase, since_ns = context.recorder.phase()
    left = context.training.left
    if left is not None and since_ns <= left.left_ns:
        phase, since_ns = left.phase, left.begun_ns
    if phase in _EVALUATION_PHASES and context.training.evaluating_since_ns:
        return EVALUATION, context.training.evaluating_since_ns
    return (IDLE if context.training.idle else phase), since_ns


def durations(context: ProbeContext) -> Durations:
    """Return the histogram of the durations of the steps so far."""
    totals = context.writer.table.core.totals
    counts = totals.ints[Word.STEP_DURATION : DURATION_SUM].tolist()
    return Durations(counts, catalog.SECONDS_BOUNDS, totals.floats[DURATION_SUM + 2])


class StallWatch:
    """One per session, for the sampler thread. Writes once in each stall; costs a comparison while training goes on."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._survived = 0
        self._written_ns = 0
        """Begin of the stall whose stacks are written; 0: none is"""
        self._last_ns = self._resumed_ns = time.monotonic_ns()

    def sample(self) -> None:
        """Write the stacks if no sign of a step came for longer than usual."""
        now_ns = time.monotonic_ns()
        if now_ns - self._last_ns > PAUSE_NS:
            self._resumed_ns = now_ns
        self._last_ns = now_ns
        phase, since_ns = live_phase(self._context)
        if self._written_ns and since_ns > self._written_ns:
            self._written_ns, self._survived = 0, self._survived + 1
        quiet_s = (now_ns - max(since_ns, self._resumed_ns)) / 1e9
        if quiet_s < hangs.LEAST_S or self._written_ns or phase in _PATIENT or self._may_never_train(phase):
            return
        if quiet_s >= self._limit_s():
            self._written_ns = now_ns
            more: dict[str, object] = {"phase": LIVE_PHASES[phase], "quiet_s": round(quiet_s, 3)}
            for read in self._context.recent_collectives:
                more |= read() or {}
            write_stacks(self._context, time.time_ns() // 1_000_000, "stalled", more)

    def _limit_s(self) -> float:
        return hangs.early_limit_s(*durations(self._context), self._survived)

    def _may_never_train(self, phase: int) -> bool:
        """Return True before the first batch and backward pass of a lone rank: it may serve, evaluate, or be a notebook."""
        alone = self._context.writer.header.resource.get("world_size", 1) == 1
        return alone and phase == OTHER and not self._context.recorder.ended
