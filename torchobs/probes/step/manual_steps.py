"""Steps that no optimizer of torch's makes: parameters changed by hand, by fastai's optimizers, by Keras'.

What shows then is the gradient: it is there when a backward pass ends, and when the next one begins it was cleared, or taken
away. If the parameter has changed in between as well, it was a step, and it ended with that backward: when exactly the
parameters were changed cannot be seen. (Gradients that are cleared while the parameters stay are somebody's analysis: saliency,
an adversarial input. Gradients that stay are an accumulation, if the next backward adds to them.)

While optimizers of torch's step, nothing is watched but what comes behind a second backward without a step in between. Changes
between two backward passes of one of their steps are a perturbation (sharpness-aware minimisation), unless many follow each
other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs.flight.format.step_record import StepFlag
from torchobs.probes.core.boundaries import ARGUED, BACKWARD_ENDS
from torchobs.support.error_guard import CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.core.step_recorder import StepRecorder

_LOOKED_AT = 64
"""Elements of a parameter that are compared"""
_RECOUNT_EVERY = 64
_NODES, _FIRST_NODES = 100_000, 1000
"""Nodes of a graph that are looked at for all parameters, and for the first: a node is a microsecond, once"""


_NEAREST = 256
"""Nodes of a graph among which the watched parameter is looked for: it is the last layer's"""
_MOST_KNOWN = 8
"""Models in turn of which the parameters are known"""
_WATCHED = 8
"""Steps for which every backward is watched, after one that was followed by a change of the parameters"""


class _Left(NamedTuple):
    """What a backward has left in one parameter: where its gradient is, and what the parameter was."""

    address: int
    version: int
    changes: int
    elements: torch.Tensor | None


class Parameters:
    """Stands for the optimizer that there is none of, for those who look at ``param_groups``. Keeps nothing alive."""

    def __init__(self, parameters: Iterator[torch.Tensor]) -> None:
        self._parameters = [ref(parameter) for parameter in parameters]
        self.grad_scale: torch.Tensor | None = None
        """By what a loss scaler has multiplied the gradients"""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group."""
        return [{"params": [parameter for known in self._parameters if (parameter := known()) is not None]}]

    def gradients(self) -> int:
        """Count them."""
        return sum(parameter.grad is not None for group in self.param_groups for parameter in group["params"])


class ManualSteps:
    """Watches one parameter from backward to backward. A part of the step probe."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        breaker = context.breakers.setdefault("by hand", CircuitBreaker("step"))  # the optimizers' steps go on without
        self.begins, self.ends = breaker.guard(self._begins), breaker.guard(self._ends)
        self.again, self.optimizer_stepped = breaker.guard(self._again), breaker.guard(self._optimizer_stepped)
        self._parameter: ref[torch.Tensor] | None = None
        self._near = _NEAREST
        self._left: _Left | None = None
        self._before: tuple[int, int] | None = None
        self._end, self._stamp = (0, 0), 0
        self._changed = False
        self._all: Parameters | None = None
        self._known: list[tuple[ref[torch.Tensor], Parameters]] = []
        self._count, self._recount = 0, 0
        self._step = self._more = self._usual = self._watch_until = 0
        """The step of which the backwards behind its first are counted, how many it has and usually has; how long to watch"""
        self._perturbed_in, self._is_harmless = -_WATCHED - 1, False

    # -- beside optimizers of torch's --------------------------------------------------------------------------------------

    def _again(self) -> ManualSteps | None:
        """A backward begins, behind another one without an optimizer's step in between. Return self to be told of it.

        It is not watched where as many of them were nothing special in the step before: an accumulation.
        """
        recorder = self._context.recorder
        if not any(stamp & 15 == BACKWARD_ENDS for stamp in reversed(recorder.trace)):
            return None
        recorder.end_pass()
        if recorder.direct or self._context.in_closure:
            return None
        self._count_more(recorder)
        if self._more <= self._usual:
            return None
        self._watch_until = recorder.ended + _WATCHED
        self._context.manual_steps, self._left, self._parameter = self, None, None
        return self

    def _count_more(self, recorder: StepRecorder) -> None:
        if self._step != recorder.ended:
            self._step, self._more = recorder.ended, 0
        self._more += 1

    def _optimizer_stepped(self) -> None:
        """An optimizer of torch's has: what it changed is no step by hand."""
        recorder = self._context.recorder
        self._left, self._changed = None, False
        lately = recorder.ended <= max(self._watch_until, self._perturbed_in + _WATCHED)
        if self._is_harmless or not lately:
            self._context.manual_steps, self._usual = None, self._more
        self._is_harmless = False

    # -- around a backward -------------------------------------------------------------------------------------------------

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A backward pass begins."""
        context, recorder = self._context, self._context.recorder
        if recorder.direct:
            recorder.likely_end = context.manual_steps = None
            return
        loss = args[0] if args else kwargs.get("tensors")
        if context.in_closure:
            self._judge_within(loss)
            return
        self._judge(loss)
        parameter = self._watched()
        if parameter is None or self._left is None:
            parameter = self._pick(loss)
            if parameter is not None and self._more and _is_cleared(self._context, parameter):
                self._end_before(recorder)
        self._before = _gradient(parameter) if parameter is not None else None

    def _judge(self, loss: object) -> None:
        """Decide whether the step has ended with the last backward."""
        recorder, left, parameter = self._context.recorder, self._left, self._watched()
        if left is not None:
            self._count_more(recorder)
            self._is_harmless = self._perturbed_in != recorder.ended
        if left is None or (parameter is not None and self._is_added_to(loss, parameter, left)):
            recorder.likely_end = None
            recorder.relieve()
            return
        if parameter is not None and not self._changed:
            self._look_for_change(parameter, left)
        if parameter is not None and recorder.likely_end is None:
            recorder.likely_end = self._found_end()
        if recorder.likely_end is not None:
            self._perturbed_in, self._is_harmless = recorder.ended, False
            if self._all is not None and self._context.clipped_by_hand is not None:
                self._context.clipped_by_hand(self._all, self._count)
        recorder.end_where_likely()

    def _judge_within(self, loss: object) -> None:
        """The same within an optimizer's closure, where parameters may have been changed since a backward before the step."""
        left, parameter = self._left, self._watched()
        if left is None or parameter is None or self._is_added_to(loss, parameter, left):
            return
        self._look_for_change(parameter, left)
        self._left = None
        if self._changed:
            self._perturbed_in = self._context.recorder.ended
            self._context.recorder.values.evaluated = True  # before the change: the loss that was seen then is the step's

    def _is_added_to(self, loss: object, parameter: torch.Tensor, left: _Left) -> bool:
        """Return True if the gradient is still there, and what begins adds to it: an accumulation."""
        if _gradient(parameter) != (left.address, left.version):
            return False
        return any(leaf is parameter for leaf in _leaves(loss, self._near)) or not self._is_changed_by_now(parameter, left)

    def _is_changed_by_now(self, parameter: torch.Tensor, left: _Left) -> bool:
        """Return True if the parameter, of which another model's graph knows nothing, has been changed since its backward."""
        if not self._changed:
            self._look_for_change(parameter, left)
        return self._changed

    def _end_before(self, recorder: StepRecorder) -> None:
        """The gradient of an unwatched backward is gone: that may have been the end of a step."""
        for index in range(len(recorder.trace) - 2, -1, -1):
            if recorder.trace[index] & 15 == BACKWARD_ENDS:
                named = sum(stamp & 15 in ARGUED for stamp in recorder.trace[: index + 1])
                recorder.likely_end = index + 1, named
                recorder.end_where_likely(perturbed=False)
                return

    def _found_end(self) -> tuple[int, int] | None:
        """Return where the step has ended, if it shows now that it has, and what was seen until then was not taken in yet."""
        traced, _ = self._end
        return self._end if self._changed and self._context.recorder.trace[traced - 1 : traced] == [self._stamp] else None

    def _look_for_change(self, parameter: torch.Tensor, left: _Left) -> None:
        now = self._some(parameter)
        if parameter._version != left.changes:
            self._changed = True
        elif now is not None and left.elements is not None and now.shape == left.elements.shape:
            # `.data` has a version of its own; of a device's parameter it shows a little later
            self._context.device.take((now != left.elements).any().float(), self._note)

    def _note(self, differs: float) -> None:
        self._changed = self._changed or bool(differs)

    def _ends(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """It has ended."""
        context, recorder, loss = self._context, self._context.recorder, args[0] if args else kwargs.get("tensors")
        parameter = self._watched()
        found = _gradient(parameter) if parameter is not None else None
        if found is None or found == self._before:  # another model's: it has left nothing there
            parameter = self._pick(loss)
            found = _gradient(parameter) if parameter is not None else None
        if parameter is None or found is None or not recorder.trace or recorder.trace[-1] & 15 != BACKWARD_ENDS:
            self._left = None
            return
        if self._changed and self._all is None:
            self._know(parameter, loss)
        if self._all is not None and recorder.step >= self._recount:
            self._count, self._recount = self._all.gradients(), recorder.step + _RECOUNT_EVERY
        if self._all is not None and (recorder.step >= context.norm_due or recorder.step == context.norm_step):
            recorder.values.norm_squared = 0.0  # of an accumulation only the last counts
            self._all.grad_scale = context.loss_scale
            context.notify(context.before_step, self._all, False)  # noqa: FBT003  # a listener
        elements = self._some(parameter) if not self._changed else None
        self._left = _Left(*found, parameter._version, None if elements is None else elements.clone())
        self._end, self._stamp = (len(recorder.trace), len(recorder.arguments)), recorder.trace[-1]
        recorder.likely_end = self._end if self._changed else None

    # -- what is watched ---------------------------------------------------------------------------------------------------

    def _watched(self) -> torch.Tensor | None:
        return self._parameter() if self._parameter is not None else None

    def _pick(self, loss: object) -> torch.Tensor | None:
        """Watch a parameter of this graph from now on."""
        found = next((leaf for leaf in _leaves(loss, _FIRST_NODES) if _is_plain(leaf)), None)
        self._parameter = ref(found) if found is not None else None
        self._all, self._recount = next((model for known, model in self._known if known() is found is not None), None), 0
        return found

    def _know(self, parameter: torch.Tensor, loss: object) -> None:
        """Learn all parameters of the model that is trained by hand."""
        recorder = self._context.recorder
        self._all = Parameters(_leaves(loss, _NODES))
        self._known = [*((known, model) for known, model in self._known if known() is not None), (ref(parameter), self._all)]
        del self._known[:-_MOST_KNOWN]
        recorder.values.flags |= StepFlag.NEW_MODEL if recorder.models.begins(self._all, recorder.step) else 0

    def _some(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return some of its elements; ``None`` while what is done is captured into a graph."""
        if self._context.device.cuda.capturing():
            return None
        return _some(parameter)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach()
    while flat.dim() > 1:
        flat = flat[-1]
    return flat.reshape(-1)[:_LOOKED_AT]


def _is_cleared(context: ProbeContext, parameter: torch.Tensor) -> bool:
    """Return True if it has no gradient, or one of zeros (a device's, which would have to be waited for, is not looked at)."""
    gradient = parameter.grad
    if gradient is None:
        return True
    plain = gradient.is_cpu and gradient.layout is parameter.layout and context.device.cuda.holds(gradient)
    return plain and not bool(_some(gradient).any())


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return True if it has elements, here: a DTensor's would need a collective, a fake one has none."""
    import torch

    return type(parameter) in {torch.Tensor, torch.nn.Parameter} and parameter.numel() > 0


def _gradient(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return where its gradient is, and how often that was changed."""
    gradient = parameter.grad
    if gradient is None:
        return None
    return (gradient.data_ptr() if gradient.layout is parameter.layout else 0), gradient._version


def _leaves(loss: object, most: int) -> Iterator[torch.Tensor]:
    """Yield the parameters that a loss depends on, the last layer's first; of what it depends on at all if there are none."""
    import torch

    tensors = [loss] if isinstance(loss, torch.Tensor) else list(loss) if isinstance(loss, (list, tuple)) else []
    waiting = deque[Any](
        tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None
    )
    seen, others, found = set(waiting), list[torch.Tensor](), False
    while waiting and len(seen) < most:
        node: Any = waiting.popleft()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            found = True
            yield leaf
        elif isinstance(leaf, torch.Tensor):
            others.append(leaf)
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting += following
    if not found:
        yield from others
