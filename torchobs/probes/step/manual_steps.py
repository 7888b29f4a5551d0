"""Steps that no optimizer of torch's makes: parameters changed by hand, by fastai's optimizers, by Keras'.

What shows then is the gradient: it is there when a backward pass ends, and when the next one begins it was cleared, or taken
away. If the parameter has changed in between as well, it was a step, and it ended with that backward: when exactly the
parameters were changed cannot be seen. (Gradients that are cleared while the parameters stay are somebody's analysis: saliency,
an adversarial input. Gradients that stay are an accumulation.) The first step of an optimizer of torch's ends all this.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs.flight.metrics.fold import StepFlag
from torchobs.probes.core.boundaries import BACKWARD_ENDS
from torchobs.support.error_guard import CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from torchobs.probes.core.context import ProbeContext

_LOOKED_AT = 64
"""Elements of a parameter that are compared"""
_RECOUNT_EVERY = 64
_NODES, _FIRST_NODES = 100_000, 1000
"""Nodes of a graph that are looked at for all parameters, and for the first: a node is a microsecond, once"""


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
        self._parameter: ref[torch.Tensor] | None = None
        self._left: _Left | None = None
        self._end, self._stamp = (0, 0), 0
        self._changed = False
        self._all: Parameters | None = None
        self._count, self._recount = 0, 0

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A backward pass begins."""
        context, recorder = self._context, self._context.recorder
        if recorder.direct or recorder.optimizers() or context.in_closure:
            recorder.likely_end = context.manual_steps = None
            return
        self._judge()
        loss = args[0] if args else kwargs.get("tensors")
        if self._parameter is None or self._parameter() is None or self._left is None:
            self._parameter = next((ref(found) for found in _leaves(loss, _FIRST_NODES) if _is_plain(found)), None)
            self._all, self._recount = None, 0
        if self._changed and self._all is None:
            self._all = Parameters(_leaves(loss, _NODES))
            recorder.values.flags |= StepFlag.NEW_MODEL if recorder.models.begins(self._all, recorder.step) else 0

    def _judge(self) -> None:
        """Return True if the step has ended with the last backward."""
        recorder, left = self._context.recorder, self._left
        parameter = self._parameter() if self._parameter is not None else None
        if left is None or (parameter is not None and _gradient(parameter) == (left.address, left.version)):
            recorder.likely_end = None
            recorder.relieve()
            return
        if parameter is not None and not self._changed:
            self._look_for_change(parameter, left)
            recorder.likely_end = self._found_end()
        if recorder.likely_end is not None and self._all is not None and self._context.clipped_by_hand is not None:
            self._context.clipped_by_hand(self._all, self._count)
        recorder.end_where_likely()

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

    def _ends(self) -> None:
        """It has ended."""
        context, recorder = self._context, self._context.recorder
        parameter = self._parameter() if self._parameter is not None else None
        found = _gradient(parameter) if parameter is not None else None
        if parameter is None or found is None or not recorder.trace or recorder.trace[-1] & 15 != BACKWARD_ENDS:
            self._left = None
            return
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

    def _some(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return some of its elements; ``None`` while what is done is captured into a graph."""
        if self._context.device.cuda.capturing():
            return None
        flat = parameter.detach()
        while flat.dim() > 1:
            flat = flat[-1]
        return flat.reshape(-1)[:_LOOKED_AT]


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
