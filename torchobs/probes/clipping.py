"""Observe gradient clipping: take the norms that ``clip_grad_norm_`` computes, and record whether gradients were clipped.

``clip_grad_norm_`` is imported by name everywhere, but looks ``_get_total_norm`` and ``_clip_grads_with_norm_`` up in its own
module when it is called (torch ≥ 2.6; older ones are measured after clipping). ``torch.nn.utils`` has the same two under public
names. The norm of each tensor comes free from the ``_foreach_norm`` that the total is made of. A DTensor's total would need a
collective: it is computed from the clipping coefficient, for which torch has completed it; the shards are measured for the
layers' norms. Not observed are compiled regions, FSDP1's own method (the gradients are measured after it), and a limit that is
on a device: nothing is compared to it.
"""

from __future__ import annotations

import functools
from functools import partial
from math import inf
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from torchobs.flight.step_record import StepFlag
from torchobs.probes.gradient_norms import Clipping, completed_total, from_norms, is_l2
from torchobs.probes.step_recorder import parameters_of
from torchobs.support.graph_safe import graph_being_made, outside_of_graphs
from torchobs.taps import taps
from torchobs.tensors.device_reads import is_on_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.amp import LossScaling
    from torchobs.probes.context import ProbeContext, SamplingInterval
    from torchobs.probes.gradient_norms import Measurement
    from torchobs.support.error_guard import CircuitBreaker
    from torchobs.tensors.device_reads import Devices

    Measure = Callable[[list[Any]], Measurement | None]

_KEPT = 8
_EACH_NS = 500_000_000
"""Norms of single tensors are gauges, not recorded by step: two a second are enough, unless the user sets the interval"""
_TRUSTED_STEPS = 64
"""Steps for which the only optimizer is assumed to have as many gradients as were clipped the last time"""
_SUSPICIOUS = 1e-15
"""Below, squares may have been lost (``norms.TINY``)"""


class CapturedResults(TorchFunctionMode):
    """Records the calls of a torch function in a ``with`` block, in this thread: results, and ids of their operands."""

    def __init__(self, function: Callable[..., Any], *, keep: bool = False) -> None:
        """``keep``: keep the first arguments themselves, too."""
        super().__init__()
        self._function, self._keep = function, keep
        self.keys: list[int] = []
        """ids of the tensors that the results are of"""
        self.arguments: list[Any] = []
        self.results: list[Any] = []
        self.spent_ns = 0
        """Overhead, after the block: a torch function mode runs Python code around every torch call"""

    def __enter__(self) -> Any:
        """Enter the mode."""
        self.spent_ns = -monotonic_ns()
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def __exit__(self, *error: object) -> None:
        """Leave the mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self.spent_ns += monotonic_ns()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it and keep the result; of the arguments by default only the ids, so that no tensor lives longer."""
        begun_ns = monotonic_ns()
        result = func(*args, **(kwargs or {}))
        self.spent_ns += begun_ns - monotonic_ns()
        if func is self._function:
            several = isinstance(result, (list, tuple))
            self.keys += [id(tensor) for tensor in args[0]] if several else [id(args[0])]
            self.results += result if several else [result]
            if self._keep:
                self.arguments.append(args[0])
        return result


class ClipWatch:
    """Wraps clipping functions. ``measure`` gets the gradients before clipping, in due steps."""

    def __init__(
        self, context: ProbeContext, scaling: LossScaling, pace: SamplingInterval, measure: Measure, devices: Devices
    ) -> None:
        self._context, self._scaling, self._pace, self._measure, self._devices = context, scaling, pace, measure, devices
        self._clippings: list[Clipping] = []
        self.limit: float | None = None
        """The threshold of the last clipping by norm; ``None`` if it is on a device"""
        self.value: float | None = None
        """The threshold of the last clipping by value; ``None`` as well"""
        self._each_ns = 0
        self._covered, self._covered_grads, self._covered_until = 0, -1, 0
        """An optimizer's id, its number of gradients, and the step until which that is assumed"""
        self._noted: float | None = None
        """Total norm that was recorded for the step before its clipping was observed"""
        self._noted_in = -1
        self.misused: tuple[float, float] | None = None
        """Limit and loss scale of a clipping of scaled gradients"""

    def install(self, breaker: CircuitBreaker) -> None:
        """Wrap the clipping functions that this torch has."""
        self._breaker = breaker
        self._graph_being_made = graph_being_made()
        taps.TOTAL_NORM.lead(partial(_not_compiled, self._watched_total), breaker.probe)
        taps.CLIP_BY_NORM.lead(partial(_not_compiled, self._watched_clip), breaker.probe)
        taps.CLIP_BY_VALUE.lead(partial(_not_compiled, self._watched_value), breaker.probe)

    def remove(self) -> None:
        """Restore them. Idempotent."""
        for tap in (taps.TOTAL_NORM, taps.CLIP_BY_NORM, taps.CLIP_BY_VALUE):
            tap.leave()

    def pop_clipping(self, optimizer: Any, count: Callable[[Any, int], int]) -> Clipping | None:
        """Return, once, the last clipping of as many gradients as the optimizer has; older ones are dropped.

        ``count``: called for the optimizer's number of gradients, with the number expected.
        """
        clippings = self._clippings
        for index in range(len(clippings) - 1, -1, -1):
            if count(optimizer, clippings[index].grads) == clippings[index].grads:
                self._covered, self._covered_grads = id(optimizer), clippings[index].grads
                self._covered_until = self._context.recorder.step + _TRUSTED_STEPS
                self._clippings = [other for other in clippings if other.grads != clippings[index].grads]
                return clippings[index]
        return None

    def has_noted(self, step: int) -> bool:
        """Return whether the record of the step after ``step`` has its norm already."""
        return self._noted_in == step

    def has_clipped_since(self, step: int) -> bool:
        """Return whether gradients were clipped by norm after the end of that step, which is the last one."""
        kept = bool(self._clippings) and self._clippings[-1].step == step and self._clippings[-1].limit < inf
        return self._noted is None if self._noted_in == step else kept

    def unscales(self, optimizer: Any, scale: Any) -> None:
        """Mark clippings of scaled gradients, when the optimizer's gradients are about to be divided by the scale."""
        losses = self._scaling.losses
        scaled = [clipping for clipping in self._clippings if clipping.scale is None and clipping.scaling == losses]
        if not scaled:
            return  # correct use: they were unscaled first
        gradients = {id(parameter.grad) for parameter in parameters_of(optimizer)}
        for clipping in scaled:
            if clipping.first in gradients:
                self.mark_scaled(clipping, scale)

    def mark_scaled(self, clipping: Clipping, scale: Any) -> None:
        """Record that clipped gradients were scaled: the limit applies to the scaled norm, the record gets the unscaled."""
        limit, clipping.limit = clipping.limit, inf
        if limit < inf:
            self.decide(clipping.total, lambda value: limit < value < inf)
        clipping.scale = float(scale) if scale.is_cpu else scale.detach()
        if self.misused is None and self.limit is not None:
            self._context.device.take(scale, partial(self._note_misuse, self.limit))

    def _note_misuse(self, limit: float, scale: float) -> None:
        if scale != 1.0:
            self.misused = limit, scale

    def forget(self) -> None:
        """Drop the clippings, which were inside a closure."""
        self._clippings = []

    # -- clip_grad_norm_ ---------------------------------------------------------------------------------------------------

    def _watched_total(self, original: Any) -> Any:
        breaker, intercept, note = self._breaker, self._breaker.guard(self._intercept), self._breaker.guard(self._note_total)

        @functools.wraps(original)
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            if breaker.is_open or self._graph_being_made():
                return original(tensors, norm_type, *args, **kwargs)
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            captured = intercept(tensors, norm_type)
            if captured is None:
                norm = original(tensors, norm_type, *args, **kwargs)
            else:
                with captured:
                    norm = original(tensors, norm_type, *args, **kwargs)
            note(tensors, norm_type, norm, captured)
            return norm

        return get_total_norm

    def _intercept(self, tensors: list[Any], norm_type: Any) -> CapturedResults | None:
        """Return a capture of the tensors' norms, in a step that is due."""
        due = is_l2(norm_type) and tensors and self._pace.would_be_due(self._context.recorder.plain.step)
        if due and self._pace.fixed is None:
            now_ns = monotonic_ns()
            due = now_ns >= self._each_ns
            self._each_ns = now_ns + _EACH_NS if due else self._each_ns
        if not due:
            return None
        tensor_type = torch.Tensor
        is_plain = all(type(tensor) is tensor_type for tensor in tensors)
        return CapturedResults(torch._foreach_norm) if is_plain else None

    def _note_total(self, tensors: list[Any], norm_type: Any, norm: Any, captured: CapturedResults | None) -> None:
        """Take a total norm: that of all gradients, unless the optimizer turns out to have more."""
        if not is_l2(norm_type) or not tensors:
            return
        begun_ns = monotonic_ns()
        clipping = Clipping(len(tensors), first=id(tensors[0]), scaling=self._scaling.losses)
        if type(norm) is not torch.Tensor:  # of shards
            clipping.measured = self._measure(tensors) if self._pace.would_be_due(self._context.recorder.plain.step) else None
        elif norm.is_cpu:
            clipping.total = norm.item()
            if captured is None and self._is_trusted(clipping):
                # what the optimizer's hook would do, at a tenth of the cost
                self._noted, self._noted_in = clipping.total, self._context.recorder.plain.step
                self._context.recorder.add_norm(clipping.total, 1.0, within_step=True)
                return
            if not _SUSPICIOUS < clipping.total < inf:  # it may have over- or underflowed
                clipping.measured = self._measure(tensors)
                clipping.total = clipping.measured.total() if clipping.measured is not None else clipping.total
        elif self._devices.cuda.capturing():
            return  # a reference would keep the graph's memory
        else:
            clipping.total = norm.detach()
        if captured is not None and clipping.measured is None:
            self._pace.spend(captured.spent_ns)
            whole = len(captured.results) == len(tensors)  # else computed without foreach
            clipping.measured = from_norms(captured.keys, captured.results, self._devices) if whole else self._measure(tensors)
        if clipping.measured is not None:
            self._pace.spend(monotonic_ns() - begun_ns)
        self._keep(clipping)

    def _is_trusted(self, clipping: Clipping) -> bool:
        """Return whether this is certainly the norm of all gradients that the only optimizer is about to use."""
        plain = self._context.recorder.plain
        fits = self._covered == plain.sole != 0 and self._covered_grads == clipping.grads and plain.step < self._covered_until
        return fits and not self._scaling.waits_for_unscale and not self._clippings and _SUSPICIOUS < clipping.total < inf

    def _keep(self, clipping: Clipping) -> None:
        recorder = self._context.recorder
        step = recorder.plain.step
        if self._noted_in == step:  # clipped again in the same step: the hook will add the later norm
            recorder.take_norm_back()
            self._noted_in = -1
        self._clippings, self._noted, clipping.step = [*self._clippings[1 - _KEPT :], clipping], None, step
        self._context.hooks.before_step.due_at = 0

    def _watched_clip(self, original: Any) -> Any:
        breaker = self._breaker
        note, intercept = breaker.guard(self._note_clip), breaker.guard(self._intercept_clamp)

        @functools.wraps(original)
        def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if breaker.is_open or self._graph_being_made():
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            captured = intercept(total_norm)
            if captured is None:
                result = original(parameters, max_norm, total_norm, *args, **kwargs)
            else:
                with captured:
                    result = original(parameters, max_norm, total_norm, *args, **kwargs)
            note(max_norm, total_norm, captured)  # only now: a limit that is no number is torch's to refuse
            return result

        return clip_grads_with_norm_

    def _intercept_clamp(self, total: Any) -> CapturedResults | None:
        """Return a capture of the clipping coefficient of a distributed total, which is complete, clamped and as it was."""
        distributed = isinstance(total, torch.Tensor) and type(total) is not torch.Tensor
        return CapturedResults(torch.clamp, keep=True) if distributed else None

    def _note_clip(self, max_norm: Any, total: Any, clamp: CapturedResults | None = None) -> None:
        if type(max_norm) is float:  # in nearly every step
            limit = max_norm
        elif is_on_device(max_norm):  # ``float`` would wait for it
            self._noted = self.limit = None
            return
        else:
            limit = float(max_norm)
        self.limit = limit
        if clamp is not None and (self._devices.cuda.capturing() or (total := completed_total(clamp.arguments, limit)) is None):
            for coefficient in clamp.results:  # in a capture the division would become part of the graph
                self.decide(getattr(coefficient, "_local_tensor", coefficient), lambda value: value < 1.0)
            return
        noted, self._noted = self._noted, None
        if noted is not None:
            if limit < noted:
                self._context.recorder.plain.flags |= StepFlag.CLIPPED  # inline: in nearly every step
            return
        last = self._clippings[-1] if self._clippings else None
        if last is not None and last.limit == inf:
            if last.total is None:
                last.make_whole(total)
            last.limit = limit
            if not isinstance(last.total, float):
                return  # decided when its norm arrives
            total = last.total
        self.decide(total, lambda value: limit < value < inf)

    def decide(self, value: Any, clipped: Callable[[float], bool]) -> None:
        """Flag the step in progress if ``clipped(value)``, now or when a device has delivered the value."""
        recorder = self._context.recorder
        step = recorder.plain.step + 1
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and not self._devices.cuda.holds(value):
            return
        if is_tensor and not value.is_cpu:
            late = recorder.late
            self._context.device.take(value, lambda number: late(step, StepFlag.CLIPPED, 0.0, 0.0) if clipped(number) else None)
        elif clipped(float(value)):
            recorder.flag(StepFlag.CLIPPED)

    # -- the others --------------------------------------------------------------------------------------------------------

    def _watched_value(self, original: Any) -> Any:
        note = self._breaker.guard(self._note_value)

        @functools.wraps(original)
        def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
            result = original(parameters, clip_value, *args, **kwargs)
            note(clip_value)
            return result

        return clip_grad_value_

    def _note_value(self, clip_value: Any) -> None:
        self.value = None if is_on_device(clip_value) else float(clip_value)  # ``float`` would wait for the device


def _not_compiled(watched: Callable[[Any], Any], original: Any) -> Any:
    return outside_of_graphs(original, watched(original))
