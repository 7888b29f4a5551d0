"""Time the phases of a step on its CUDA device, of one step a second.

The phases of every step (``timeline``) are times of the training thread, which a device follows behind. Here events are
recorded into the device's stream where the thread crosses the same boundaries, and the time between two of them is the device's
own, idle or not: a device that waits for its next batch does so in ``data``.

Nothing is in the way of other steps. Once a second the sampler asks for a step; at the next safe point a hook and two patches
are put in place, which go again after that step. At a later safe point the events are queried, never waited for, and a step
that the device has not done after a while is dropped. Nothing is recorded while a CUDA graph is captured. A step with an
evaluation, a checkpoint, a compilation or a phase of the script's own in it is not timed.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.flight.layout import PHASE_NAMES
from torchobs.flight.step_record import StepFlag
from torchobs.probes.timeline import (
    BACKWARD,
    BETWEEN,
    DATA,
    EVAL,
    EXHAUSTED_NO_GRAD,
    FETCHED_NO_GRAD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PIN,
    TRAIN,
    WITHIN_STEP,
)
from torchobs.taps import taps
from torchobs.tensors.device_reads import EventPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torchobs.probes.context import ProbeContext
    from torchobs.tensors.device_reads import DeviceEvent

EVERY_S = 1.0
LONGEST_S = 60.0
"""Age at which a step that has not ended on the device is dropped"""
MOST_MARKS = 128
"""Most boundaries of a timed step: a step with more (accumulation over many batches) is dropped"""
_ASIDE = frozenset({EVAL, TRAIN, PIN, FETCHED_NO_GRAD, EXHAUSTED_NO_GRAD})
_PHASES = {phase: PHASE_NAMES[phase] for phase in WITHIN_STEP}


class Mark(NamedTuple):
    """A boundary, and the phase that begins there."""

    phase: int
    event: DeviceEvent


def phase_times(marks: Sequence[Mark]) -> dict[str, float]:
    """Return the device time of each phase in s. Work that leads to a backward without a fetch is between (``timeline``)."""
    spent = dict.fromkeys(_PHASES.values(), 0.0)
    for (phase, begun), (following, ended) in pairwise(marks):
        what = BETWEEN if following == BACKWARD and phase == OTHER else phase
        spent[_PHASES[what]] += begun.elapsed_time(ended) / 1e3
    return spent


def _is_cuda_used() -> bool:
    import torch  # torch is optional until training begins

    cuda: Any = torch.cuda  # torch has no types for it
    return bool(cuda.is_initialized())


class DeviceTimeProbe:
    """Times a step a second, once CUDA is in use."""

    name = "device_time"

    def __init__(self, is_used: Callable[[], bool] = _is_cuda_used, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_used, self._clock = is_used, clock
        self._device: torch.device | None = None
        self._marks: list[Mark] = []
        self._stream: Any = None
        """The stream of the marks"""
        self._subscriptions: list[Callable[[], None]] = []
        """Each ends one"""
        self._state = ""
        """"": no step is being timed; "asked": at the next safe point; "waits" for the end of the step before; "timed";
        "done": all its events are recorded"""
        self._since_s = float("-inf")
        self._step = self._depth = 0
        self._timings: deque[dict[str, float]] = deque(maxlen=8)

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._recorder, self._training = context, context.recorder, context.training
        breaker, self._events = context.breaker(self.name), EventPool(context.device.cuda)
        self._at_safe_point, self._mark_safely = breaker.guard(self._go_on), breaker.guard(self._mark)
        self._before_safely, self._after_safely = breaker.guard(self._before_step), breaker.guard(self._after_step)
        self._backward_safely = breaker.guard(self._backward_begins)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._unhook()
        self._drop()

    def sample(self) -> None:
        """Publish the times; request a step once a second, and the removal of the hooks after it."""
        while self._timings:
            for phase, seconds in self._timings.popleft().items():
                self._context.set_gauge(catalog.STEP_DEVICE_TIME, seconds, {"phase": phase})
        if not self._state and self._clock() - self._since_s >= EVERY_S and self._is_used():
            self._state, self._since_s = "asked", self._clock()
            self._context.at_backward(self._at_safe_point)
        elif self._state == "done" or (self._subscriptions and self._clock() - self._since_s > LONGEST_S):
            self._context.at_backward(self._at_safe_point)

    # -- in the training thread --------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin to wait for a step, or take its times. A backward begins."""
        begun_ns, spent = time.monotonic_ns(), self._context.spent_ns
        if self._context.device.cuda.capturing():
            self._state = "" if self._state == "asked" else self._state
        elif self._state == "asked":
            self._device = self._find_device()
            self._state = "waits" if self._device is not None else ""
            if self._device is not None:
                self._step = self._recorder.step
                self._hook()
        elif self._subscriptions or self._marks:  # done, or without an end
            self._unhook()
            self._take_times()
        spent[self.name] = spent.get(self.name, 0) + time.monotonic_ns() - begun_ns

    def _find_device(self) -> Any:
        """Return the CUDA device of the first parameter of an optimizer; ``None`` without one."""
        for optimizer in self._recorder.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"][:1]:
                    if parameter.is_cuda:
                        return parameter.device
        return None

    def _hook(self) -> None:
        self._subscriptions = [
            taps.BEFORE_STEP.subscribe(lambda _: self._before_safely()),
            taps.AFTER_STEP.subscribe(lambda _: self._after_safely()),
            taps.BACKWARD.subscribe(self._around_backward),
            taps.FETCH.subscribe(self._around_fetch),
        ]

    def _unhook(self) -> None:
        while self._subscriptions:
            self._subscriptions.pop()()

    def _mark(self, phase: int) -> None:
        """Record an event where a phase begins."""
        cuda, device = self._context.device.cuda, self._device
        if self._state != "timed" or device is None:
            return
        with cuda.on(device):
            stream = cuda.stream(device)
            self._stream = self._stream if self._marks else stream
            # where the last event is reached, one of another stream may not be, and the time between the two means nothing
            if cuda.capturing() or len(self._marks) >= MOST_MARKS or stream != self._stream:
                self._drop()
            else:
                self._marks.append(Mark(phase, self._events.record(device)))

    def _drop(self) -> None:
        """Stop timing this step."""
        if self._device is not None:
            self._events.release(self._device, *(mark.event for mark in self._marks))
        self._marks, self._state = [], "done" if self._subscriptions else ""

    def _take_times(self) -> None:
        """Take the times if the device has come to the end of the step."""
        marks, device = self._marks, self._device
        if self._state != "done" or not marks or device is None or self._clock() - self._since_s > LONGEST_S:
            self._drop()
        elif marks[-1].event.query():
            self._timings.append(phase_times(marks))
            self._drop()

    def _is_here(self) -> bool:
        return self._state == "timed" and get_ident() == self._training.thread

    def _before_step(self) -> None:
        if self._is_here() and not self._training.backwards:
            self._mark(FORWARD if self._recorder.plain.in_closure else OPTIMIZER)

    def _after_step(self) -> None:
        """Begin with the end of the step before; end with that of this one."""
        passed = self._recorder.step - self._step
        if not passed or self._state not in {"waits", "timed"}:
            return
        begins = self._state == "waits"
        if not begins and passed > 1:
            self._drop()  # a loss scaler skipped a step, without a hook
            return
        self._state, self._step = "timed", self._recorder.step
        self._mark(OTHER)
        if not begins and self._state == "timed":
            self._state = "done"

    def _backward_begins(self) -> None:
        recorder = self._recorder
        if any(stamp & 15 in _ASIDE for stamp in recorder.trace) or recorder.values.flags & StepFlag.UNTIMED:
            self._drop()
        self._mark(BACKWARD)

    def _around_backward(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        if self._training.backwards or not self._is_here():
            return call(*args, **kwargs)
        self._backward_safely()
        result = call(*args, **kwargs)
        self._mark_safely(OPTIMIZER if self._recorder.plain.in_closure else OTHER)
        return result

    def _around_fetch(self, call: Any, iterator: Any) -> Any:
        if self._depth or not self._is_here():
            return call(iterator)
        self._mark_safely(DATA)
        self._depth, phase = 1, OTHER  # the loader may be exhausted
        try:
            batch = call(iterator)
            phase = FORWARD
        finally:
            self._depth = 0
            self._mark_safely(phase)
        return batch
