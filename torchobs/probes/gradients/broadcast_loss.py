"""Detect a loss that compares every prediction with every target: [N, 1] and [N] are broadcast to [N, N], without an error.

The shapes stand in the graph of the loss; the first backward passes are looked at, down from the loss to the first difference.
Told is only what has a target's form: a column or a row of a batch that has a gradient, against something that has none, to a
square. Pairwise differences have a gradient on both sides, and differences from a matrix are no sum of a column and a row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.gradients.kept_graphs import KeptGraphs
from torchobs.probes.gradients.loss_forms import LossForms
from torchobs.probes.nonfinite.graph import kept_tensors, operator_of, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.probes.core.context import ProbeContext
    from torchobs.support.error_guard import CircuitBreaker

LOOKS, LEAST = 8, 3
"""Backward passes that are looked at, and those of them in which it must have been so"""
_DEEPEST, _MOST_NODES = 10, 64
_SQUARE = 2
_ROUNDING = 2.0**-10
"""Of the largest difference: ten bits, of which float16 has that many. Coarser types are not judged"""
_REDUCED = frozenset({
    "mean", "sum", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "add", "sub", "mul", "div", "neg", "stack", "unbind",
})  # fmt: skip
"""Operators between the loss and its terms"""
_ELEMENTWISE = frozenset({"pow", "abs", "mul", "div", "neg", "clamp", "log", "exp", "sqrt", "where", "sub", "expand"})


class BroadcastLoss:
    """A part of the gradient probe. Told once."""

    def __init__(self, context: ProbeContext, breaker: CircuitBreaker) -> None:
        import torch  # torch is optional until training begins

        self._context, self._breaker, self._plain = context, breaker, torch.Tensor
        self._forms, self._kept = LossForms(context), KeptGraphs(context)  # which look at the same backward passes
        self._looks = self._seen = 0
        self._found: tuple[list[int], int] | None = None
        context.hooks.takes_loss.register(breaker, self._look)

    def _look(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        """Look at the loss of a backward pass that begins. In the training thread."""
        del gradients
        if type(tensors) is not self._plain or not accumulates or self._looks >= LOOKS:
            return  # a subclass has code of the user's
        function = tensors.grad_fn
        if function is None:
            return
        self._looks += 1
        self._forms.look(function)
        self._kept.look(function)
        found = next(_broadcast(function), None)
        if found is not None:
            shape, verdict = found
            note, device = partial(self._note, shape, self._context.recorder.step + 1), self._context.device
            if verdict.is_cpu:
                note(verdict.item())
            else:
                device.take(verdict, note)  # nobody waits for it
        if self._looks == LOOKS:  # not now, while the listeners are called
            self._context.at_backward(self._breaker.guard(self._end))

    def _end(self) -> None:
        self._context.hooks.takes_loss.unregister(self._breaker.probe)

    def _note(self, shape: list[int], step: int, verdict: float) -> None:
        """Take a verdict: 1 for a loss that is broadcast."""
        self._seen += bool(verdict)
        if self._seen == LEAST and verdict:
            self._found = shape, step

    def sample(self) -> None:
        """Tell what was found. In the sampler thread."""
        self._forms.sample()
        self._kept.sample()
        found, self._found = self._found, None
        if found is None:
            return
        (shape, step), size = found, found[0][0]
        told = {"kind": "loss_broadcast", "shape": shape}
        self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, told, step)
        what = f"predictions of shape {shape} and targets of another one were broadcast to {[size, size]}"
        self._context.warn_limited("loop loss_broadcast", f"the loss compares every prediction with every target: {what}")


def _broadcast(function: Any) -> Iterator[tuple[list[int], Any]]:
    """Yield the shape of a prediction that is broadcast to a square against what has no gradient, and :func:`_verdict`."""
    waiting, seen = [(function, function, 0)], 0
    while waiting and seen < _MOST_NODES:
        node, user, depth = waiting.pop()
        seen += 1
        operator, size = operator_of(node.name()), size_of(node)
        inputs = node.next_functions
        if operator in {"sub", "rsub", "expand"} and len(size) == _SQUARE and 1 < size[0] == size[1]:
            given = [size_of(*edge) for edge in inputs if edge[0] is not None]
            if len(given) == 1 and given[0] in ([size[0], 1], [size[0]]):
                verdict = _verdict(user, size, column=len(given[0]) > 1)
                if verdict is not None:
                    yield given[0], verdict
        if depth < _DEEPEST and operator in (_ELEMENTWISE if len(size) > 1 else _ELEMENTWISE | _REDUCED):
            waiting += [(following, node, depth + 1) for following, _ in inputs if following is not None]


def _verdict(user: Any, size: list[int], *, column: bool) -> Any:
    """Return 1, as a tensor, if the differences, as their user has kept them, are those of a column and a row; else 0.

    No differences from a matrix are. ``None`` if they were not kept. ``column``: the predictions are one. Targets that are all
    the same (a critic's ones) do no harm.
    """
    import torch  # torch is optional until training begins

    kept = dict(kept_tensors(user))
    differences, target = kept.get("self"), kept.get("target")
    if type(differences) is not torch.Tensor or list(differences.shape) != size or differences.is_meta:
        return None
    with torch.no_grad():
        rows, first = differences[:2], differences[:, 0]  # no copy of a square, for which there may be no memory
        if target is not None:
            targets = target.expand(size)
            rows, first = rows - targets[:2], first - targets[:, 0]
        between = rows[0] - rows[1]  # the same in all columns
        targets = rows[0] if column else first
        limit = _ROUNDING * rows.abs().max().maximum(first.abs().max())
        return ((_range(between) <= limit) & (limit < _range(targets))).float()


def _range(values: Any) -> Any:
    return values.max() - values.min()
