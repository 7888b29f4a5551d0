"""Detect an optimizer that is made anew for each step: what it keeps from step to step (moments, step count) is lost each time.

Told is only what makes the same training otherwise than meant: one after the other, optimizers of one class take their first
and only step on the same parameters, whose values nothing else has changed between, and keep something for a next step that
does not come. A new model (folds), weights set back (an episode of test-time adaptation, a client's round, an inner loop),
plain SGD, which keeps nothing, and a step with a closure, within which a whole problem is solved, are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

LEAST = 10
"""Such optimizers in a row; warm-ups, and searches for a learning rate, of fewer steps do no harm"""
_MOST = 64
"""Parameters that are watched, one of each optimizer; beyond, each parameter has an optimizer of its own"""
_LOOKED_AT = 16
"""Elements of a parameter that must be as the step before has left them"""


class _Steps:
    """Steps of a parameter by optimizers that were new."""

    __slots__ = ("count", "elements", "kind", "parameter", "version")

    def __init__(self, parameter: Any) -> None:
        self.parameter = TensorReference(parameter)
        self.count = 0
        self.kind = ""
        """Class of the last optimizer; empty if it kept nothing"""
        self.version = -1
        """Version of the parameter after its step"""
        self.elements: Any = None


class RemadeOptimizers:
    """A part of the optimizer probe. Told once."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        import torch  # torch is optional until training begins

        self._context, self._torch = context, torch
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._steps: dict[int, _Steps] = {}
        self._found: tuple[str, int] | None = None
        self._told = False
        context.hooks.first_step.register(breaker, self._first_step)

    def _first_step(self, optimizer: Any, ended: bool) -> None:  # noqa: FBT001  # a listener
        """Compare an optimizer that begins its first step, or has ended it, with the one before. In the training thread."""
        if self._told:
            return
        parameter: Any = next(
            (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None), None
        )
        plain = type(parameter) in self._plain and parameter.layout is self._torch.strided
        if not plain or self._context.device.cuda.capturing():
            return
        steps = self._steps.get(id(parameter))
        if steps is None or steps.parameter() is not parameter:
            if len(self._steps) >= _MOST:
                self._steps = {key: one for key, one in self._steps.items() if one.parameter() is not None}
                self._told = len(self._steps) >= _MOST
            steps = self._steps[id(parameter)] = _Steps(parameter)
        with self._torch.no_grad():
            now = parameter.detach().reshape(-1)[:_LOOKED_AT]
            if ended:
                self._note(steps, optimizer, parameter, now.clone())
            else:
                self._compare(steps, optimizer, parameter, now)

    def _compare(self, steps: _Steps, optimizer: Any, parameter: Any, now: Any) -> None:
        goes_on = steps.kind == type(optimizer).__name__ and steps.version == parameter._version
        steps.count = steps.count + 1 if goes_on else 0
        if not goes_on or steps.elements.shape != now.shape or steps.elements.device != now.device:
            return

        def refute(differs: float) -> None:  # of a value on a device, later
            steps.count = 0 if differs else steps.count

        self._context.device.take((steps.elements != now).any().float(), refute)

    def _note(self, steps: _Steps, optimizer: Any, parameter: Any, elements: Any) -> None:
        state = optimizer.state.get(parameter)
        kept = state.values() if isinstance(state, dict) else ()
        keeps = any(isinstance(one, self._torch.Tensor) and one.shape == parameter.shape for one in kept)
        steps.kind, steps.version = type(optimizer).__name__ if keeps else "", parameter._version
        steps.elements = elements
        if steps.count >= LEAST and not self._told:
            self._told, self._found = True, (steps.kind, self._context.recorder.step + 1)

    def sample(self) -> None:
        """Tell what was found. In the sampler thread."""
        found, self._found = self._found, None
        if found is None:
            return
        kind, step = found
        told = {"kind": "optimizer_remade", "optimizer": kind}
        self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, told, step)
        what = "what it keeps from step to step (moments, number of steps) is lost each time"
        self._context.warn_limited("loop optimizer_remade", f"a new optimizer ({kind}) is made for each step: {what}")
