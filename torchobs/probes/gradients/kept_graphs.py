"""Detect losses that are kept with their graphs: ``losses.append(loss)``, ``total += loss``. Memory grows with each step.

A node of the graph of each of the first losses is marked in its ``metadata``, which lives as long as the node: whatever keeps
the loss, a sum of losses, or the model's outputs with their graph, keeps it. (The values that a backward pass needs are freed
by it, the nodes are not.) A node that is met twice belongs to a graph that is meant to stay, as of weights that are derived
once. The rule is that of PyTorch's FAQ, "My model reports cuda runtime error(2): out of memory": no history across the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES, LASTING_STEPS

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

LOOKS = 8
"""Backward passes that are looked at"""
_DOWN = 6
"""Nodes from the loss down to the marked one: loss scaling and the mean over micro-batches come after what a script keeps"""
_LEAF = "AccumulateGrad"
_KEY = "torchobs"


class _Mark:
    """Lives as long as the node that it is a mark of."""

    __slots__ = ("__weakref__",)


class KeptGraphs:
    """A part of the gradient probe, which looks at the first backward passes. Reported once."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        import torch  # torch is optional until training begins

        self._context, self._breaker, self._plain = context, breaker, torch.Tensor
        self._looks = 0
        self._marks: list[ref[_Mark]] = []
        self._last = 0
        self._done = False
        context.hooks.takes_loss.register(breaker, self._look)

    def _look(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        """Mark the graph of the loss of a backward pass that begins. In the training thread."""
        del gradients
        if type(tensors) is not self._plain or tensors.grad_fn is None or not accumulates or self._looks >= LOOKS:
            return  # a subclass has code of the user's
        self._looks += 1
        self._mark(tensors.grad_fn)
        if self._looks == LOOKS:  # not now, while the listeners are called
            self._context.at_backward(self._breaker.guard(self._end))

    def _end(self) -> None:
        self._context.hooks.takes_loss.unregister(self._breaker.probe)

    def _mark(self, function: Any) -> None:
        for _ in range(_DOWN):
            following = next((one for one, _ in function.next_functions if one is not None), None)
            if following is None or _LEAF in following.name():
                break
            function = following
        notes = getattr(function, "metadata", None)
        if not isinstance(notes, dict) or _KEY in notes:
            self._done = True
            return
        notes[_KEY] = mark = _Mark()
        self._marks.append(ref(mark))
        self._last = self._context.recorder.step

    def sample(self) -> None:
        """Tell what was found. In the sampler thread."""
        step, marks = self._context.recorder.step, self._marks
        if self._done or not marks:
            return
        if any(mark() is None for mark in marks[:-1]):
            self._done = True  # one is gone: they are not kept
        elif len(marks) >= LASTING_SAMPLES and marks[-1]() is not None and step - self._last >= LASTING_STEPS:
            self._done = True
            self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, {"kind": "losses_kept"}, step)
            text = (
                "losses are kept with their graphs, of which there are more with each step: keep loss.item() or loss.detach()"
            )
            self._context.warn_limited("loop losses_kept", text)
