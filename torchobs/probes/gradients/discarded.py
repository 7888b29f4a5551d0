"""Detect an accumulation of which only the last micro-batch counts: ``zero_grad()`` is called in each of them.

In a step of several batches, each fetched from one loader with a backward pass after it, the gradient of one parameter is
looked at when a pass has added to it. That it was set to zero since the pass before is proven where that one left a gradient,
and now there is nothing but what has just come. It is a mistake if that alone reaches the optimizer, in proportion (clipped,
unscaled): who keeps the gradients of each batch, and combines them, sets them to zero on purpose.

Several passes through one batch (SAM, adversarial examples), batches of several loaders (hyperparameters learned on validation
data) and loops of several optimizers are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES
from torchobs.probes.core.boundaries import ARGUED, BACKWARD_BEGINS, BACKWARD_ENDS, FETCH, FETCHED, STEP_BEGINS
from torchobs.probes.nonfinite.graph import accumulator_of
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

_MOST_REFUTED = 3
"""Steps that were looked at and found sound, after which the loop is left alone"""
_LEAST_BOUNDARIES = 9
"""Of a step of two batches: a fetch and a backward pass, with begin and end, for each; and the optimizer's begin"""
_LOOKED_AT = 1024
"""Elements of the gradient"""
_LEAST_ELEMENTS = 16
"""Of a parameter that is looked at: of few elements any two gradients may be proportional"""
_ROUNDING = 1e-6
"""What the squared cosine of two proportional gradients may lack of 1, or else the square of their type's precision"""


class DiscardedGradients:
    """A part of the gradient probe. Told once."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        import torch  # torch is optional until training begins

        self._context, self._torch, self._guard = context, torch, breaker.guard
        self._watch_guarded = breaker.guard(self._watch)
        self._sample: Callable[[], Any] = lambda: None
        """A reference to the parameter that is looked at"""
        self._node: Any = None
        self.handle: Any = None
        """The hook on its node while a step is watched, whose end is to be looked at"""
        self._step = self._passes = 0
        self._last: Any = None
        """Elements of the gradient after the last pass"""
        self._reset: Any = None
        """Whether each pass but the first found it set to zero: of one element, on the gradient's device"""
        self._proven = self._refuted = 0
        self._since = 0
        self._told = False

    def remove(self) -> None:
        """Remove the hook, and let go of the gradients."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = self._node = self._last = self._reset = None
        self._passes = 0

    # -- in the training thread --------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Judge the step that is about to be taken, or watch the next one."""
        recorder = self._context.recorder
        if len(recorder.trace) < _LEAST_BOUNDARIES and self.handle is None:
            return
        parameter, passes = self._sample(), batches_passed(recorder.trace, recorder.arguments) if recorder.sole else 0
        if self.handle is not None:
            if parameter is not None and self._step == recorder.step and passes == self._passes > 1:
                self._judge(parameter.grad)
            self.remove()
        if passes > 1 and self._refuted < _MOST_REFUTED and self._proven < LASTING_SAMPLES:
            owned = (one for group in reversed(optimizer.param_groups) for one in reversed(group["params"]))
            large = next((one for one in owned if one.grad is not None and one.grad.numel() >= _LEAST_ELEMENTS), None)
            if large is not None:
                self._sample = TensorReference(large)
                self._context.at_backward(self._watch_guarded)

    def _watch(self) -> None:
        """Put a hook on the parameter's node if the backward pass that begins is the first one of its step."""
        recorder, parameter = self._context.recorder, self._sample()
        if any(stamp & 15 == BACKWARD_ENDS for stamp in recorder.trace) or self._torch.compiler.is_compiling():
            return
        self._node = accumulator_of(parameter) if parameter is not None and not self._context.device.cuda.capturing() else None
        if self._node is not None:
            self._step = recorder.step
            self.handle = self._node.register_hook(self._guard(self._accumulated))
            self._context.hooks.before_step.due_at = 0

    def _accumulated(self, _: object, given: tuple[Any, ...]) -> None:
        """Compare a gradient to which a pass has just added with what came."""
        parameter, came = self._sample(), given[0]
        gradient: Any = parameter.grad if parameter is not None else None
        if self._step != self._context.recorder.step or not (self._is_plain(came) and self._is_plain(gradient)):
            return
        with self._torch.no_grad():
            now = gradient.reshape(-1)[:_LOOKED_AT].clone()
            if self._last is not None:
                alone = (now == came.reshape(-1)[:_LOOKED_AT]).all() & (self._last != 0).any()
                self._reset = alone if self._reset is None else self._reset & alone
            self._last = now
        self._passes += 1

    def _is_plain(self, tensor: Any) -> bool:
        return type(tensor) is self._torch.Tensor and tensor.layout is self._torch.strided and tensor.is_floating_point()

    def _judge(self, gradient: Any) -> None:
        reset = self._reset
        if reset is None or not self._is_plain(gradient):
            return
        with self._torch.no_grad():
            used, last = (_scaled(one.reshape(-1)[:_LOOKED_AT].float()) for one in (gradient, self._last))
            least = 1.0 - max(_ROUNDING, self._torch.finfo(gradient.dtype).eps ** 2)
            same = (used @ last) ** 2 >= least * (used @ used) * (last @ last)  # False of what is not finite, or all zero
            self._context.device.take((reset & same).float(), self._note)
        self._since = self._since or self._context.recorder.step + 1

    def _note(self, is_discarded: float) -> None:
        if is_discarded:
            self._proven += 1
        else:
            self._proven, self._refuted = 0, self._refuted + 1

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Tell what was found."""
        if self._told or self._proven < LASTING_SAMPLES:
            return
        self._told = True
        self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, {"kind": "gradients_discarded"}, self._since)
        text = "gradients are set to zero in each micro-batch of an accumulation: a step uses those of the last one alone"
        self._context.warn_limited("loop gradients_discarded", text)


def batches_passed(trace: Sequence[int], arguments: Sequence[int]) -> int:
    """Return how many backward passes a step has had, if each came after a batch of its own of one loader; else 0."""
    following, loaders = iter(arguments), set[int]()
    passes, fetched, steps = 0, False, 0
    for stamp in trace:
        code = stamp & 15
        argument = next(following) if code in ARGUED else 0
        if code == FETCH:
            loaders.add(argument)
        elif code == FETCHED:
            fetched = True
        elif code == STEP_BEGINS:
            steps += 1
        elif code == BACKWARD_BEGINS:
            if not fetched:
                return 0
            passes, fetched = passes + 1, False
    return passes if len(loaders) == 1 and steps <= 1 else 0


def _scaled(gradient: Any) -> Any:
    """Return a gradient with a largest element of 1, so that no square is rounded to zero."""
    return gradient / gradient.abs().max()
