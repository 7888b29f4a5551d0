"""The code of every step: the boundaries of a plain step, its loss and its record; compiled, where that can be imported.

A *plain step* is that of one optimizer alone: one fetch or none, one backward pass from a loss on the CPU, one optimizer step.
:class:`PlainSteps` has all the state that this takes, and five methods for it. All else it passes, with nothing changed, to its
``slow_`` attributes: the same hooks for any step, in the probes, and the ``StepRecorder``. These read and write the attributes
here, and there is no second copy of them.

``torchobs/_native.c`` has a twin of the class, with the same name, attributes and methods. Between two steps of a training
every function and object is a cache miss, and this one needs few of them. It is used where it was built (docs/overhead.md); a
property test compares the two.
"""

from __future__ import annotations

import struct
import sys
from math import sqrt
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torchobs.flight.layout import RECORD_SIZE
from torchobs.flight.native import compiled
from torchobs.flight.step_record import CALLED_UNIT_NS, CRC, NO_FETCH, PLAIN, StepFlag
from torchobs.probes.timeline import BACKWARD_BEGINS, BACKWARD_ENDS, EXHAUSTED, FETCHED, LONG_TRACE, STEP_BEGINS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchobs.flight.writer import FlightWriter

METER_EVERY = 32
"""One step in 32 is metered, and counts for all of them: reading the clock twice per hook would be a third of its cost."""
_U32 = (1 << 32) - 1
_LOSS, _GRAD_NORM, _LEARNING_RATE = StepFlag.LOSS, StepFlag.GRAD_NORM, StepFlag.LEARNING_RATE
_pack, _pack_crc = PLAIN.pack, CRC.pack


_unset: Any = None
"""Placeholder for the functions that the probes set"""


class PlainSteps:
    """The step in progress, as long as it is plain; ``ring``: for the records (``FlightWriter.ring``)."""

    __slots__ = (
        "_force", "_forced_at", "_mask", "_memory", "_offset", "_recent", "_seed", "_sequence", "arguments", "backwards",
        "batch_samples", "batch_tokens", "begun_ns", "called_ns", "clean", "data_breaker", "depth", "due_at", "end_pass",
        "evaluated", "expected", "fetching", "flags", "grad_enabled", "in_closure", "in_pass", "learning_rate", "listeners",
        "log_wins", "loss_breaker", "loss_failed", "loss_sum", "losses", "metered", "modes", "norm_base", "norm_scale",
        "norm_squared", "notify", "outer", "pending", "rated", "read_rate", "samples", "scaled", "slow_after", "slow_backward",
        "slow_before", "slow_end", "slow_fetch", "sole", "step", "step_breaker", "stepping", "take_loss", "tensor", "thread",
        "timed", "tokens", "trace",
    )  # fmt: skip

    def __init__(self, *ring: Any) -> None:
        self._memory, self._sequence, self._recent, self._force, self._offset, self._mask, self._forced_at, self._seed = (
            ring or (None, iter(()), None, None, 0, 0, 0, 0)
        )
        self.trace: list[int] = []
        """Boundaries since the last part or record: nanoseconds and a code (``timeline``); hooks append to it"""
        self.arguments: list[int] = []
        """Those of the boundaries that have one (``timeline.ARGUED``)"""
        self.step = self.begun_ns = self.called_ns = 0
        """Number of the last step that ended; when it, or a part, ended; when the first module was called since, if known"""
        self.flags = self.losses = self.tokens = self.samples = 0
        """Values of the part in progress"""
        self.loss_sum = self.norm_squared = self.norm_base = self.learning_rate = 0.0
        self.norm_scale = 1.0
        self.pending: Any = None
        """Values that wait for the number of this part's step, if it has earlier parts"""
        self.evaluated = False
        """Whether a closure has evaluated its loss"""
        self.sole = self.rated = 0
        """id of the pacemaker if the last step was its alone, in one call, and nothing has been closed since, else 0; id of the
        optimizer with the record's learning rate, 0 if none"""
        self.clean = self.timed = False
        """Whether the last step has left no state to this one; whether phases are recorded"""
        self.metered = False
        """Whether this step's hooks measure their own time"""
        self.log_wins = False
        """Whether the script logs the loss, so that no other one counts"""
        self.scaled: Any = None
        """Refers to the loss that a loss scaler has scaled, which is not to be recorded"""
        self.expected: list[int] | None = None
        """The arguments of the last plain step: most often its loader's alone, which has batches of these sizes"""
        self.batch_tokens = self.batch_samples = 0
        self.thread = get_ident()
        """The training thread"""
        self.fetching = self.backwards = False
        """Whether a batch is being fetched; whether a backward pass runs"""
        self.depth = self.outer = 0
        """Nesting depth of running optimizer steps, and the id of the outermost optimizer"""
        self.stepping = self.in_closure = self.in_pass = False
        """Whether the outermost of these has begun as a plain step; whether its closure is being evaluated; whether an
        optimizer has stepped in the backward pass that is running"""
        self.due_at = sys.maxsize
        """Number of the ended step after which ``notify`` is called before the next step"""
        self.tensor = self.take_loss = self.step_breaker = self.data_breaker = self.loss_breaker = _unset
        self.listeners: list[Callable[[Any, Any, bool], object]] = []
        """Called when a backward pass begins, ``take_loss`` among them: in its place a plain loss is read here"""
        self.slow_fetch = self.slow_backward = self.slow_before = self.slow_after = self.slow_end = _unset
        self.grad_enabled = self.modes = self.end_pass = self.loss_failed = self.notify = self.read_rate = _unset

    def fetch(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Return the next batch, by ``original``, and record the fetch."""
        trace = self.trace
        if self.fetching or self.metered or self.data_breaker.is_open or get_ident() != self.thread or len(trace) > LONG_TRACE:
            return self.slow_fetch(original, iterator)
        try:
            sampler = iterator._index_sampler  # it belongs to the loader, so it is the same in every epoch
        except AttributeError:
            return self.slow_fetch(original, iterator)
        self.arguments.append(id(sampler))
        trace.append(monotonic_ns() << 4)
        self.fetching, code = True, EXHAUSTED
        try:
            batch = original(iterator)
            code = FETCHED
        finally:
            self.fetching = False
            if not self.grad_enabled():
                code += 1
            trace.append(monotonic_ns() << 4 | code)
        return batch

    def backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``original``, return its result, and record the backward pass."""
        if (
            self.backwards or self.in_closure or self.step_breaker.is_open or get_ident() != self.thread or len(args) < 2  # noqa: PLR2004  # tensors, gradients
            or self.modes()
        ):  # fmt: skip
            return self.slow_backward(original, args, kwargs)
        self.trace.append(monotonic_ns() << 4 | BACKWARD_BEGINS)
        loss, gradient = args[:2]
        for listener in self.listeners:
            if (
                listener is self.take_loss and gradient is None and type(loss) is self.tensor
                and not (self.metered or self.log_wins or self.loss_breaker.is_open) and self.scaled is None
            ):  # fmt: skip
                try:
                    number = loss.item() if loss.is_cpu is True else None
                except Exception as error:  # noqa: BLE001  # it is handed on
                    self.loss_failed(error, loss)
                    continue
                if type(number) is float and not number - number:  # it is finite
                    self.loss_sum += number
                    self.losses += 1
                    self.flags |= _LOSS
                    continue
            listener(loss, gradient, True)  # noqa: FBT003  # a listener
        self.backwards = True
        try:
            return original(*args, **kwargs)
        finally:
            self.backwards = False
            self.trace.append(monotonic_ns() << 4 | BACKWARD_ENDS)
            if self.in_pass:
                self.end_pass()

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record that an optimizer begins to step, as its pre hook."""
        key, trace = id(optimizer), self.trace
        if (
            key != self.sole or self.depth or self.metered or kwargs or args[1:] or self.step_breaker.is_open or not trace
            or trace[-1] & 15 != BACKWARD_ENDS or self.modes()
        ):  # fmt: skip
            return self.slow_before(optimizer, args, kwargs)
        self.depth, self.outer, self.stepping = 1, key, True
        trace.append(monotonic_ns() << 4 | STEP_BEGINS)
        if key == self.rated:
            try:
                rate = optimizer.param_groups[0]["lr"]
            except (AttributeError, LookupError, TypeError):  # groups of another kind
                rate = None
            if type(rate) is float:
                self.learning_rate = rate
                self.flags |= _LEARNING_RATE
            else:
                self.read_rate(optimizer)
        if self.step >= self.due_at:
            self.notify(optimizer, False)  # noqa: FBT003  # a listener
        return None

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record that it has stepped, as its post hook."""
        if not self.stepping or id(optimizer) != self.sole or self.depth != 1 or self.step_breaker.is_open:
            self.slow_after(optimizer, args, kwargs)
            return
        now_ns = monotonic_ns()
        self.stepping, self.depth = False, 0
        try:
            if not self.append(now_ns):
                self.slow_end(now_ns)
        except Exception as error:
            if not self.step_breaker.takes(error):
                raise

    def append(self, end_ns: int) -> bool:
        """Write the step's record and begin the next one, if it is a plain step; else return False with nothing changed.

        A value that its field cannot hold is none of a plain step; the record's number is skipped then, as the fold does.
        """
        trace, arguments, recent = self.trace, self.arguments, self._recent
        if not (self.clean and self.timed) or arguments != self.expected:
            return False
        if len(trace) == 5:  # noqa: PLR2004  # with a loader
            fetch, fetched, backward, backward_ends, optimizer = trace
        elif len(trace) == 3:  # noqa: PLR2004  # without
            (fetch, fetched), (backward, backward_ends, optimizer) = NO_FETCH, trace
        else:
            return False
        if (fetch | fetched ^ 1 | backward ^ 5 | backward_ends ^ 6 | optimizer ^ 7) & 15:  # step_record.PLAIN_CODES
            return False
        step, flags, begun_ns, called = self.step + 1, self.flags, self.begun_ns, 0
        if self.called_ns > begun_ns:
            called = (self.called_ns - begun_ns) // CALLED_UNIT_NS
            called = called if called <= _U32 else 0
        seq = next(self._sequence)
        try:
            body = _pack(
                seq, step, end_ns, 3, flags, self.losses, fetch, self.loss_sum,
                sqrt(self.norm_squared) if flags & _GRAD_NORM else 0.0, self.learning_rate, fetched, backward, backward_ends,
                optimizer, self.tokens + self.batch_tokens, self.samples + self.batch_samples, self.norm_scale, begun_ns,
                called,
            )  # fmt: skip
        except (struct.error, OverflowError, ValueError):
            return False
        raw = body + _pack_crc(crc32(body, self._seed))
        offset, memory = self._offset + ((seq - 1) & self._mask) * RECORD_SIZE, self._memory
        if memory.address:
            memory.view[offset : offset + RECORD_SIZE] = raw
        else:
            memory.store(offset, raw)
        recent.append(raw)
        del trace[:], arguments[:]
        self.begun_ns, self.step, self.metered, self.called_ns = end_ns, step, not step % METER_EVERY, 0
        self.flags = self.losses = self.tokens = self.samples = 0
        self.loss_sum = self.norm_squared = 0.0
        if len(recent) >= self._forced_at:
            self._force()
        return True


def plain_steps(writer: FlightWriter) -> PlainSteps:
    """Return the recorder of plain steps into that file: the compiled twin, if it is there and wanted."""
    module = compiled() if writer.native else None
    kind: type[PlainSteps] = PlainSteps if module is None else module.PlainSteps
    return kind(*writer.ring)
