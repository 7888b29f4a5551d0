"""One training step, from the end of the last to its own: what the probes saw of it, written as one record.

A step ends when every optimizer of the cycle has stepped, and the cycle is learned: it is the set of optimizers seen before
one of them steps again. So a GAN's two optimizers are one step, and so are the hundreds of an optimizer-in-backward; with a
Wasserstein GAN's several critic updates the critic's are counted. Until the first repeat, an end is provisional; so is the
generator's, which steps along now and then: a part of the next step, and of none at the run's end.
"""

from __future__ import annotations

import weakref
from math import sqrt
from typing import TYPE_CHECKING, Any

from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.probes.core.boundaries import (
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    CLOSURE_BEGINS,
    FETCH,
    FETCHED,
    LONG_TRACE,
    PIN,
    STEP_BEGINS,
    STEP_ENDS,
)  # fmt: skip
from torchobs.probes.core.model_tracker import Models
from torchobs.probes.core.open_step import OpenStep
from torchobs.probes.core.optimizer_cycle import Members, first_gradient
from torchobs.probes.core.step_values import GONE, Ended, StepValues
from torchobs.probes.core.timeline import COMPILE, PhaseTimeline

if TYPE_CHECKING:
    from torchobs.flight.writer.writer import FlightWriter

_U64, _U32 = (1 << 64) - 1, (1 << 32) - 1
_GOING_ON = frozenset({FETCH, BACKWARD_BEGINS, CLOSURE_BEGINS})
_TRAINING = _GOING_ON | {STEP_BEGINS}
MOST_PERTURBATIONS = 2
"""Changes by hand, each behind a backward, in an optimizer's step: sharpness-aware minimisation has one, its variants two"""
MOST_WITHOUT = 256
"""Steps of an optimizer since a backward that go on with the same step: one for each parameter group (DeepSpeed's ZeRO).
Whoever makes more gets the gradients in another way, and each is a step"""
METER_EVERY = 32
"""One step in 32 is metered, and counts for all of them: reading the clock twice per hook would be a third of its cost."""


class StepRecorder(OpenStep):
    """Where the step in progress ends. In the training thread (or, for optimizers in backward, an autograd thread)."""

    __slots__ = (
        "_alive", "_append_plain", "_bare", "_beside", "_by_hand", "_extra", "_gradient", "_perturbed", "_provisional",
        "_without", "direct", "likely_end", "members", "metered", "models", "rated", "sole",
    )  # fmt: skip

    def __init__(self, writer: FlightWriter) -> None:
        super().__init__(writer)
        self.direct = False
        """Whether the user gives the boundaries by ``torchobs.step()``."""
        self.likely_end: tuple[int, int] | None = None
        """Where the step will have ended (``byhand``): how much of the trace is its own, and of the arguments"""
        self.metered = False
        """Whether this step's hooks measure their own time."""
        self.models, self.sole = Models(), 0
        """id of the one optimizer whose steps are the training's; 0 while that is not known, or not so"""
        self.rated = 0
        """id of the optimizer whose learning rate is the record's, 0 if none's is"""
        self._append_plain = writer.append_plain
        self.members = Members()
        self._beside: list[Ended] = []
        """Ends of optimizers that may step along, several times, with those that they have not been told from yet"""
        self._perturbed: list[Ended] = []
        """Ends by hand, which may be parts of an optimizer's step"""
        self._by_hand = self._extra = False
        self._gradient: tuple[int, int, int] | None = None
        self._bare = self._without = 0
        """The last step without a backward, and how often an optimizer has gone on with a step since a backward"""
        self._alive: dict[int, weakref.ref[object]] = {}
        self._provisional: Ended | None = None

    @property
    def ended(self) -> int:
        """Number of the last step that has ended, if only provisionally."""
        return self.step + (self._provisional is not None)

    # -- values ------------------------------------------------------------------------------------------------------------

    def log(self, loss: float | None, tokens: int, samples: int) -> None:
        """What the user says of the step in progress or, directly after a step that the hooks saw end, of that one."""
        self.log_wins = self.log_wins or loss is not None
        tokens, samples = max(0, min(tokens, _U64)), max(0, min(samples, _U32))
        if self.logged_step() == self.step:
            self.late(self.step, StepFlag.LOSS if loss is not None else 0, loss or 0.0, 0.0, tokens, samples)
            return
        values = self.values if self._provisional is None or self._touched() else self._provisional.values
        values.tokens, values.samples = min(values.tokens + tokens, _U64), min(values.samples + samples, _U32)
        if loss is not None:
            values.loss_sum, values.losses = loss, 1
            values.flags |= StepFlag.LOSS

    def logged_step(self) -> int:
        """Return the number of the step that :meth:`log` would speak of."""
        ended = self.step and self._provisional is None and not self.direct and not self._touched()
        return self.step if ended else self.step + 1

    def pending_step(self) -> StepValues | int:
        """Return the number of the step in progress or, where it shows later whether a step has just ended, its values.

        The number is that of :meth:`became` then. For what a device delivers of this moment.
        """
        return self.values if self._provisional is not None or self._beside or self._perturbed else self.step + 1

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
            self._relieved, self._merged_backward = self._relieved or self._goes_on(), self._has_backward()
            self._replay()

    def compile_begins(self, now_ns: int) -> None:
        """The training thread, or the autograd thread that it waits for, compiles from here on."""
        self.mark(PIN, now_ns, COMPILE)
        self._compiling_ns = now_ns

    def unwritten(self) -> list[Ended]:
        """See :meth:`OpenStep.so_far`."""
        return [*self._beside, *self._perturbed, *filter(None, [self._provisional])]

    # -- the step's end ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: object, *, evaluates: bool = False) -> bool:
        """An optimizer is about to step: if it has stepped in this cycle, the cycle was over before.

        ``evaluates``: its closure does the backward. Return True if it has never stepped.
        """
        key, members = id(optimizer), self.members
        if self.likely_end is not None or self._perturbed:
            for values in (self.values, *(part.values for part in self._perturbed)):
                values.leave_norm_out()  # it was taken for a step by hand; this optimizer's is taken now
        self.likely_end, self._by_hand = None, False
        members.catch_up()
        if key in members.seen and self.alive(key) is optimizer:
            self._repeats(gets_gradients=evaluates or self._has_new_gradient(optimizer))
        elif self._provisional is not None:
            if members.is_new_beside(key):
                self._end_stage()
            else:
                self._go_on(self._provisional)
        elif not evaluates and self._is_more_of_the_last(key) and not self._has_new_gradient(optimizer):
            members.expect_more(key)
            self._extra, self.sole, self._without = True, 0, self._without + 1
        if key in members.expected:
            self._take_in(self._beside)
        self._take_in(self._perturbed)
        fresh = not self.models.knows(optimizer)
        if fresh and self.models.begins(optimizer, self.step):
            self.values.flags |= StepFlag.NEW_MODEL
        return fresh

    def _repeats(self, *, gets_gradients: bool) -> None:
        """Decide what the end was, of which an optimizer steps again."""
        ended, members = self._provisional, self.members
        goes_on = gets_gradients or self._goes_on() or self._without >= MOST_WITHOUT
        if ended is not None and ended.backward and not goes_on:
            self._without += 1
            self._go_on(ended)
        elif ended is not None and members.may_be_beside(self.step, len(self._beside)):
            self._beside.append(ended)
            self._provisional = None
            members.set_aside()
        else:
            self._end_stage()

    def _end_stage(self) -> None:
        """What was seen of the cycle is all of it."""
        self._write_all(self._beside)
        self.members.learn(self.step)
        self._commit()
        self.members.waiting.clear()

    def _is_more_of_the_last(self, key: int) -> bool:
        """Return True if the step written last still goes on: there was a backward in it, and none since."""
        known = key in self.members.expected and not self.direct and self._without < MOST_WITHOUT
        return known and self.step not in {0, self._bare} and not (self._perturbed or self._goes_on())

    def _has_new_gradient(self, optimizer: object) -> bool:
        """Return True if the same parameter that went on with a step before has been given another gradient since."""
        known, now = self._gradient, first_gradient(optimizer) if self._without else None
        return known is not None and now is not None and known[0] == now[0] and known != now

    def optimizer_ends(self, optimizer: object, now_ns: int) -> None:
        """It has stepped, or the loss scaler skipped it."""
        key, members = id(optimizer), self.members
        if key == self.sole:
            self.end_plainly(now_ns)
            return
        if self._without:
            self._gradient = first_gradient(optimizer)
        if self.direct or self._extra:
            self._extra = False
            self.mark(STEP_ENDS, now_ns)
            return
        members.note(key)
        if self.alive(key) is not optimizer:
            self._alive[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        self._close(now_ns)
        if members.are_complete():
            members.note_along(self.step)
            self._commit()

    def end_pass(self) -> None:
        """Another backward begins behind one in which some of the optimizers have stepped, and nobody told of the others."""
        if self.members.catch_up() and self.trace and not self.direct:
            self._close(self.trace[-1] >> 4)

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
            self.values, backward = StepValues(), self._has_backward()
            self._relieved = self._merged_backward = False
            self._write(Ended(now_ns, self._times(now_ns), values, backward))
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
        backward, along = self._has_backward(), self.members.are_along()
        self._provisional = Ended(now_ns, self._times(now_ns), self.values, backward, along)
        self.values, self._merged_backward, self._relieved = StepValues(), False, False
        self.sole = 0

    def optimizers(self) -> list[Any]:
        """Return those that live, of all that have stepped. From any thread."""
        return [optimizer for known in list(self._alive.values()) if (optimizer := known()) is not None]

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self.members.forget(key)
        self.sole = 0 if self.sole == key else self.sole

    def alive(self, key: int) -> Any:
        """Return the optimizer of that id; ``None`` if it is not known, or no more."""
        known = self._alive.get(key)
        return None if known is None else known()

    def _go_on(self, ended: Ended) -> None:
        """The end was none: another optimizer of the same cycle steps."""
        self._provisional = None
        self._merge(ended)

    def _merge(self, ended: Ended) -> None:
        self._replay()
        self.timeline.add(ended.spent_ns)
        self.values.merge(ended.values)
        self._merged_backward = self._merged_backward or ended.backward

    def _take_in(self, parts: list[Ended]) -> None:
        """They were no steps of their own.

        Where parameters were changed before the last backward, the first loss is the step's: it is the one at the parameters
        that the step began with (sharpness-aware minimisation).
        """
        if any(part.perturbed for part in parts):
            for later in (self.values, *(part.values for part in parts[1:])):
                later.leave_loss_out()
        for part in parts:
            self._merge(part)
        parts.clear()

    def end(self, now_ns: int) -> None:
        """The user says that the step has ended (``torchobs.step``)."""
        known, touched = self.direct, self._touched()
        self.direct, self.sole = True, 0
        self._write_all(self._beside)
        if self._perturbed:
            self._commit()
            self._write_all(self._perturbed)
        if not known and not touched and self._provisional is None and self.step:
            return  # the hooks have written this very step; from the next one on the user's word counts
        if touched:
            self._commit()
        if self._provisional is None:
            self.values.flags |= StepFlag.DIRECT
            self._close(now_ns)
        self._commit()

    def restart(self) -> None:
        """Forget the step in progress: the hooks were off for a while, or will be. The next step's start is unknown."""
        self.flush()
        self.trace.clear()
        self.arguments.clear()
        self.timeline, self._clean = PhaseTimeline(), False
        self.values.step = GONE
        self.values = StepValues()
        self.values.flags = StepFlag.UNTIMED
        self._relieved = True

    def flush(self) -> None:
        """Write what is complete (at the rank's end)."""
        self.end_where_likely()
        self.end_pass()
        ended = self._provisional
        if ended is not None and ended.along:  # a part of a step that does not come
            for part in (*self._beside, ended):
                part.values.step = GONE
                self.late(self.step, 0, 0.0, 0.0, part.values.tokens, part.values.samples)
            self._beside.clear()
            self._provisional = None
        self._write_all(self._beside)
        self._commit()
        self._write_all(self._perturbed)

    def end_where_likely(self, *, perturbed: bool = True) -> None:
        """The step has ended where that was likely, if anywhere; what was seen since then belongs to the next.

        Until a few have ended so, each may turn out to be a part of an optimizer's step: ``perturbed`` if the parameters are
        known to have changed meanwhile.
        """
        likely, self.likely_end = self.likely_end, None
        if likely is None or likely[0] > len(self.trace) or self.direct:
            return
        trace, arguments = self.trace, self.arguments
        since, named = trace[likely[0] :], arguments[likely[1] :]
        del trace[likely[0] :], arguments[likely[1] :]
        values, self.values = self.values, StepValues()
        now_ns = trace[-1] >> 4
        self.sole = 0
        self._perturbed.append(Ended(now_ns, self._times(now_ns), values, backward=True, perturbed=perturbed))
        trace += since
        arguments += named
        if self._by_hand or len(self._perturbed) > MOST_PERTURBATIONS:
            self._by_hand = True
            self._write_all(self._beside)
            self._commit()
            self.sole = 0
            self._write_all(self._perturbed)

    def _commit(self) -> None:
        ended, self._provisional = self._provisional, None
        self.sole = 0 if self.direct else self.members.begin()  # the next may be plain
        if ended is not None:
            self._without = 0 if ended.backward else self._without
            self._write(ended)

    def _write_all(self, parts: list[Ended]) -> None:
        for part in parts:
            self._write(part)
        parts.clear()

    def _write(self, ended: Ended) -> None:
        now_ns, spent, values = ended.now_ns, ended.spent_ns, ended.values
        values.step = step = self.step + 1
        self.step, self.metered = step, not step % METER_EVERY
        if not ended.backward:
            self._bare = step
        norm = sqrt(values.norm_squared) if values.flags & StepFlag.GRAD_NORM else 0.0
        phases = tuple([length / 1e9 for length in spent]) if self.timed else _UNTIMED
        self._append(
            step, now_ns, RecordKind.STEP, values.flags, values.losses & _U32, sum(spent[:5]) / 1e9, values.loss_sum, norm,
            values.learning_rate, phases, values.tokens, values.samples, values.norm_scale,
        )  # fmt: skip


_UNTIMED = (0.0,) * 8
_PLAIN = (FETCH, FETCHED, BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS)
_NO_FETCH = (FETCH, FETCHED)
"""at 0 ns: there was none"""
_NOT_PLAIN = (-1,) * 5
