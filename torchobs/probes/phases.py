"""Record phases, evaluations and goodput of the step in progress, and detect that training is idle.

``Module.train`` is where ``eval()`` and ``train()`` meet; only the outermost call counts, since it recurses into the children.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.hangs import idle_from
from torchobs.flight.fold import clear_credit, credit, credited
from torchobs.flight.totals import DURATION_SUM, Word
from torchobs.probes.context import LONG_NS, span_limiter
from torchobs.probes.forward_stamps import ForwardStamps
from torchobs.probes.timeline import CHECKPOINT, COMPILE, DATA, EVAL, EVALUATION, FORWARD, OTHER, TRAIN, WITHIN_STEP
from torchobs.support.graph_safe import outside_of_graphs
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from torchobs.probes.context import ProbeContext

_LONG_NS = 500_000_000
_LONG_TRACE, _ROUNDS = 256, 10
"""Boundaries from which credit is given once a second, since replaying one takes a microsecond"""


class PhaseProbe:
    """Enables the recording of phases, and observes the begin and end of evaluation."""

    name = "phases"

    def __init__(self) -> None:
        self._patch: Patch | None = None
        self._depth = 0
        self._budget = span_limiter()

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        import torch  # torch is optional until training begins

        self._context, self._training = context, context.training
        self._startup, self._open, self._ended = Startup(context), OpenTime(context), False
        self._stamps = ForwardStamps(context)
        context.recorder.plain.timed = True
        self._patch = Patch(torch.nn.Module, "train", self._watched_train, probe=self.name, nests=True)

    def _watched_train(self, original: Any) -> Any:
        training, note = self._training, self._context.breaker(self.name).guard(self._note_mode)

        def train(module: Any, mode: bool = True) -> Any:  # noqa: FBT001, FBT002  # torch's signature
            if self._depth or get_ident() != training.thread:
                return original(module, mode)
            self._depth = 1
            note(module, mode)
            try:
                return original(module, mode)
            finally:
                self._depth = 0

        return outside_of_graphs(original, train)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        if self._patch is not None:
            self._patch.undo()
            self._stamps.remove()
            self._context.recorder.plain.timed = False
            self._training.evaluating_since_ns = 0
            self._ended = True

    def sample(self) -> None:
        """Write spans of finished evaluations; update goodput and the startup time."""
        self._training.idle = self._is_idle()
        self._stamps.sample()
        self._open.sample(last=self._ended)
        self._training.evaluating_since_ns = self._open.evaluating_since_ns
        self._startup.sample(last=self._ended)
        evaluations = self._context.recorder.evaluations
        while evaluations:
            begun_ns, ended_ns = evaluations.popleft()
            if ended_ns - begun_ns >= LONG_NS or self._budget.take(ended_ns):
                self._context.write_span(catalog.SPAN_EVALUATION.name, begun_ns, ended_ns, {}, failed=False)

    def _is_idle(self) -> bool:
        """Return whether no boundary came for longer than goodput's idle threshold and the training loop is not running.

        The stack, 6 µs to read, is read only then: a second stage's loop is recorded some steps later.
        """
        context = self._context
        phase, since_ns = context.recorder.phase()
        patience_s = idle_from(context.writer.table.core.totals.floats[DURATION_SUM + 2])
        quiet = phase in {FORWARD, OTHER} and monotonic_ns() - since_ns > patience_s * 1e9
        return quiet and self._training.loop.left(self._training.thread)

    def _note_mode(self, module: Any, mode: bool) -> None:  # noqa: FBT001  # torch's signature
        now_ns = monotonic_ns()
        recorder = self._context.recorder
        recorder.mark(TRAIN if mode else EVAL, now_ns, id(module))
        if recorder.plain.metered:
            self._context.record_overhead(self.name, monotonic_ns() - now_ns)


class OpenTime:
    """Credits the step in progress: goodput before the first step, during long ones and after the last one.

    The fold credits steps when they end (``flight.fold``), one of up to a second only then. In a longer one,
    evaluations, checkpoints, compilations, waiting for data and idle time are credited as they go on. At the end the rest is
    credited, so that the states add up to the rank's lifetime. In the sampler thread; a part of :class:`PhaseProbe`.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._restarts = context, context.recorder.restarts
        self._ended, self._rounds = False, 0
        self.evaluating_since_ns = 0
        """When the evaluation in progress began; 0 if there is none, or only a short one"""

    def sample(self, *, last: bool = False) -> None:
        """Update the credit. ``last``: the rank ends, and the step in progress with it."""
        recorder, core, now_ns = self._context.recorder, self._context.writer.table.core, monotonic_ns()
        if recorder.restarts != self._restarts:
            self._restarts = recorder.restarts
            core.change(clear_credit)  # hooks were off for a while
        if now_ns - recorder.plain.begun_ns < _LONG_NS and not last:
            self.evaluating_since_ns = 0
            return
        self._rounds += 1
        if len(recorder.trace) > _LONG_TRACE and self._rounds % _ROUNDS and not last:
            return
        if last:
            self._context.writer.fold()
        progress = recorder.so_far()
        if progress is None:
            return
        step, state = progress
        self.evaluating_since_ns = state.evaluating_since()
        longest_s = core.totals.floats[DURATION_SUM + 2]
        spent, idle_ns = state.close_early(now_ns, 0 if last else idle_from(longest_s) * 1e9)
        if last:
            # it led to no step; without any, as in a script that updates by hand, all of it is before the first
            idle_ns = sum(spent[phase] for phase in WITHIN_STEP) - spent[DATA] if core.totals.ints[Word.STEPS] else 0
        parts = (spent[DATA], spent[EVALUATION], spent[CHECKPOINT], spent[COMPILE], idle_ns)
        core.change(credit, step, [length / 1e9 for length in parts], sum(spent) / 1e9)
        if last:
            core.publish()
            if not self._ended:
                recorder.evaluations.extend(state.evaluations)
            self._ended = True


class Startup:
    """Measures the time before the first step: imports, model construction, checkpoint restore; the cost of every restart.

    From the process's start, or from ``init()`` where that says nothing (``Session.open``). Updated once a second, and once
    exactly when the first step has ended. In the sampler thread; a part of ``PhaseProbe``.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._rounds = context, 0
        self._cell = context.writer.table.cell(catalog.GOODPUT_TIME, {"state": catalog.STARTUP})
        self._begun_s = context.writer.header.begun_s
        self._shown_s = 0.0
        self._done = context.recorder.step > 0

    def sample(self, *, last: bool = False) -> None:
        """Update the time. ``last``: the rank ends, with or without a step."""
        if self._done:
            return
        self._rounds += 1
        totals = self._context.writer.table.core.totals
        # goodput counts from the first step on
        known_s = sum(totals.floats[Word.GOODPUT : Word.GOODPUT + len(catalog.GOODPUT_STATES)])
        if totals.ints[Word.STEPS]:
            self._show(totals.floats[Word.LAST_STEP_TIMESTAMP] - (known_s - sum(credited(totals))) - self._begun_s)
            self._done = True
        elif last or not (self._rounds % _ROUNDS or self._context.recorder.has_begun(besides={EVAL, TRAIN})):
            header = self._context.writer.header
            self._show((header.wall_ns - header.monotonic_ns + monotonic_ns()) / 1e9 - known_s - self._begun_s)

    def _show(self, seconds: float) -> None:
        if self._cell is not None and seconds > self._shown_s:
            self._shown_s = seconds
            self._cell.set(seconds)
