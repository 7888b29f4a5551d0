"""Detect steps without an optimizer of torch's: manual parameter updates, fastai's optimizers, Keras.

They show in the gradient: present when a backward pass ends, cleared or removed when the next one begins. If the parameter
has changed in between as well, it was a step. It is recorded as ending with that backward, since the exact time of the update
is unknown. (Gradients that are cleared while the parameters stay are an analysis: saliency, an adversarial input. Gradients
that stay are an accumulation, if the next backward adds to them; without any optimizer of torch's they are gradients that were
forgotten to be cleared, if the parameter has changed after each of several passes.)

While torch's optimizers step, only a second backward without a step in between is watched. Changes between two backward passes
of one of their steps are a perturbation (sharpness-aware minimisation), unless many follow each other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.flight.format.step_record import StepFlag
from torchobs.probes.core.boundaries import ARGUED, BACKWARD_ENDS
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.references import TensorReference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.core.step_recorder import StepRecorder
    from torchobs.probes.precision.amp import LossScaling

_SAMPLED = 64
"""Elements of a parameter that are compared"""
_RECOUNT_EVERY = 64
_NODES, _FIRST_NODES = 100_000, 1000
"""Nodes of a graph that are searched for all parameters, and for the first: a node takes a microsecond, once"""


_NEAR_NODES = 256
"""Nodes of a graph that are searched for the watched parameter, which is the last layer's"""
_MOST_KNOWN = 8
"""Models of which the parameters are remembered"""
_FORGOTTEN = 3
"""Backward passes in a row, each followed by a change of the parameter and none by a change of its gradient"""
_WATCHED = 8
"""Steps for which every backward is watched after one that a change of the parameters followed"""


class _GradientState(NamedTuple):
    """State of one parameter after a backward: address and version of its gradient, version and elements of the parameter."""

    address: int
    version: int
    changes: int
    elements: torch.Tensor | None


class OptimizerStandIn:
    """Optimizer stand-in for parameters that a script updates itself; holds weak references."""

    def __init__(self, parameters: Iterator[torch.Tensor]) -> None:
        self._parameters = [TensorReference(parameter) for parameter in parameters]
        self.grad_scale: torch.Tensor | None = None
        """The loss scale that is in the gradients"""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group with the living parameters."""
        return [{"params": [parameter for known in self._parameters if (parameter := known()) is not None]}]

    def gradients(self) -> int:
        """Return how many parameters have a gradient."""
        return sum(parameter.grad is not None for group in self.param_groups for parameter in group["params"])


class ManualSteps:
    """Watches one parameter from backward to backward. A part of :class:`~torchobs.probes.step.steps.StepProbe`.

    Its other parts call ``begins`` and ``ends`` with the arguments of each outermost backward, and ``optimizer_stepped``, while
    this is ``active``; ``second_backward`` when a possible second backward since a step begins.
    """

    __slots__ = ("__dict__", "active")  # the compiled part reads it in place

    def __init__(self, context: ProbeContext, scaling: LossScaling) -> None:
        self._context, self._training, self._scaling = context, context.training, scaling
        self._before_step, self._step_ended = context.hooks.before_step, context.hooks.manual_step_ended.listeners
        self.active = True
        """Whether manual steps are possible"""
        self.returned: set[int] = set()
        """Boundaries at which a backward pass ended that left its gradients to the caller, and none in parameters"""
        breaker = context.breakers.setdefault("by hand", CircuitBreaker("step"))  # optimizer steps are recorded without it
        self.begins, self.ends = breaker.guard(self._begins), breaker.guard(self._ends)
        self.second_backward = breaker.guard(self._second_backward)
        self.optimizer_stepped = breaker.guard(self._optimizer_stepped)
        self._parameter: TensorReference | None = None
        self._node_limit = _NEAR_NODES
        self._last: _GradientState | None = None
        self._before: tuple[int, int] | None = None
        self._end, self._stamp = (0, 0), 0
        self._changed = False
        self._all: OptimizerStandIn | None = None
        self._known: list[tuple[TensorReference, OptimizerStandIn]] = []
        self._count, self._recount = 0, 0
        self._step = self._more = self._usual = self._watch_until = 0
        """The step whose further backward passes are counted, their number and its usual value; the last step to watch"""
        self._perturbed_in, self._is_harmless = -_WATCHED - 1, False
        self._kept = 0
        """Backward passes in a row after which the parameter has changed, and its gradient has not"""

    # -- beside optimizers of torch's --------------------------------------------------------------------------------------

    def _second_backward(self) -> bool:
        """Return True if the backward that begins, without an optimizer step since another one, is to be watched.

        It is not if the step before had as many without any finding: an accumulation.
        """
        recorder, returned = self._context.recorder, self.returned
        if not any(stamp & 15 == BACKWARD_ENDS and stamp not in returned for stamp in reversed(recorder.trace)):
            return False
        if recorder.pending:  # optimizers within the backward pass: what follows the last one's step is no other pass
            recorder.end_pass()
            return False
        if recorder.direct or self._training.in_closure:
            return False
        self._count_more(recorder)
        if self._more <= self._usual:
            return False
        self._watch_until = recorder.ended + _WATCHED
        self.active, self._last, self._parameter = True, None, None
        return True

    def passes_before_first_step(self) -> tuple[int, torch.Tensor | None]:
        """Return the number of backward passes without any step, and the parameter that is watched. From any thread."""
        none_yet = self._step == self._context.recorder.ended == 0
        return (self._more, self._watched()) if none_yet else (0, None)

    def _count_more(self, recorder: StepRecorder) -> None:
        if self._step != recorder.ended:
            self._step, self._more = recorder.ended, 0
        self._more += 1

    def _optimizer_stepped(self) -> None:
        """Reset: what an optimizer of torch's has changed is no manual step."""
        recorder = self._context.recorder
        self._last, self._changed = None, False
        lately = recorder.ended <= max(self._watch_until, self._perturbed_in + _WATCHED)
        if self._is_harmless or not lately:
            self.active, self._usual = False, self._more
        self._is_harmless = False

    # -- around a backward -------------------------------------------------------------------------------------------------

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge the time since the last backward when another one begins."""
        recorder = self._context.recorder
        if recorder.pending:
            recorder.end_pass()
            self._optimizer_stepped()
            return
        if recorder.direct:
            recorder.likely_end, self.active = None, False
            return
        loss = args[0] if args else kwargs.get("tensors")
        if self._training.in_closure:
            self._judge_in_closure(loss)
            return
        self._judge(loss)
        parameter = self._watched()
        if parameter is None or self._last is None:
            parameter = self._pick(loss)
            if parameter is not None and self._more and _is_cleared(self._context, parameter):
                self._end_before(recorder)
        self._before = _gradient(parameter) if parameter is not None else None

    def _judge(self, loss: object) -> None:
        """Decide whether the step has ended with the last backward."""
        recorder, last, parameter = self._context.recorder, self._last, self._watched()
        if last is not None:
            self._count_more(recorder)
            self._is_harmless = self._perturbed_in != recorder.ended
        if last is None or (parameter is not None and self._is_added_to(loss, parameter, last)):
            recorder.likely_end = None
            recorder.relieve()
            return
        if parameter is not None and not self._changed:
            self._check_change(parameter, last)
        if parameter is not None and recorder.likely_end is None:
            recorder.likely_end = self._found_end()
        if recorder.likely_end is not None:
            self._perturbed_in, self._is_harmless = recorder.ended, False
            for take_end in self._step_ended if self._all is not None else ():
                take_end(self._all, self._count)
        recorder.end_where_likely()

    def _judge_in_closure(self, loss: object) -> None:
        """Do so within an optimizer's closure, where parameters may have changed since a backward before the step."""
        last, parameter = self._last, self._watched()
        if last is None or parameter is None or self._is_added_to(loss, parameter, last):
            return
        self._check_change(parameter, last)
        self._last = None
        if self._changed:
            self._perturbed_in = self._context.recorder.ended
            self._context.recorder.values.evaluated = True  # the loss before the change is the step's

    def _is_added_to(self, loss: object, parameter: torch.Tensor, last: _GradientState) -> bool:
        """Return True if the gradient is still there and the new backward adds to it: an accumulation."""
        if _gradient(parameter) != (last.address, last.version):
            self._kept = 0
            return False
        if self._is_forgotten(parameter, last):
            return False
        return any(leaf is parameter for leaf in _leaves(loss, self._node_limit)) or not self._is_changed_by_now(
            parameter, last
        )

    def _is_forgotten(self, parameter: torch.Tensor, last: _GradientState) -> bool:
        """Return True if steps are done by hand and the gradient is never cleared."""
        if self._context.recorder.optimizers():
            return False
        moved = parameter._version != last.changes
        if not moved and parameter.is_cpu and last.elements is not None:  # nobody waits for those on a device
            moved = not bool((_sample(parameter) == last.elements).all())
        self._kept = self._kept + 1 if moved else 0
        self._changed = self._changed or self._kept >= _FORGOTTEN
        return self._kept >= _FORGOTTEN

    def _is_changed_by_now(self, parameter: torch.Tensor, last: _GradientState) -> bool:
        """Return True if the parameter, which is not in the new loss's graph, has changed since its backward."""
        if not self._changed:
            self._check_change(parameter, last)
        return self._changed

    def _end_before(self, recorder: StepRecorder) -> None:
        """End the step at an unwatched backward if its gradient is gone."""
        for index in range(len(recorder.trace) - 2, -1, -1):
            if recorder.trace[index] & 15 == BACKWARD_ENDS and recorder.trace[index] not in self.returned:
                named = sum(stamp & 15 in ARGUED for stamp in recorder.trace[: index + 1])
                recorder.likely_end = index + 1, named
                recorder.end_where_likely(perturbed=False)
                return

    def _found_end(self) -> tuple[int, int] | None:
        """Return where the step has ended, if it is known to have ended and the trace still has that point."""
        traced, _ = self._end
        return self._end if self._changed and self._context.recorder.trace[traced - 1 : traced] == [self._stamp] else None

    def _check_change(self, parameter: torch.Tensor, last: _GradientState) -> None:
        now = self._sample(parameter)
        if parameter._version != last.changes:
            self._changed = True
        elif now is not None and last.elements is not None and now.shape == last.elements.shape:
            # changes by `.data` do not change the version; a device's result arrives later
            self._context.device.take((now != last.elements).any().float(), self._note)

    def _note(self, differs: float) -> None:
        self._changed = self._changed or bool(differs)

    def _ends(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the state of the watched parameter when a backward has ended."""
        before_step, recorder, loss = self._before_step, self._context.recorder, args[0] if args else kwargs.get("tensors")
        if recorder.pending:
            self._optimizer_stepped()
            return
        parameter = self._watched()
        found = _gradient(parameter) if parameter is not None else None
        if found is None or found == self._before:  # it was another model's backward
            parameter = self._pick(loss)
            found = _gradient(parameter) if parameter is not None else None
        if parameter is None or found is None or not recorder.trace or recorder.trace[-1] & 15 != BACKWARD_ENDS:
            self._last = None
            return
        if self._changed and self._all is None:
            self._learn_parameters(parameter, loss)
        if self._all is not None and recorder.step >= self._recount:
            self._count, self._recount = self._all.gradients(), recorder.step + _RECOUNT_EVERY
        if self._all is not None and (recorder.step >= before_step.due_at or recorder.step == before_step.last):
            recorder.values.norm_squared = 0.0  # of an accumulation only the last norm counts
            self._all.grad_scale = self._scaling.scale
            before_step.notify(self._all, False)  # noqa: FBT003  # a listener
        elements = self._sample(parameter) if not self._changed or self._kept else None
        self._last = _GradientState(*found, parameter._version, None if elements is None else elements.clone())
        self._end, self._stamp = (len(recorder.trace), len(recorder.arguments)), recorder.trace[-1]
        recorder.likely_end = self._end if self._changed else None

    # -- what is watched ---------------------------------------------------------------------------------------------------

    def _watched(self) -> torch.Tensor | None:
        return self._parameter() if self._parameter is not None else None

    def _pick(self, loss: object) -> torch.Tensor | None:
        """Choose a parameter of this graph to watch."""
        found = next((leaf for leaf in _leaves(loss, _FIRST_NODES) if _is_plain(leaf)), None)
        self._parameter = TensorReference(found) if found is not None else None
        self._all, self._recount = next((model for known, model in self._known if known() is found is not None), None), 0
        return found

    def _learn_parameters(self, parameter: torch.Tensor, loss: object) -> None:
        """Learn all parameters of the manually trained model."""
        recorder = self._context.recorder
        self._all = OptimizerStandIn(_leaves(loss, _NODES))
        self._known = [(known, model) for known, model in self._known if known() is not None]
        self._known.append((TensorReference(parameter), self._all))
        del self._known[:-_MOST_KNOWN]
        if recorder.models.begins(self._all, recorder.step):
            recorder.flag(StepFlag.NEW_MODEL)

    def _sample(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return some of its elements; ``None`` during graph capture."""
        if self._context.device.cuda.capturing():
            return None
        return _sample(parameter)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach()
    while flat.dim() > 1:
        flat = flat[-1]
    return flat.reshape(-1)[:_SAMPLED]


def _is_cleared(context: ProbeContext, parameter: torch.Tensor) -> bool:
    """Return True if its gradient is ``None`` or zeros (not read on a device, which would wait)."""
    gradient = parameter.grad
    if gradient is None:
        return True
    plain = gradient.is_cpu and gradient.layout is parameter.layout and context.device.cuda.holds(gradient)
    return plain and not bool(_sample(gradient).any())


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return True if it is dense and readable: a DTensor would need a collective, and a fake tensor has no values."""
    import torch

    is_dense = type(parameter) in {torch.Tensor, torch.nn.Parameter} and parameter.layout is torch.strided
    return is_dense and parameter.numel() > 0


def _gradient(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return address and version of its gradient; ``None`` without one."""
    gradient = parameter.grad
    if gradient is None:
        return None
    return (gradient.data_ptr() if gradient.layout is parameter.layout else 0), gradient._version


def _leaves(loss: object, most: int) -> Iterator[torch.Tensor]:
    """Yield the parameters that a loss depends on, the last layer's first; other leaf tensors if there are none."""
    import torch

    tensors = [loss] if isinstance(loss, torch.Tensor) else list(loss) if isinstance(loss, (list, tuple)) else []
    queue = deque[Any](tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None)
    seen, others, found = set(queue), list[torch.Tensor](), False
    while queue and len(seen) < most:
        node: Any = queue.popleft()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            found = True
            yield leaf
        elif isinstance(leaf, torch.Tensor):
            others.append(leaf)
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        queue += following
    if not found:
        yield from others
