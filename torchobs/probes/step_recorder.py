"""Decide where training steps end, and write one record for each with everything that the probes saw since the last end.

The state: ``parts``, updates of optimizers since the last record; the open values and the trace, the boundaries since the last
part; the ``pacemaker``, an optimizer or none. The rules that methods name here are those of docs/architecture.md ("Where a step
ends"). Plain steps are written by ``hot_path``.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from dataclasses import dataclass
from itertools import count, islice
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.detect.spikes import WARM_UP
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.probes.hot_path import METER_EVERY, plain_steps
from torchobs.probes.timeline import (
    BACKWARD_BEGINS,
    CLOSURE_BEGINS,
    COMPILE,
    FETCH,
    LONG_TRACE,
    OTHER,
    PHASE_OF,
    PHASES,
    PIN,
    STEP_BEGINS,
    STEP_ENDS,
    UNPIN,
    WITHIN_STEP,
    Carry,
    exhausted,
    walk,
)
from torchobs.tensors.references import TensorReference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.hot_path import PlainSteps

MOST_WITHOUT = 256
"""Most optimizer steps without a backward pass that continue a step; with more, gradients come from elsewhere"""
MOST_PARTS = 64
_MOST_EVALUATIONS = 64
PASS = -1
"""Key of all optimizers that step within a backward pass, in place of an id"""
GONE = -1
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_UNTIMED = (0.0,) * PHASES
_UNSEEN = 1 << 16
"""In place of missed boundaries: the hooks were off, or it was another thread"""
_BACKWARD = _UNSEEN | 1 << BACKWARD_BEGINS | 1 << CLOSURE_BEGINS
_GOING_ON = _BACKWARD | 1 << FETCH
_TRAINING = 1 << BACKWARD_BEGINS | 1 << FETCH | 1 << CLOSURE_BEGINS | 1 << STEP_BEGINS
"""Boundaries, as bits by their codes"""


class PendingStep:
    """A step in progress without a number yet, since it has parts already; see :func:`resolve_step`."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0
        """The number that it was written as; 0 until then, ``GONE`` if it never is"""


def resolve_step(pending_step: PendingStep | int) -> int:
    """Return the step number for a result of ``StepRecorder.pending_step``, 0 while it is unknown."""
    return pending_step.step if isinstance(pending_step, PendingStep) else pending_step


@dataclass(slots=True)
class StepValues:
    """Values of a part that is closed or set aside, as ``PlainSteps`` has them of the open one."""

    flags: int = 0
    losses: int = 0
    tokens: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    norm_squared: float = 0.0
    norm_base: float = 0.0
    learning_rate: float = 0.0
    norm_scale: float = 1.0
    evaluated: bool = False
    pending: list[PendingStep] | None = None

    def resolve(self, step: int) -> None:
        """Give the values that wait for the step's number that number, or ``GONE``."""
        for pending in self.pending or ():
            pending.step = step


_NEW = StepValues()


def _copy(source: StepValues | PlainSteps, target: StepValues | PlainSteps) -> None:
    for name in StepValues.__slots__:
        setattr(target, name, getattr(source, name))


def merge(values: StepValues | PlainSteps, earlier: StepValues) -> None:
    """Add the values of an earlier part of the same step."""
    values.flags |= earlier.flags
    values.losses += earlier.losses
    values.tokens += earlier.tokens
    values.samples += earlier.samples
    values.loss_sum += earlier.loss_sum
    values.norm_squared += earlier.norm_squared
    if earlier.flags & StepFlag.LEARNING_RATE:
        values.learning_rate = earlier.learning_rate
    if earlier.pending is not None:
        values.pending = [*earlier.pending, *(values.pending or ())]


class OpenPart(NamedTuple):
    """A step in progress that is set aside: the lengths of its trace and arguments, its values."""

    traced: int
    arguments: int
    values: StepValues


class _Part(NamedTuple):
    """Updates after one backward pass, or after several that accumulate gradients."""

    calls: dict[int, int]
    """Steps of each optimizer, by key, the last one last"""
    values: StepValues
    spent_ns: Sequence[int]
    ended_ns: int

    @property
    def last(self) -> int:
        return next(reversed(self.calls), 0)


class _Optimizer(NamedTuple):
    """A living optimizer that has stepped."""

    ref: weakref.ref[Any]
    key: int
    """Key by which the parts and the pacemaker refer to it, unlike an id never another one's"""


class StepRecorder:
    """Ends and writes steps. In the training thread (or, for optimizers in backward, an autograd thread).

    What a plain step needs is in ``plain``, which records those by itself; the hooks that divide the training into steps use
    its attributes, and ``trace``, ``arguments`` and ``values`` are its own.
    """

    __slots__ = (
        "_append", "_calls", "_carry", "_compiling_ns", "_early", "_first", "_has_deleted", "_keys", "_optimizers",
        "_pacemaker", "_parts", "_seen_backward", "_without", "_work_done", "arguments", "direct", "evaluations", "logged",
        "models", "plain", "restarts", "sizes", "trace", "values",
    )  # fmt: skip

    def __init__(self, writer: FlightWriter) -> None:
        self.plain = plain_steps(writer)
        self.trace, self.arguments = self.plain.trace, self.plain.arguments
        self.values = self.plain
        """Values of the part in progress"""
        self.plain.slow_end = self.end_plainly
        self.direct = False
        """Whether the user marks the boundaries by ``torchobs.step()``."""
        self.sizes: dict[int, tuple[int, int]] = {}
        """Tokens and samples of a batch by loader, inferred; empty if they are not. Replaced, never changed."""
        self.logged = set[str]()
        """Which of the two the script gives to ``torchobs.log``: from then on they are not inferred"""
        self.restarts = 0
        """How often the hooks were off for a while"""
        self.models = Models()
        self._parts: list[_Part] = []
        self._pacemaker, self._calls = 0, 1
        """Key of the optimizer that ends steps, 0 while unknown; how often it is called after one backward pass"""
        self._without, self._seen_backward = 0, False
        """Optimizer steps that continued a step since the last backward pass; whether there was a backward pass"""
        self._keys, self._optimizers = count(1), dict[int, _Optimizer]()
        """The living optimizers that have stepped, by id"""
        self._first: dict[int, TensorReference] = {}
        """The first parameters of these, and of deleted ones that the parts or the pacemaker name, by key"""
        self._has_deleted = False
        """Whether it may contain deleted ones"""
        self._early = 0
        """The codes of boundaries that were replayed before the part's end, as bits"""
        self._work_done, self._append = writer.work_done, writer.append
        self._carry: Carry | None = None
        self.evaluations: deque[tuple[int, int]] = deque(maxlen=_MOST_EVALUATIONS)
        """Begin and end of finished evaluations, in ns; for the sampler thread, which removes them"""
        self._compiling_ns = 0

    @property
    def step(self) -> int:
        """Number of the last step that ended."""
        return self.plain.step

    @property
    def ended(self) -> int:
        """Number of the last step that has ended, the very first one included, which is written later."""
        return self.step + (not self._pacemaker and bool(self._parts))

    @property
    def in_progress(self) -> int:
        """Number of the step in progress."""
        return self.ended + 1

    def optimizers(self) -> list[Any]:
        """Return the living optimizers that have stepped. From any thread."""
        return [optimizer for entry in list(self._optimizers.values()) if (optimizer := entry.ref()) is not None]

    def alive(self, key: int) -> Any:
        """Return the optimizer of that id; ``None`` if it has not stepped or was deleted."""
        entry = self._optimizers.get(key)
        return None if entry is None else entry.ref()

    # -- values ------------------------------------------------------------------------------------------------------------

    def log(self, loss: float | None, tokens: int, samples: int) -> None:
        """Record values of ``torchobs.log``, for the step in progress, or for the last if the hooks have just ended it."""
        self.plain.log_wins = self.plain.log_wins or loss is not None
        tokens, samples = max(0, min(tokens, _U64)), max(0, min(samples, _U32))
        values: StepValues | PlainSteps | None = None
        if self.logged_step() != self.step:
            values = self._parts[-1].values if self._parts and not self._has(_TRAINING) else self.values
        tokens, samples = self._give("tokens", tokens, values), self._give("samples", samples, values)
        if values is None:
            self.late(self.step, StepFlag.LOSS if loss is not None else 0, loss or 0.0, 0.0, tokens, samples)
            return
        values.tokens, values.samples = min(values.tokens + tokens, _U64), min(values.samples + samples, _U32)
        if loss is not None:
            values.loss_sum, values.losses = loss, 1
            values.flags |= StepFlag.LOSS

    def expect_loss(self) -> int:
        """Accept only the script's loss, which a device has yet to deliver; return the number of its step."""
        self.plain.log_wins = True
        return self.logged_step()

    def logged_step(self) -> int:
        """Return the number of the step that :meth:`log` would apply to."""
        ended = self.step and not self._parts and not self.direct and not self._has(_TRAINING)
        return self.step if ended else self.step + 1

    def steps_done(self) -> int:
        """Return the number of steps that made the weights: the step of a checkpoint, also after an evaluation."""
        return self.logged_step() if self.direct else self.ended

    def pending_step(self) -> PendingStep | int:
        """Return the number of the step in progress or, while that is open, a placeholder for ``resolve_step``.

        For values that a device delivers asynchronously.
        """
        if not self._parts:
            return self.step + 1
        pending: list[PendingStep] = self.values.pending or [PendingStep()]
        self.values.pending = pending
        return pending[0]

    def flag(self, flag: int) -> None:
        """Set a flag (``StepFlag``) of the step in progress."""
        self.values.flags |= flag

    def has_flag(self, flag: int) -> bool:
        """Return whether a flag of the step in progress is set, be it of an earlier part."""
        return bool(self.values.flags & flag) or any(part.values.flags & flag for part in self._parts)

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
        if self.plain.log_wins:
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

    def take_norm_back(self) -> None:
        """Undo :meth:`add_norm` with ``within_step``."""
        self.values.norm_squared = self.values.norm_base

    def begin_closure(self) -> None:
        """Record that an optimizer has a closure.

        Of its evaluations, the first loss counts (``step()`` returns it) and the last gradient, added to those before it.
        """
        values = self.values
        values.norm_base, values.evaluated = values.norm_squared, False
        values.flags |= StepFlag.CLOSURE

    def late(self, step: int, flags: int, loss: float, norm: float, tokens: int = 0, samples: int = 0, losses: int = 1) -> None:
        """Write values of a step that has ended; ``losses``: how many the loss sums over."""
        now_ns = time.monotonic_ns()
        self._append(step, now_ns, RecordKind.LATE, flags, losses, 0.0, loss, norm, 0.0, _UNTIMED, tokens, samples)

    def learn_sizes(self, loader: int, tokens: int, samples: int) -> None:
        """Count so many tokens and samples for each batch of that loader (id) from now on, unless the script logs them."""
        sizes = 0 if "tokens" in self.logged else tokens, 0 if "samples" in self.logged else samples
        others = {key: value for key, value in self.sizes.items() if key != loader}
        others = dict(islice(others.items(), max(0, len(others) + 1 - MOST_LOADERS), None))
        self.sizes, self.plain.expected = others | ({loader: sizes} if any(sizes) else {}), None

    def forget_sizes(self) -> None:
        """Infer no more sizes."""
        self.sizes, self.plain.expected = {}, None

    def _give(self, name: str, amount: int, values: StepValues | PlainSteps | None) -> int:
        """Stop inferring values that the script logs; return the part not counted yet. ``values``: of the step in progress."""
        if not amount or name in self.logged:
            return amount
        self.logged.add(name)
        for loader, sizes in self.sizes.items():
            self.learn_sizes(loader, *sizes)
        if values is not None:
            setattr(values, name, 0)
        return uncounted(amount, self._work_done()[name == "samples"], self.step, ended=values is None)

    # -- boundaries --------------------------------------------------------------------------------------------------------

    def mark(self, code: int, now_ns: int, argument: int | None = None) -> None:
        """Record a boundary; hooks in the hot path append to the trace directly."""
        if argument is not None:
            self.arguments.append(argument)
        self.trace.append(now_ns << 4 | code)
        self.relieve()

    def relieve(self) -> None:
        """Go through the trace early if it has become long (a long evaluation)."""
        if len(self.trace) > LONG_TRACE:
            for stamp in self.trace:
                self._early |= 1 << (stamp & 15)
            self._carry, self.plain.clean = self._walk(), False
            self._carry.merge()
            self.evaluations.extend(self._carry.evaluations)
            self._carry.evaluations = []

    def _walk(self) -> Carry:
        """Go through the trace, and begin another one."""
        if not self.step and self._carry is None and self.trace:
            code = self.trace[0] & 15
            if code == BACKWARD_BEGINS or (code == PIN and self.arguments[0] == COMPILE):  # no step begins so
                self.values.flags |= StepFlag.UNTIMED
        state = walk(self.trace, self.arguments, self.plain.begun_ns, self._carry)
        self.trace.clear()
        self.arguments.clear()
        return state

    def _has(self, codes: int) -> bool:
        """Return whether there was one of these boundaries since the last part."""
        return bool(self._early & codes) or any(codes >> (stamp & 15) & 1 for stamp in self.trace)

    def compile_begins(self, now_ns: int) -> None:
        """Begin a compilation in the training thread or the autograd thread that it waits for."""
        self.mark(PIN, now_ns, COMPILE)
        self._compiling_ns = now_ns

    def compile_ends(self, now_ns: int) -> None:
        """End the compilation; the phase before it continues. Cannot raise."""
        self._compiling_ns = 0
        self.trace.append(now_ns << 4 | UNPIN)

    def has_begun(self, besides: Collection[int] = ()) -> bool:
        """Return whether anything was recorded since the last end, ``besides`` those boundaries. From any thread."""
        return self._carry is not None or any(stamp & 15 not in besides for stamp in self.trace[:8])

    def in_fetch(self) -> bool:
        """Return whether the training thread is fetching a batch."""
        return bool(self.trace) and self.trace[-1] & 15 == FETCH

    def exhausted(self, since_ns: int) -> set[int]:
        """Return the arguments of this step's fetches since then that found their loader exhausted."""
        return exhausted(self.trace, self.arguments, since_ns)

    def phase(self) -> tuple[int, int]:
        """Return the current phase and when it began, in ns. For the sampler thread: the trace may change meanwhile."""
        compiling_ns, last = self._compiling_ns, self.trace[-1:]
        if compiling_ns:
            return COMPILE, compiling_ns
        if not last:
            return OTHER, self.plain.begun_ns
        code, named = last[0] & 15, self.arguments[-1:]
        pinned = code == PIN and bool(named) and named[0] in range(COMPILE + 1)
        return named[0] if pinned else PHASE_OF[code], last[0] >> 4

    def so_far(self) -> tuple[int, Carry] | None:
        """Return the number of the last step written, and the time since its end as far as known. For the sampler thread.

        ``None`` if the training thread has ended a step meanwhile. Each copy is consistent, since the GIL makes it atomic.
        """
        step, parts, trace, arguments = self.step, self._parts.copy(), self.trace.copy(), self.arguments.copy()
        carry, begun_ns = self._carry, self.plain.begun_ns
        with contextlib.suppress(StopIteration):  # the arguments of a trace that has just been cleared
            state = walk(trace, arguments, begun_ns, carry)
            for part in parts:
                state.add(part.spent_ns)
            if self.step == step and len(self.trace) >= len(trace):
                return step, state
        return None

    def begin_capture(self) -> OpenPart:
        """Set the step in progress aside during the capture of a CUDA graph; return it for :meth:`end_capture`."""
        self.plain.sole = 0  # so that the hooks do not take the fast path
        return OpenPart(len(self.trace), len(self.arguments), self._take_values())

    def end_capture(self, aside: OpenPart) -> None:
        """Continue that step, without the records since."""
        del self.trace[aside.traced :], self.arguments[aside.arguments :]
        _copy(aside.values, self.plain)

    def _take_values(self) -> StepValues:
        """Return the open values, and begin with others."""
        values = StepValues()
        _copy(self.plain, values)
        _copy(_NEW, self.plain)
        return values

    # -- the step's end ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any, *, evaluates: bool = False, within_backward: bool = False) -> bool:
        """Record that an optimizer is about to step; return whether it has never stepped. Rule 1.

        ``evaluates``: its closure does the backward pass. ``within_backward``: it steps in one (rule 4).
        """
        fresh = self.alive(id(optimizer)) is not optimizer
        goes_on = fresh and (evaluates or self._has(_GOING_ON))
        key = self._key(optimizer)
        if fresh:
            self._end_model()
        if evaluates or self._has(_BACKWARD):
            self._end_cycle(PASS if within_backward else key)
        if fresh and self.models.begins(optimizer, self.step, goes_on=goes_on):
            self.values.flags |= StepFlag.NEW_MODEL
        if within_backward:
            self.plain.in_pass = True
        return fresh

    def _end_cycle(self, key: int) -> None:
        """Write the parts as a whole step if that optimizer is among them. Rule 1."""
        if any(key in part.calls for part in self._parts):
            last = self._parts[-1]
            self._pacemaker, self._calls = last.last, last.calls[last.last]
            self._write_parts()

    def _end_model(self, besides: int = 0) -> None:
        """Write each part as a step if their optimizers and the pacemaker have been deleted: none will step again.

        As one step they would depend on when the last reference to one of them went, which may be in another thread.
        ``besides``: so many of the last ones stay open.
        """
        if not self._parts or not self._has_deleted:
            return
        living = {PASS, 0, *(entry.key for entry in list(self._optimizers.values()))}
        if living.isdisjoint(self._named()):
            parts, number = self._parts, max(0, len(self._parts) - besides)
            for part in parts[:number]:
                self._parts = [part]
                self._write_parts()
            self._parts = parts[number:]

    def note_unseen(self) -> None:
        """Record a backward pass in another thread than the steps, or that the training goes on in another thread."""
        self._early |= _UNSEEN

    def optimizer_ends(self, optimizer: Any, now_ns: int) -> None:
        """Record that an optimizer has stepped, or that the loss scaler skipped its step."""
        if id(optimizer) == self.plain.sole:
            self.end_plainly(now_ns)
            return
        self._stepped(self._key(optimizer), now_ns)

    def end_pass(self) -> None:
        """End the backward pass in which optimizers have stepped. Rule 4."""
        self.plain.in_pass = False
        self._stepped(PASS, self.trace[-1] >> 4 if self.trace else time.monotonic_ns())

    def _stepped(self, key: int, now_ns: int) -> None:
        """Close a part, and write the step if it is whole. Rules 2 and 3."""
        if self.direct:
            self.mark(STEP_ENDS, now_ns)
            return
        has_backward = self._has(_BACKWARD)
        if has_backward:
            self._end_cycle(key)  # a closure without a backward pass so far may have done one
        parts, calls, is_whole = self._parts, {key: 1}, len(self._parts) >= MOST_PARTS
        if has_backward:
            self._without, self._seen_backward = 0, True
        elif parts:
            grown = parts.pop()
            if self._carry is not None:
                self._carry.add(grown.spent_ns)
            merge(self.values, grown.values)
            calls = grown.calls
            self._without += key in calls
            calls[key] = calls.pop(key, 0) + 1
            is_whole = self._without >= MOST_WITHOUT
        elif self._seen_backward and self._without < MOST_WITHOUT:
            self._without += 1
            if key == self._pacemaker:
                self._calls, self.plain.sole = self._calls + 1, 0
            self.mark(STEP_ENDS, now_ns)
            return
        else:
            is_whole = True
        self._close(calls, now_ns)
        if is_whole or (key == self._pacemaker and calls[key] >= self._calls):
            self._write_parts()

    def end_plainly(self, now_ns: int) -> None:
        """End a step of the pacemaker alone, as a plain step if possible, with the sizes of its batch."""
        plain = self.plain
        if plain.arguments != plain.expected:
            loaders = plain.expected = plain.arguments[:2]
            plain.batch_tokens, plain.batch_samples = self.sizes.get(loaders[0], (0, 0)) if loaders else (0, 0)
        if not plain.append(now_ns):
            self._stepped(self._pacemaker, now_ns)

    def end(self, now_ns: int) -> None:
        """End the step at the user's request (``torchobs.step``). Rule 5."""
        was_direct, touched = self.direct, self._has(_TRAINING)
        self.direct, self.plain.sole = True, 0
        if not self._parts or touched:
            if not was_direct and not touched and self.step:
                return  # the hooks have written this step; from the next one on the user's boundaries count
            self.values.flags |= StepFlag.DIRECT
            self._close({}, now_ns)
        self._write_parts()

    def flush(self) -> None:
        """Write complete steps when the rank ends. Rule 5."""
        self._end_model(besides=1)
        if self._pacemaker:
            for part in self._parts:
                part.values.resolve(GONE)
                self.late(self.step, 0, 0.0, 0.0, part.values.tokens, part.values.samples)
            self._parts.clear()
        elif self._parts:
            self._write_parts()

    def restart(self) -> None:
        """Drop the step in progress, since the hooks are off for a while. The next step's start is unknown."""
        self.flush()
        self.trace.clear()
        self.arguments.clear()
        self._carry, self.plain.clean, self.restarts = None, False, self.restarts + 1
        self._take_values().resolve(GONE)
        self.values.flags = StepFlag.UNTIMED
        self._early, self.plain.in_pass = _UNSEEN if self._seen_backward else 0, False

    def _close(self, calls: dict[int, int], now_ns: int) -> None:
        """Close a part: divide its time, and add the sizes of its batches to its values."""
        carry, plain = self._walk(), self.plain
        values, self._early, plain.sole, spent_ns = self._take_values(), 0, 0, carry.close(now_ns)
        evaluations, batches = carry.pop_finished()
        self.evaluations.extend(evaluations)
        for loader, number in batches.items() if self.sizes else ():
            tokens, samples = self.sizes.get(loader, (0, 0))
            values.tokens += number * tokens
            values.samples = min(values.samples + number * samples, _U32)
        self._carry, plain.clean, plain.begun_ns = carry, carry.is_clean, now_ns
        self._parts.append(_Part(calls, values, spent_ns, now_ns))

    def _write_parts(self) -> None:
        """Write the parts as one step."""
        parts, self._parts = self._parts, []
        plain, last, values, step = self.plain, parts[-1], parts[-1].values, self.step + 1
        for part in reversed(parts[:-1]):
            merge(values, part.values)
        values.resolve(step)
        spent = [sum(lengths) for lengths in zip(*[part.spent_ns for part in parts], strict=True)]
        plain.step = step
        if self._carry is not None:
            self._carry.has_batch = False
        plain.metered = not step % METER_EVERY
        norm = sqrt(values.norm_squared) if values.flags & StepFlag.GRAD_NORM else 0.0
        phases = tuple([length / 1e9 for length in spent]) if plain.timed else _UNTIMED
        is_plain = not self.direct and len(parts) == 1 and last.calls == {self._pacemaker: 1} and plain.pending is None
        living = list(self._optimizers.items()) if is_plain else []
        plain.sole = next((ident for ident, entry in living if entry.key == self._pacemaker), 0)
        duration_s = sum(spent[phase] for phase in WITHIN_STEP) / 1e9
        self._append(
            step, last.ended_ns, RecordKind.STEP, values.flags, values.losses & _U32, duration_s, values.loss_sum,
            norm, values.learning_rate, phases, values.tokens, values.samples, values.norm_scale,
        )  # fmt: skip

    # -- optimizers --------------------------------------------------------------------------------------------------------

    def _key(self, optimizer: Any) -> int:
        """Return an optimizer's key: its own, or that of a deleted one over the same parameters, as if that continued."""
        entry = self._optimizers.get(ident := id(optimizer))
        if entry is not None and entry.ref() is optimizer:
            return entry.key
        first, key = next(parameters_of(optimizer), None), 0
        if self._has_deleted:  # else in no time: there may be an optimizer for each of a thousand parameters
            self._has_deleted = False
            named, living = self._named(), {entry.key for entry in list(self._optimizers.values())}
            self._first = {key: reference for key, reference in self._first.items() if key in living or key in named}
            deleted = [key for key in self._first if key not in living]
            if deleted:
                self._has_deleted = True
            key = next((key for key in deleted if self._first[key]() is first is not None), 0)
        key = key or next(self._keys)
        if first is not None:
            self._first[key] = TensorReference(first)
        self._optimizers[ident] = _Optimizer(weakref.ref(optimizer, lambda _: self._forget(ident)), key)
        return key

    def _named(self) -> set[int]:
        """Return the keys of the optimizers in the parts, and of the pacemaker."""
        return {self._pacemaker}.union(*(part.calls for part in self._parts))

    def _forget(self, ident: int) -> None:
        """Record that an optimizer was deleted. In any thread, at any moment."""
        self._optimizers.pop(ident, None)
        self._has_deleted = True
        self.plain.sole = 0 if self.plain.sole == ident else self.plain.sole


def parameters_of(*optimizers: Any) -> Iterator[Any]:
    """Yield the parameters of optimizers, in their order. From any thread."""
    groups = (group for optimizer in optimizers for group in list(getattr(optimizer, "param_groups", ())))
    return (parameter for group in groups for parameter in list(group["params"]))


# -- tokens and samples, inferred from batches until the script gives them to ``torchobs.log`` -------------------------------

MOST_LOADERS = 16
"""Most loaders with sizes kept, the last ones: some loops make a new one for every epoch"""
_SEVERAL = 2
"""An amount above so many steps' is that of all steps so far: a script that logs every tenth step"""


def uncounted(amount: int, counted: int, steps: int, *, ended: bool) -> int:
    """Return the part of the first amount that a script gives that has not been inferred before.

    It is that of one step, the one in progress or (``ended``) the last, or of all ``steps`` so far, in which ``counted`` were
    inferred: the latter if it is much more than a mean step's.
    """
    mean = counted / max(1, steps)
    before = counted if amount > _SEVERAL * mean else round(mean) if ended else 0
    return max(0, amount - before)


# -- another model in the same process -----------------------------------------------------------------------------------------

LEAST_STEPS = WARM_UP
"""A model with fewer steps has no baseline yet. So the optimizers of one training may begin to step one after the other (a GAN
that trains its critic first), and a new model every few steps (Reptile's, an adversarial input's) is one training."""
_ROOM = 1024


class Models:
    """Parameters that have been stepped, which show a change of model in the same process.

    It is the next fold of a cross-validation, the next trial of a sweep: the first step of an optimizer with no
    parameter that was ever stepped, while training is in progress, and not with the gradients of another's step: an actor's may
    begin late, and uses the critic's backward pass. Baselines of the former model (loss, norms, step times) do not apply to the
    new one, so its first record carries ``StepFlag.NEW_MODEL``. A new optimizer over the same parameters, or over more besides
    them, continues the same model. In the training thread.
    """

    __slots__ = ("_begun", "_parameters", "_room", "changes", "since")

    def __init__(self) -> None:
        self.changes = 0
        self.since = 0
        """The step after which the current model began"""
        self._begun = 0
        """The step after which the last set of unseen parameters began, whether or not it counted as another model"""
        self._parameters: dict[int, TensorReference] = {}
        self._room = _ROOM

    def begins(self, optimizer: Any, step: int, *, goes_on: bool) -> bool:
        """Return whether another model begins with this optimizer's first step, which follows ``step``.

        ``goes_on``: whether training has gone on since the last optimizer's step.
        """
        parameters = list(parameters_of(optimizer))
        stepped = self._parameters
        unseen = bool(stepped) and not any((ref := stepped.get(id(x))) is not None and ref() is x for x in parameters)
        another = unseen and goes_on and bool(parameters) and step - self._begun >= LEAST_STEPS
        if unseen and parameters:
            self._begun = step
        if another:
            self.changes, self.since = self.changes + 1, step
        stepped.update((id(parameter), TensorReference(parameter)) for parameter in parameters)
        if len(stepped) > self._room:
            self._parameters = {key: reference for key, reference in stepped.items() if reference() is not None}
            self._room = max(_ROOM, 2 * len(self._parameters))
        return another
