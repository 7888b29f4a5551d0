"""State of the step in progress: its values, and its trace, the boundaries that the hooks recorded (``boundaries``)."""

from __future__ import annotations

import contextlib
import time
from math import sqrt
from typing import TYPE_CHECKING

from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.probes.core.boundaries import (
    BACKWARD_BEGINS,
    CLOSURE_BEGINS,
    FETCH,
    PHASE_OF,
    PIN,
    STEP_BEGINS,
    UNPIN,
    exhausted,
    replay,
)
from torchobs.probes.core.inferred_sizes import GivenSizes, uncounted, with_sizes
from torchobs.probes.core.step_values import StepValues
from torchobs.probes.core.timeline import COMPILE, OTHER, PhaseTimeline

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Collection, Sequence

    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.step_values import OpenPart, StepEnd

_GOING_ON = frozenset({FETCH, BACKWARD_BEGINS, CLOSURE_BEGINS})
_TRAINING = _GOING_ON | {STEP_BEGINS}
METER_EVERY = 32
"""One step in 32 is metered, and counts for all of them: reading the clock twice per hook would be a third of its cost."""
U32 = (1 << 32) - 1
_UNTIMED = (0.0,) * 8


class OpenStep:
    """Values and boundaries of the step in progress, and its record. ``StepRecorder`` decides where it ends."""

    __slots__ = (
        "_append",
        "_begun_ns",
        "_clean",
        "_compiling_ns",
        "_expected",
        "_last_bare",
        "_merged_backward",
        "_relieved",
        "_samples",
        "_timed",
        "_timeline",
        "_tokens",
        "_work_done",
        "arguments",
        "given",
        "log_wins",
        "metered",
        "sizes",
        "step",
        "trace",
        "values",
    )

    def __init__(self, writer: FlightWriter) -> None:
        self.step = 0
        """Number of the last step that ended."""
        self.trace: list[int] = []
        """Boundaries since the last end; hooks append to it"""
        self.arguments: list[int] = []
        """Those of the boundaries that have one (``boundaries.ARGUED``)"""
        self.values = StepValues()
        """Replaced at each end that is not a plain step's"""
        self.log_wins = False
        """Whether the script logs the loss, so that no other counts"""
        self.metered = False
        """Whether this step's hooks measure their own time"""
        self.sizes: dict[int, tuple[int, int]] = {}
        """Tokens and samples of a batch by loader, inferred; empty if they are not. Replaced, never changed."""
        self._expected: list[int] | None = None
        """The arguments of the last plain step: most often its loader's alone, of which a batch has these sizes"""
        self._tokens = self._samples = 0
        self.given = GivenSizes()
        """Which of them the script gives to ``torchobs.log``"""
        self._work_done = writer.work_done
        self._timeline = PhaseTimeline()
        self._timed = False
        self._last_bare = 0
        """The last step without a backward"""
        self._append = writer.append
        self._begun_ns = self._compiling_ns = 0
        self._clean = self._merged_backward = self._relieved = False

    def learn_sizes(self, loader: int, tokens: int, samples: int) -> None:
        """Let each batch of that loader, by id, count so many tokens and samples from now on, without those that are given."""
        self.sizes, self._expected = with_sizes(self.sizes, loader, self.given.left(tokens, samples)), None

    def forget_sizes(self) -> None:
        """Infer no more sizes."""
        self.sizes, self._expected = {}, None

    def _expect(self) -> None:
        """Look the sizes up that a plain step's batch has."""
        self._expected = self.arguments[:2]
        self._tokens, self._samples = self.sizes.get(self._expected[0], (0, 0)) if self._expected else (0, 0)

    def _give_sizes(self, tokens: int, samples: int, values: StepValues | None) -> tuple[int, int]:
        """Infer no more what the script gives; return what of it is not counted yet. ``values``: of the step in progress."""
        tokens_done, samples_done = self._work_done()
        if tokens and not self.given.tokens:
            tokens, self.given.tokens = uncounted(tokens, tokens_done, self.step, ended=values is None), True
            if values is not None:
                values.tokens = 0
        if samples and not self.given.samples:
            samples, self.given.samples = uncounted(samples, samples_done, self.step, ended=values is None), True
            if values is not None:
                values.samples = 0
        known, self.sizes, self._expected = self.sizes, {}, None
        for loader, sizes in known.items():
            self.learn_sizes(loader, *sizes)
        return tokens, samples

    def record_phases(self, *, enabled: bool) -> None:
        """Record phases from now on, or no longer."""
        self._timed = enabled

    def flag(self, flag: int) -> None:
        """Set a flag (``StepFlag``) of the step in progress."""
        self.values.flags |= flag

    def set_rate(self, rate: float | None) -> None:
        """Set the learning rate of the step in progress; ``None`` for none."""
        values = self.values
        if rate is None:
            values.flags &= ~StepFlag.LEARNING_RATE
        else:
            values.learning_rate = rate
            values.flags |= StepFlag.LEARNING_RATE

    def add_loss(self, value: float, *, within_step: bool) -> None:
        """Add the scalar that a backward pass began from. ``within_step``: in a closure; its first evaluation counts."""
        if self.log_wins:
            return
        values = self.values
        values.losses += 1
        if not (within_step and values.evaluated):
            values.loss_sum += value
            values.evaluated = within_step
        values.flags |= StepFlag.LOSS

    def add_norm(self, norm: float, scale: float, *, within_step: bool) -> None:
        """Add the L2 norm of one optimizer's gradients, already divided by ``scale``."""
        values = self.values
        values.norm_squared = (values.norm_base if within_step else values.norm_squared) + norm * norm
        values.norm_scale = scale
        values.flags |= StepFlag.GRAD_NORM

    def leave_norm_out(self) -> None:
        """Drop the norm, also that of other optimizers: it is measured again."""
        self.values.leave_norm_out()

    def take_norm_back(self) -> None:
        """Undo :meth:`add_norm` with ``within_step``."""
        self.values.norm_squared = self.values.norm_base

    def begin_closure(self) -> None:
        """Note that an optimizer was given a closure.

        Of its evaluations, the first loss counts (``step()`` returns it) and the last gradient, added to those before it.
        """
        values = self.values
        values.norm_base, values.evaluated = values.norm_squared, False
        values.flags |= StepFlag.CLOSURE

    def has_begun(self, besides: Collection[int] = ()) -> bool:
        """Return True if anything was recorded since the last end, ``besides`` those boundaries. From any thread."""
        return self._timeline.started or any(stamp & 15 not in besides for stamp in self.trace[:8])

    def in_fetch(self) -> bool:
        """Return True if the training thread is fetching a batch."""
        return bool(self.trace) and self.trace[-1] & 15 == FETCH

    def exhausted(self, since_ns: int) -> set[int]:
        """Return the arguments of this step's fetches since then that found their loader exhausted."""
        return exhausted(self.trace, self.arguments, since_ns)

    @property
    def evaluations(self) -> deque[tuple[int, int]]:
        """Begin and end of finished evaluations, in ns; for the sampler thread, which removes them."""
        return self._timeline.evaluations

    def end_capture(self, aside: OpenPart) -> None:
        """Continue that step, without what was recorded since."""
        del self.trace[aside.traced :], self.arguments[aside.arguments :]
        self.values = aside.values

    def _touched(self) -> bool:
        """Return True if training has gone on since the last end."""
        return any(stamp & 15 in _TRAINING for stamp in self.trace)

    def late(self, step: int, flags: int, loss: float, norm: float, tokens: int = 0, samples: int = 0) -> None:
        """Write values of a step that has ended."""
        self._append(step, time.monotonic_ns(), RecordKind.LATE, flags, 1, 0.0, loss, norm, 0.0, (0.0,) * 8, tokens, samples)

    def compile_ends(self, now_ns: int) -> None:
        """End the compilation; the phase before it continues. Cannot raise."""
        self._compiling_ns = 0
        self.trace.append(now_ns << 4 | UNPIN)

    def phase(self) -> tuple[int, int]:
        """Return the current phase and when it began, in ns. For the sampler thread: the trace may change meanwhile."""
        compiling_ns, last = self._compiling_ns, self.trace[-1:]
        if compiling_ns:
            return COMPILE, compiling_ns
        if not last:
            return OTHER, self._begun_ns
        code, named = last[0] & 15, self.arguments[-1:]
        pinned = code == PIN and bool(named) and named[0] in range(COMPILE + 1)
        return named[0] if pinned else PHASE_OF[code], last[0] >> 4

    def phase_begun(self, phase: int) -> int:
        """Return when the last such phase of the step in progress began, in ns; 0 if none is in the trace."""
        return next((stamp >> 4 for stamp in reversed(self.trace) if PHASE_OF[stamp & 15] == phase), 0)

    def unwritten(self) -> Sequence[StepEnd]:
        """Return the provisional ends, which may turn out to be parts of the step in progress."""
        raise NotImplementedError

    def so_far(self) -> tuple[int, PhaseTimeline] | None:
        """Return the number of the last step written, and a snapshot of the timeline since its end. For the sampler thread.

        ``None`` if the training thread has ended a step meanwhile. Each copy is consistent, since the GIL makes it atomic.
        """
        step, ends, trace, arguments = self.step, self.unwritten(), self.trace.copy(), self.arguments.copy()
        timeline = self._timeline.snapshot()
        if self._clean:
            timeline.restart(self._begun_ns)
        for ended in ends:
            timeline.add(ended.spent_ns)
        with contextlib.suppress(StopIteration):  # the arguments of a trace that has just been cleared
            replay(timeline, trace, arguments)
            if self.step == step and len(self.trace) >= len(trace):
                return step, timeline
        return None

    def open_since(self) -> int:
        """Return when the last step ended, in ns, provisional ends included; 0 before the first."""
        return self._begun_ns

    def _replay(self) -> None:
        if self._clean:
            self._timeline.restart(self._begun_ns)
            self._clean = False
        if not self.step and not self._timeline.started and self.trace and self._begins_late():
            self.values.flags |= StepFlag.UNTIMED  # nothing before it was seen
        replay(self._timeline, self.trace, self.arguments)
        self.trace.clear()
        self.arguments.clear()

    def _begins_late(self) -> bool:
        """Return True if the first boundary cannot be the beginning of a step."""
        code = self.trace[0] & 15
        return code == BACKWARD_BEGINS or (code == PIN and self.arguments[0] == COMPILE)

    def _times(self, now_ns: int, values: StepValues) -> Sequence[int]:
        """End the timeline of the step and return the ns in each phase; add its batches' sizes to its values."""
        self._replay()
        spent = self._timeline.close(now_ns)
        batches, self._timeline.batches = self._timeline.batches, {}
        for loader, number in batches.items() if self.sizes else ():
            tokens, samples = self.sizes.get(loader, (0, 0))
            values.tokens += number * tokens
            values.samples = min(values.samples + number * samples, U32)
        self._clean, self._begun_ns = self._timeline.clean, now_ns
        return spent

    def _goes_on(self) -> bool:
        """Return True if training has gone on since the last end, whether or not an optimizer has stepped."""
        return self._relieved or any(stamp & 15 in _GOING_ON for stamp in self.trace)

    def _has_backward(self) -> bool:
        return self._merged_backward or any(stamp & 15 == BACKWARD_BEGINS for stamp in self.trace)

    def _write_all(self, parts: list[StepEnd]) -> None:
        for part in parts:
            self._write(part)
        parts.clear()

    def _write(self, ended: StepEnd) -> None:
        now_ns, spent, values = ended.now_ns, ended.spent_ns, ended.values
        values.step = step = self.step + 1
        self.step, self.metered = step, not step % METER_EVERY
        if not ended.backward:
            self._last_bare = step
        norm = sqrt(values.norm_squared) if values.flags & StepFlag.GRAD_NORM else 0.0
        phases = tuple([length / 1e9 for length in spent]) if self._timed else _UNTIMED
        self._append(
            step, now_ns, RecordKind.STEP, values.flags, values.losses & U32, sum(spent[:5]) / 1e9, values.loss_sum, norm,
            values.learning_rate, phases, values.tokens, values.samples, values.norm_scale,
        )  # fmt: skip
