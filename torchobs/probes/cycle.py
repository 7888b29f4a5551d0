"""One training step, from the end of the last to its own: what the probes saw of it, written as one record.

A step ends when every optimizer of the cycle has stepped, and the cycle is learned: it is the set of optimizers seen before
one of them steps again. So a GAN's two optimizers are one step, and so are the hundreds of an optimizer-in-backward; with a
Wasserstein GAN's several critic updates the critic's are counted. Until the first repeat, an end is provisional; so is the
generator's, which steps along now and then: a part of the next step, and of none at the run's end.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.flight.record import Flag, Kind
from torchobs.probes.models import Models
from torchobs.probes.seen import GONE, Values
from torchobs.probes.segments import COMPILE, OTHER, Segments
from torchobs.probes.trace import (
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    CLOSURE_BEGINS,
    FETCH,
    FETCHED,
    LONG_TRACE,
    PHASE_OF,
    PIN,
    STEP_BEGINS,
    STEP_ENDS,
    UNPIN,
    replay,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.flight.writer import FlightWriter

_U64, _U32 = (1 << 64) - 1, (1 << 32) - 1
_TRAINING = frozenset({FETCH, BACKWARD_BEGINS, STEP_BEGINS, CLOSURE_BEGINS})
METER_EVERY = 32
"""One step in 32 is metered, and counts for all of them: reading the clock twice per hook would be a third of its cost."""


class _Ended(NamedTuple):
    """An end, provisional until it is written."""

    now_ns: int
    spent_ns: Sequence[int]
    values: Values
    along: bool
    """Only such optimizers have stepped as step along now and then"""


class Cycle:
    """The step in progress. All methods run in the training thread (or, for optimizers in backward, an autograd thread)."""

    __slots__ = (
        "_alive", "_along", "_append", "_append_plain", "_begun_ns", "_clean", "_compiling_ns", "_members", "_provisional",
        "_seen", "arguments", "direct", "likely_end", "log_wins", "metered", "models", "rated", "segments", "sole", "step",
        "timed", "trace", "values",
    )  # fmt: skip

    def __init__(self, writer: FlightWriter) -> None:
        self.step = 0
        """Number of the last step that ended."""
        self.trace: list[int] = []
        """Boundaries since the last end (``trace``); hooks append to it"""
        self.arguments: list[int] = []
        self.values = Values()
        self.segments = Segments()
        self.direct = False
        """Whether the user gives the boundaries by ``torchobs.step()``."""
        self.timed = False
        """Whether phases are recorded."""
        self.likely_end: tuple[int, int] | None = None
        """Where the step will have ended (``byhand``): how much of the trace is its own, and of the arguments"""
        self.log_wins = False
        self.metered = False
        """Whether this step's hooks measure their own time."""
        self.models, self.sole = Models(), 0
        """id of the one optimizer whose steps are the training's; 0 while that is not known, or not so"""
        self.rated = 0
        """id of the optimizer whose learning rate is the record's, 0 if none's is"""
        self._append, self._append_plain = writer.append, writer.append_plain
        self._begun_ns = self._compiling_ns = 0
        self._clean = False
        self._members: set[int] = set()
        self._seen: set[int] = set()
        self._along: set[int] = set()
        self._alive: dict[int, weakref.ref[object]] = {}
        self._provisional: _Ended | None = None

    @property
    def ended(self) -> int:
        """Number of the last step that has ended, if only provisionally."""
        return self.step + (self._provisional is not None)

    # -- values ------------------------------------------------------------------------------------------------------------

    def add_loss(self, value: float, *, within_step: bool) -> None:
        """A backward pass began from a scalar. ``within_step``: inside a closure, where the last evaluation is the step's."""
        if self.log_wins:
            return
        values = self.values
        values.loss_sum = (values.loss_base if within_step else values.loss_sum) + value
        values.losses += 1
        values.flags |= Flag.LOSS

    def add_norm(self, norm: float, scale: float, *, within_step: bool) -> None:
        """The L2 norm of one optimizer's gradients, already divided by ``scale``."""
        values = self.values
        values.norm_squared = (values.norm_base if within_step else values.norm_squared) + norm * norm
        values.norm_scale = scale
        values.flags |= Flag.GRAD_NORM

    def begin_closure(self) -> None:
        """An optimizer was given a closure: what it evaluates last is the step's, on top of what there was before."""
        values = self.values
        values.loss_base, values.norm_base = values.loss_sum, values.norm_squared
        values.flags |= Flag.CLOSURE

    def log(self, loss: float | None, tokens: int, samples: int) -> None:
        """What the user says of the step in progress or, directly after a step that the hooks saw end, of that one."""
        self.log_wins = self.log_wins or loss is not None
        tokens, samples = max(0, min(tokens, _U64)), max(0, min(samples, _U32))
        if self.logged_step() == self.step:
            self.late(self.step, Flag.LOSS if loss is not None else 0, loss or 0.0, 0.0, tokens, samples)
            return
        values = self.values if self._provisional is None or self._touched() else self._provisional.values
        values.tokens, values.samples = min(values.tokens + tokens, _U64), min(values.samples + samples, _U32)
        if loss is not None:
            values.loss_sum, values.losses = loss, 1
            values.flags |= Flag.LOSS

    def logged_step(self) -> int:
        """Return the number of the step that :meth:`log` would speak of."""
        ended = self.step and self._provisional is None and not self.direct and not self._touched()
        return self.step if ended else self.step + 1

    def _touched(self) -> bool:
        """Tell whether training has gone on since the last end."""
        return any(stamp & 15 in _TRAINING for stamp in self.trace)

    def late(self, step: int, flags: int, loss: float, norm: float, tokens: int = 0, samples: int = 0) -> None:
        """Write values of a step that has ended."""
        self._append(step, time.monotonic_ns(), Kind.LATE, flags, 1, 0.0, loss, norm, 0.0, (0.0,) * 8, tokens, samples)

    def whose(self) -> Values | int:
        """Return the number of the step in progress or, where it shows later whether a step has just ended, its values.

        The number is that of :meth:`became` then. For what a device delivers of this moment.
        """
        return self.step + 1 if self._provisional is None else self.values

    # -- boundaries --------------------------------------------------------------------------------------------------------

    def mark(self, code: int, now_ns: int, argument: int | None = None) -> None:
        """Note a boundary; hooks in the hot path append to the trace themselves."""
        if argument is not None:
            self.arguments.append(argument)
        self.trace.append(now_ns << 4 | code)
        self.relieve()

    def relieve(self) -> None:
        """Take in a trace that has become long: an evaluation without end."""
        if len(self.trace) > LONG_TRACE:
            self.end_where_likely()
            self._replay()

    def compile_begins(self, now_ns: int) -> None:
        """The training thread, or the autograd thread that it waits for, compiles from here on."""
        self.mark(PIN, now_ns, COMPILE)
        self._compiling_ns = now_ns

    def compile_ends(self, now_ns: int) -> None:
        """And goes on. Cannot raise."""
        self._compiling_ns = 0
        self.trace.append(now_ns << 4 | UNPIN)

    def phase(self) -> tuple[int, int]:
        """Return what the training thread is doing, and since when. For the sampler thread: the trace may change meanwhile."""
        compiling_ns, last = self._compiling_ns, self.trace[-1:]
        if compiling_ns:
            return COMPILE, compiling_ns
        if not last:
            return OTHER, self._begun_ns
        code, named = last[0] & 15, self.arguments[-1:]
        pinned = code == PIN and bool(named) and named[0] in range(COMPILE + 1)
        return named[0] if pinned else PHASE_OF[code], last[0] >> 4

    def so_far(self) -> tuple[int, Segments] | None:
        """Return the number of the last step written, and a twin of the timeline since its end. For the sampler thread.

        ``None`` if the training thread has moved on meanwhile. The twin is no worse than a moment old: the interpreter's lock
        makes each copy a whole one.
        """
        step, ended, trace, arguments = self.step, self._provisional, self.trace.copy(), self.arguments.copy()
        segments = self.segments.twin()
        if self._clean:
            segments.restart(self._begun_ns)
        if ended is not None:
            segments.add(ended.spent_ns)
        with contextlib.suppress(StopIteration):  # the arguments of a trace that has just been cleared
            replay(segments, trace, arguments)
            if self.step == step and len(self.trace) >= len(trace):
                return step, segments
        return None

    def open_since(self) -> int:
        """Return when the last step ended, in ns, if only provisionally; 0 before the first."""
        return self._begun_ns

    def _replay(self) -> None:
        if self._clean:
            self.segments.restart(self._begun_ns)
            self._clean = False
        if not self.step and not self.segments.started and self.trace and self._begins_late():
            self.values.flags |= Flag.UNTIMED  # nothing before it was seen
        replay(self.segments, self.trace, self.arguments)
        self.trace.clear()
        self.arguments.clear()

    def _begins_late(self) -> bool:
        """Tell whether the first boundary is none that a step begins with."""
        code = self.trace[0] & 15
        return code == BACKWARD_BEGINS or (code == PIN and self.arguments[0] == COMPILE)

    def _times(self, now_ns: int) -> Sequence[int]:
        """End the timeline of the step: return ns in each segment."""
        self._replay()
        spent = self.segments.close(now_ns)
        self._clean, self._begun_ns = self.segments.clean, now_ns
        return spent

    # -- the step's end ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: object) -> bool:
        """An optimizer is about to step: if it has stepped in this cycle, the cycle was over before.

        Tell whether it has never stepped.
        """
        if id(optimizer) in self._seen and self._is_same(optimizer):
            self._members = set(self._seen)
            self._along.clear()
            self._commit()
        elif self._provisional is not None:
            self._go_on(self._provisional)
        fresh = not self.models.knows(optimizer)
        if fresh and self.models.begins(optimizer, self.step):
            self.values.flags |= Flag.NEW_MODEL
        return fresh

    def optimizer_ends(self, optimizer: object, now_ns: int) -> None:
        """It has stepped, or the loss scaler skipped it."""
        key = id(optimizer)
        if key == self.sole:
            self.end_plainly(now_ns)
            return
        if self.direct:
            self.mark(STEP_ENDS, now_ns)
            return
        self._seen.add(key)
        if not self._is_same(optimizer):
            self._alive[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        self._close(now_ns)
        if self._members and self._members <= self._seen:
            self._along |= self._seen - self._members
            self._commit()

    def end_plainly(self, now_ns: int) -> None:
        """The one optimizer has stepped: what nearly every step of nearly every training comes down to.

        Plain is one fetch (or none), one backward and one optimizer, in this order.
        """
        trace, values = self.trace, self.values
        if len(trace) == 3:  # noqa: PLR2004  # without a loader
            trace[:0] = _NO_FETCH
        fetch, fetched, backward, backward_ends, optimizer = trace if len(trace) == 5 else _NOT_PLAIN  # noqa: PLR2004  # its boundaries
        codes = (fetch & 15, fetched & 15, backward & 15, backward_ends & 15, optimizer & 15)
        if codes != _PLAIN or not self._clean or not self.timed:
            del trace[: 2 * (fetched == FETCHED)]
            self.values = Values()
            self._write(now_ns, self._times(now_ns), values)
            return
        trace.clear()
        self.arguments.clear()
        step = self.step + 1
        values.step = values.step or step
        self.step, self.metered = step, not step % METER_EVERY
        flags = values.flags
        self._append_plain(
            step, now_ns, flags, values.losses, fetch, fetched, backward, backward_ends, optimizer, values.loss_sum,
            sqrt(values.norm_squared) if flags & 2 else 0.0, values.learning_rate, values.tokens, values.samples,
            values.norm_scale, self._begun_ns,
        )  # fmt: skip
        self._begun_ns = now_ns
        values.flags = values.losses = values.tokens = values.samples = 0
        values.loss_sum = values.norm_squared = 0.0

    def _close(self, now_ns: int) -> None:
        along = bool(self._seen) and self._seen <= self._along
        self._provisional = _Ended(now_ns, self._times(now_ns), self.values, along)
        self.values = Values()
        self.sole = 0

    def _is_same(self, optimizer: object) -> bool:
        known = self._alive.get(id(optimizer))
        return known is not None and known() is optimizer

    def optimizers(self) -> list[Any]:
        """Return those that live, of all that have stepped. From any thread."""
        return [optimizer for known in list(self._alive.values()) if (optimizer := known()) is not None]

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._seen.discard(key)
        self._members.discard(key)
        self._along.discard(key)
        self.sole = 0 if self.sole == key else self.sole

    def _go_on(self, ended: _Ended) -> None:
        """The end was none: another optimizer of the same cycle steps."""
        self._provisional = None
        self._replay()
        self.segments.add(ended.spent_ns)
        self.values.merge(ended.values)

    def end(self, now_ns: int) -> None:
        """The user says that the step has ended (``torchobs.step``)."""
        known, touched = self.direct, self._touched()
        self.direct, self.sole = True, 0
        if not known and not touched and self._provisional is None and self.step:
            return  # the hooks have written this very step; from the next one on the user's word counts
        if touched:
            self._commit()
        if self._provisional is None:
            self.values.flags |= Flag.DIRECT
            self._close(now_ns)
        self._commit()

    def restart(self) -> None:
        """Forget the step in progress: the hooks were off for a while, or will be. The next step's start is unknown."""
        self.flush()
        self.trace.clear()
        self.arguments.clear()
        self.segments, self._clean = Segments(), False
        self.values.step = GONE
        self.values = Values()
        self.values.flags = Flag.UNTIMED

    def flush(self) -> None:
        """Write what is complete (at the rank's end)."""
        self.end_where_likely()
        ended = self._provisional
        if ended is not None and ended.along:  # a part of a step that does not come
            ended.values.step, self._provisional = GONE, None
            self.late(self.step, 0, 0.0, 0.0, ended.values.tokens, ended.values.samples)
        self._commit()

    def end_where_likely(self) -> None:
        """The step has ended where that was likely, if anywhere; what was seen since then belongs to the next."""
        likely, self.likely_end = self.likely_end, None
        if likely is None or likely[0] > len(self.trace) or self.direct:
            return
        trace, arguments = self.trace, self.arguments
        since, named = trace[likely[0] :], arguments[likely[1] :]
        del trace[likely[0] :], arguments[likely[1] :]
        values, self.values = self.values, Values()
        now_ns = trace[-1] >> 4
        self._write(now_ns, self._times(now_ns), values)
        trace += since
        arguments += named

    def _commit(self) -> None:
        ended, self._provisional = self._provisional, None
        self.sole = next(iter(self._members)) if len(self._members) == 1 and not self.direct else 0  # the next may be plain
        self._seen.clear()
        if ended is not None:
            self._write(ended.now_ns, ended.spent_ns, ended.values)

    def _write(self, now_ns: int, spent: Sequence[int], values: Values) -> None:
        values.step = step = self.step + 1
        self.step, self.metered = step, not step % METER_EVERY
        norm = sqrt(values.norm_squared) if values.flags & Flag.GRAD_NORM else 0.0
        phases = tuple([length / 1e9 for length in spent]) if self.timed else _UNTIMED
        self._append(
            step, now_ns, Kind.STEP, values.flags, values.losses & _U32, sum(spent[:5]) / 1e9, values.loss_sum, norm,
            values.learning_rate, phases, values.tokens, values.samples, values.norm_scale,
        )  # fmt: skip


_UNTIMED = (0.0,) * 8
_PLAIN = (FETCH, FETCHED, BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS)
_NO_FETCH = (FETCH, FETCHED)
"""at 0 ns: there was none"""
_NOT_PLAIN = (-1,) * 5
