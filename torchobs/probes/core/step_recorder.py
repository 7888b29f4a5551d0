"""Decide where training steps end, and write one record for each with everything that the probes saw since the last end.

A step ends when every optimizer of the cycle has stepped (``optimizer_cycle``). So a GAN's two optimizers are one step, and so
are the hundreds of an optimizer-in-backward; with a Wasserstein GAN's several critic updates, the critic's updates are counted.
An end is provisional until the first repeat, and after steps of an occasional optimizer (the generator): those belong to the
next step, or to none if the run ends.
"""

from __future__ import annotations

import weakref
from math import sqrt
from typing import TYPE_CHECKING, Any

from torchobs.flight.format.step_record import StepFlag
from torchobs.probes.core.boundaries import LONG_TRACE, PIN, STEP_ENDS, cut, cut_after_backward
from torchobs.probes.core.model_tracker import Models
from torchobs.probes.core.open_step import METER_EVERY, U32, OpenStep
from torchobs.probes.core.optimizer_cycle import MOST_WITHOUT, OptimizerCycle, first_gradient
from torchobs.probes.core.step_values import GONE, OpenPart, StepEnd, StepValues
from torchobs.probes.core.timeline import COMPILE, PhaseTimeline

if TYPE_CHECKING:
    from torchobs.flight.writer.writer import FlightWriter

_U64 = (1 << 64) - 1
_GRAD_NORM = StepFlag.GRAD_NORM
MOST_PERTURBATIONS = 2
"""Manual parameter changes after a backward within one step: sharpness-aware minimisation makes one, its variants two"""


class StepRecorder(OpenStep):
    """Ends and writes steps. In the training thread (or, for optimizers in backward, an autograd thread).

    Other probes read ``step``, ``ended``, ``metered`` and ``models`` and call methods. The hooks that divide the training into
    steps also use ``trace``, ``arguments``, ``values``, ``pending``, ``sole``, ``direct`` and ``likely_end`` directly, where a
    call would cost more than what it does.
    """

    __slots__ = (
        "_alive", "_append_plain", "_cycle", "_deferred", "_extra", "_gradient", "_manual", "_perturbed", "_provisional",
        "_without", "direct", "likely_end", "models", "restarts", "sole",
    )  # fmt: skip

    def __init__(self, writer: FlightWriter) -> None:
        super().__init__(writer)
        self.direct = False
        """Whether the user marks the boundaries by ``torchobs.step()``."""
        self.likely_end: tuple[int, int] | None = None
        """Where a manual step has probably ended, set by ``ManualSteps``: lengths of its part of trace and arguments"""
        self.restarts = 0
        """How often the hooks were off for a while"""
        self.models, self.sole = Models(), 0
        """id of the only optimizer, each step of which is a training step; 0 while unknown or if there are several"""
        self._append_plain = writer.append_plain
        self._cycle = OptimizerCycle()
        self._deferred: list[StepEnd] = []
        """Ends of optimizers that may belong to the next step of the others"""
        self._perturbed: list[StepEnd] = []
        """Manual ends, which may be parts of an optimizer's step"""
        self._manual = self._extra = False
        self._gradient: tuple[int, int, int] | None = None
        self._without = 0
        """How many optimizer steps have continued a step since the last backward"""
        self._alive: dict[int, weakref.ref[object]] = {}
        self._provisional: StepEnd | None = None

    @property
    def ended(self) -> int:
        """Number of the last step that has ended, a provisional end included."""
        return self.step + (self._provisional is not None)

    @property
    def in_progress(self) -> int:
        """Number of the step in progress: the same for all optimizers of a cycle, once it is learned."""
        return self.step + 1 if self._cycle.is_within() else self.ended + 1

    @property
    def last_complete(self) -> int:
        """The same with a manual step that has probably ended: what the rank's end would write."""
        return self.ended + (self.likely_end is not None and not self.direct)

    @property
    def pending(self) -> set[int]:
        """Optimizers, by id, yet to step in this cycle, if they step within the backward pass: always the same set."""
        return self._cycle.pending

    def log(self, loss: float | None, tokens: int, samples: int) -> None:
        """Record values of ``torchobs.log``, for the step in progress or the one that the hooks have just seen end."""
        self.log_wins = self.log_wins or loss is not None
        tokens, samples = max(0, min(tokens, _U64)), max(0, min(samples, U32))
        values = None
        if self.logged_step() != self.step:
            values = self.values if self._provisional is None or self._touched() else self._provisional.values
        if (tokens and not self.given.tokens) or (samples and not self.given.samples):
            tokens, samples = self._give_sizes(tokens, samples, values)
        if values is None:
            self.late(self.step, StepFlag.LOSS if loss is not None else 0, loss or 0.0, 0.0, tokens, samples)
            return
        values.tokens, values.samples = min(values.tokens + tokens, _U64), min(values.samples + samples, U32)
        if loss is not None:
            values.loss_sum, values.losses = loss, 1
            values.flags |= StepFlag.LOSS

    def expect_loss(self) -> int:
        """Let no other loss count than the script's, which a device has yet to deliver; return the number of its step."""
        self.log_wins = True
        return self.logged_step()

    def logged_step(self) -> int:
        """Return the number of the step that :meth:`log` would apply to."""
        ended = self.step and self._provisional is None and not self.direct and not self._touched()
        return self.step if ended else self.step + 1

    def pending_step(self) -> StepValues | int:
        """Return the number of the step in progress or, while a provisional end leaves that open, its values.

        ``step_values.resolve_step`` turns the values into the number later. For values that a device delivers asynchronously.
        """
        return self.values if self._provisional is not None or self._deferred or self._perturbed else self.step + 1

    def mark(self, code: int, now_ns: int, argument: int | None = None) -> None:
        """Record a boundary; hooks in the hot path append to the trace directly."""
        if argument is not None:
            self.arguments.append(argument)
        self.trace.append(now_ns << 4 | code)
        self.relieve()

    def relieve(self) -> None:
        """Replay the trace early if it has become long (a long evaluation)."""
        if len(self.trace) > LONG_TRACE:
            self.end_where_likely()
            self._relieved, self._merged_backward = self._relieved or self._goes_on(), self._has_backward()
            self._replay()

    def compile_begins(self, now_ns: int) -> None:
        """Begin a compilation in the training thread or the autograd thread that it waits for."""
        self.mark(PIN, now_ns, COMPILE)
        self._compiling_ns = now_ns

    def unwritten(self) -> list[StepEnd]:
        """See :meth:`OpenStep.so_far`."""
        return [*self._deferred, *self._perturbed, *filter(None, [self._provisional])]

    # -- the step's end ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: object, *, evaluates: bool = False) -> bool:
        """Note that an optimizer is about to step; if it has already stepped in this cycle, the cycle is over.

        ``evaluates``: its closure does the backward. Return True if it has never stepped.
        """
        key, cycle, fresh = id(optimizer), self._cycle, not self.models.knows(optimizer)
        if self.likely_end is not None or self._perturbed:
            for values in (self.values, *(part.values for part in self._perturbed)):
                values.leave_norm_out()  # measured for a manual step; it is measured again for this one
        self.likely_end, self._manual = None, False
        goes_on = fresh and (evaluates or self._goes_on())
        cycle.catch_up()
        if (key in cycle.seen and self.alive(key) is optimizer) or cycle.replaces(optimizer):
            self._settle_repeat(gets_gradients=evaluates or self._has_new_gradient(optimizer))
        elif self._provisional is not None:
            if cycle.begins_another(key):
                self._end_stage()
            else:
                self._reopen(self._provisional)
        elif not evaluates and self._is_more_of_the_last(key) and not self._has_new_gradient(optimizer):
            cycle.expect_more(key)
            self._extra, self.sole, self._without = True, 0, self._without + 1
        if key in cycle.expected:
            self._merge_all(self._deferred)
        self._merge_all(self._perturbed)
        if fresh and self.models.begins(optimizer, self.step, goes_on=goes_on):
            self.values.flags |= StepFlag.NEW_MODEL
        return fresh

    def _settle_repeat(self, *, gets_gradients: bool) -> None:
        """Decide what the provisional end was, now that one of its optimizers steps again."""
        ended, cycle = self._provisional, self._cycle
        goes_on = gets_gradients or self._goes_on() or self._without >= MOST_WITHOUT
        if ended is not None and ended.backward and not goes_on:
            self._without += 1
            self._reopen(ended)
        elif ended is not None and cycle.may_be_occasional(self.step, len(self._deferred)):
            self._deferred.append(ended)
            self._provisional = None
            cycle.defer()
        else:
            self._end_stage()

    def _end_stage(self) -> None:
        """End the cycle: learn the optimizers that have stepped, and write what is provisional."""
        self._write_all(self._deferred)
        self._cycle.learn(self.step)
        self._commit()
        self._cycle.pending.clear()

    def _is_more_of_the_last(self, key: int) -> bool:
        """Return True if the step written last continues: it had a backward, and there was none since."""
        known = key in self._cycle.expected and not self.direct and self._without < MOST_WITHOUT
        return known and self.step not in {0, self._last_bare} and not (self._perturbed or self._goes_on())

    def _has_new_gradient(self, optimizer: object) -> bool:
        """Return True if the optimizer's first parameter has got another gradient since it last continued a step."""
        known, now = self._gradient, first_gradient(optimizer) if self._without else None
        return known is not None and now is not None and known[0] == now[0] and known != now

    def note_nested(self) -> None:
        """Note that an optimizer's step has called another's."""
        self._cycle.is_nested = True

    def optimizer_ends(self, optimizer: object, now_ns: int, *, within_backward: bool = False) -> None:
        """Note that an optimizer has stepped, perhaps ``within_backward``, or that the loss scaler skipped its step."""
        key, cycle = id(optimizer), self._cycle
        if key == self.sole:
            self.end_plainly(now_ns)
            return
        cycle.within_backward = within_backward
        if self._without:
            self._gradient = first_gradient(optimizer)
        if self.direct or self._extra:
            self._extra = False
            self.mark(STEP_ENDS, now_ns)
            return
        cycle.note(key)
        in_one_pass = within_backward and not self._merged_backward
        if self.alive(key) is not optimizer:
            self._alive[key] = weakref.ref(optimizer, lambda _: self._forget(key))
            cycle.note_first(key, optimizer)
        self._close(now_ns)
        if cycle.are_complete():
            cycle.note_occasional(self.step)
            cycle.in_one_pass = in_one_pass
            self._commit()

    def end_pass(self) -> None:
        """End the step with the last backward if only some optimizers have stepped in it, and another one begins.

        Where a cycle is one pass, the others were left out (frozen, unused layers); else they may step in the next one.
        """
        if not self._cycle.is_begun() or not self.trace or self.direct:
            return
        self._cycle.catch_up()
        trace, arguments = cut_after_backward(self.trace, self.arguments)
        self._close(self.trace[-1] >> 4)
        if self._cycle.in_one_pass:
            self._commit()
        self.trace += trace
        self.arguments += arguments

    def end_plainly(self, now_ns: int) -> None:
        """End the step of the only optimizer: the fast path, taken by nearly all steps.

        A plain step is one fetch (or none), one backward and one optimizer step, in this order.
        """
        values, step = self.values, self.step + 1
        flags = values.flags
        if self.arguments != self._expected:
            self._expect()
        if not (self._clean and self._timed) or not self._append_plain(
            self.trace, step, now_ns, self._begun_ns, flags, values.losses, values.loss_sum,
            sqrt(values.norm_squared) if flags & _GRAD_NORM else 0.0, values.learning_rate, values.tokens + self._tokens,
            values.samples + self._samples, values.norm_scale,
        ):  # fmt: skip
            self._end_fully(now_ns)
            return
        del self.trace[:], self.arguments[:]
        self._begun_ns, self.step, self.metered = now_ns, step, not step % METER_EVERY
        if not values.step:
            values.step = step
        values.flags = values.losses = values.tokens = values.samples = 0
        values.loss_sum = values.norm_squared = 0.0

    def _end_fully(self, now_ns: int) -> None:
        """End a step of the only optimizer that is not plain."""
        values, self.values, backward = self.values, StepValues(), self._has_backward()
        self._relieved = self._merged_backward = False
        self._write(StepEnd(now_ns, self._times(now_ns, values), values, backward))

    def _close(self, now_ns: int) -> None:
        backward, occasional = self._has_backward(), self._cycle.are_occasional()
        self._provisional = StepEnd(now_ns, self._times(now_ns, self.values), self.values, backward, occasional)
        self.values, self._merged_backward, self._relieved = StepValues(), False, False
        self.sole = 0

    def optimizers(self) -> list[Any]:
        """Return the living optimizers that have stepped. From any thread."""
        return [optimizer for known in list(self._alive.values()) if (optimizer := known()) is not None]

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._cycle.forget(key)
        self.sole = 0 if self.sole == key else self.sole

    def alive(self, key: int) -> Any:
        """Return the optimizer of that id; ``None`` if it is unknown or was deleted."""
        known = self._alive.get(key)
        return None if known is None else known()

    def _reopen(self, ended: StepEnd) -> None:
        """Undo a provisional end: another optimizer of the same cycle steps."""
        self._provisional = None
        self._merge(ended)

    def _merge(self, ended: StepEnd) -> None:
        self._replay()
        self._timeline.add(ended.spent_ns)
        self.values.merge(ended.values)
        self._merged_backward = self._merged_backward or ended.backward

    def _merge_all(self, parts: list[StepEnd]) -> None:
        """Merge provisional ends into the step in progress.

        Where parameters were changed before the last backward, the first loss is the step's: it was computed with the
        parameters that the step began with (sharpness-aware minimisation).
        """
        if any(part.perturbed for part in parts):
            for later in (self.values, *(part.values for part in parts[1:])):
                later.leave_loss_out()
        for part in parts:
            self._merge(part)
        parts.clear()

    def end(self, now_ns: int) -> None:
        """End the step at the user's request (``torchobs.step``)."""
        known, touched = self.direct, self._touched()
        self.direct, self.sole = True, 0
        self._write_all(self._deferred)
        if self._perturbed:
            self._commit()
            self._write_all(self._perturbed)
        if not known and not touched and self._provisional is None and self.step:
            return  # the hooks have written this step; from the next one on the user's boundaries count
        if touched:
            self._commit()
        if self._provisional is None:
            self.values.flags |= StepFlag.DIRECT
            self._close(now_ns)
        self._commit()

    def restart(self) -> None:
        """Drop the step in progress, since the hooks are off for a while. The next step's start is unknown."""
        self.flush()
        self.trace.clear()
        self.arguments.clear()
        self._timeline, self._clean, self.restarts = PhaseTimeline(), False, self.restarts + 1
        self.values.step = GONE
        self.values = StepValues()
        self.values.flags = StepFlag.UNTIMED
        self._relieved = True

    def begin_capture(self) -> OpenPart:
        """Set the step in progress aside for the capture of a CUDA graph, which is none; return it for :meth:`end_capture`."""
        self.sole = 0  # so that the hooks do not take the fast path
        self.pending.clear()
        aside, self.values = OpenPart(len(self.trace), len(self.arguments), self.values), StepValues()
        return aside

    def flush(self) -> None:
        """Write complete steps when the rank ends."""
        self.end_where_likely()
        self.end_pass()
        ended = self._provisional
        if ended is not None and ended.occasional:  # part of a step that does not follow
            for part in (*self._deferred, ended):
                part.values.step = GONE
                self.late(self.step, 0, 0.0, 0.0, part.values.tokens, part.values.samples)
            self._deferred.clear()
            self._provisional = None
        self._write_all(self._deferred)
        self._commit()
        self._write_all(self._perturbed)

    def end_where_likely(self, *, perturbed: bool = True) -> None:
        """End the step at ``likely_end``, if set; what was recorded since then belongs to the next step.

        The first few such ends are provisional, since they may be parts of an optimizer's step. ``perturbed``: the parameters
        are known to have changed meanwhile.
        """
        likely, self.likely_end = self.likely_end, None
        if likely is None or likely[0] > len(self.trace) or self.direct:
            return
        trace, arguments = cut(self.trace, self.arguments, *likely)
        values, self.values = self.values, StepValues()
        now_ns, self.sole = self.trace[-1] >> 4, 0
        self._perturbed.append(StepEnd(now_ns, self._times(now_ns, values), values, backward=True, perturbed=perturbed))
        self.trace += trace
        self.arguments += arguments
        if self._manual or len(self._perturbed) > MOST_PERTURBATIONS:
            self._manual = True
            self._write_all(self._deferred)
            self._commit()
            self.sole = 0
            self._write_all(self._perturbed)

    def _commit(self) -> None:
        ended, self._provisional = self._provisional, None
        self.sole = 0 if self.direct else self._cycle.begin()  # the next may be plain
        if ended is not None:
            self._without = 0 if ended.backward else self._without
            self._write(ended)
