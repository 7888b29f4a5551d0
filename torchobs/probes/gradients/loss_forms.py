"""Detect a loss whose input has been normalised before: softmax or sigmoid twice, softmax over the batch.

``cross_entropy`` and ``binary_cross_entropy_with_logits`` take logits. Of probabilities they make nearly the same number for
each class, so that the loss stays high and gradients small. It stands in the graph: the softmax whose result goes into the
log-softmax, over a dimension of the same size, with nothing but changes of shape or type between. So none are targets,
distillation (a temperature between), focal losses (whose sigmoid is a factor of its own) and a log-softmax of a log-softmax,
which changes nothing. *Over the batch*: of a matrix [samples, classes] in a classification's loss over dimension 0, which
normalises over the samples; not of a square one, which compares a batch with itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.nonfinite.graph import operator_of, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.probes.core.context import ProbeContext

LEAST = 3
"""Looks in which it must have been so"""
_DEEPEST, _MOST_NODES, _MOST_BETWEEN = 12, 64, 8
_MATRIX = 2
_TERMS = frozenset({
    "mean", "sum", "add", "sub", "rsub", "mul", "div", "neg", "pow", "exp", "log", "clamp", "stack", "unbind", "masked_fill",
    "where", "index", "select", "slice", "view", "squeeze", "unsqueeze", "expand", "to_copy", "nan_to_num",
})  # fmt: skip
"""Operators between a loss and its terms"""
_SHAPES = frozenset({
    "view", "reshape", "unsafe_view", "reshape_alias", "squeeze", "unsqueeze", "transpose", "permute", "t", "clone", "to_copy",
    "alias",
})  # fmt: skip
"""Operators that leave the values as they are"""


class LossForms:
    """A part of the gradient probe, called for the first backward passes. Each form is told once."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._seen: dict[str, int] = {}
        self._found: list[tuple[str, list[int], int]] = []

    def look(self, function: Any) -> None:
        """Look at a loss's graph. In the training thread."""
        for kind, shape in dict(forms(function)).items():
            self._seen[kind] = self._seen.get(kind, 0) + 1
            if self._seen[kind] == LEAST:
                self._found.append((kind, shape, self._context.recorder.step + 1))

    def sample(self) -> None:
        """Tell what was found. In the sampler thread."""
        while self._found:
            kind, shape, step = self._found.pop(0)
            self._context.writer.event(catalog.EVENT_LOOP_MISTAKE.name, {"kind": kind, "shape": shape}, step)
            self._context.warn_limited(f"loop {kind}", f"{_MEANING[kind]} (the loss's input is of shape {shape})")


_MEANING = {
    "softmax_twice": "the loss is given probabilities, and takes their softmax again: it expects logits",
    "sigmoid_twice": "the loss is given probabilities, and takes their sigmoid again: it expects logits",
    "softmax_over_batch": "the softmax in the loss is taken over the samples (dim=0), not over the classes (dim=1)",
}


def forms(function: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield what is wrong with the terms of a loss, and the shape of their inputs."""
    waiting, seen = [(function, 0)], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node, depth = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        operator = operator_of(node.name())
        kind = _wrong(operator, node)
        if kind is not None:
            yield kind, size_of(_input(node))
        if depth < _DEEPEST and (operator in _TERMS or operator.startswith("nll_loss")):
            waiting += [(following, depth + 1) for following, _ in node.next_functions if following is not None]


def _wrong(operator: str, node: Any) -> str | None:
    """Return what is wrong with one operator's input."""
    if operator.startswith("binary_cross_entropy"):
        inner = _input(node) if operator.endswith("_with_logits") else _if_is("sigmoid", _input(node))
        return "sigmoid_twice" if _is(inner, "sigmoid") else None
    if operator.startswith("nll_loss"):
        inner = _input(node)
        inner = _input(inner) if _is(inner, "log") else inner
        return "softmax_over_batch" if (_is(inner, "log_softmax") or _is(inner, "softmax")) and _is_over_batch(inner) else None
    inner = _input(node) if operator == "log_softmax" else None
    if not _is(inner, "softmax"):
        return None
    if _is_over_batch(inner) and not _is_over_batch(node):
        return "softmax_over_batch"
    return "softmax_twice" if 1 < _classes(node) == _classes(inner) else None


def _if_is(operator: str, node: Any) -> Any:
    """Return the node that an operator has its input from, if it is that operator."""
    return _input(node) if _is(node, operator) else None


def _input(node: Any) -> Any:
    """Return the node that has made the values of an operator's first input; ``None`` if it is no operator."""
    for _ in range(_MOST_BETWEEN):
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
        if node is None or operator_of(node.name()) not in _SHAPES:
            return node
    return None


def _is(node: Any, operator: str) -> bool:
    return node is not None and operator_of(node.name()) == operator


def _dimension(node: Any) -> int | None:
    """Return the dimension that a softmax is taken over, counted from the front."""
    dimension, count = getattr(node, "_saved_dim", None), len(size_of(node))
    if dimension is None or not count:
        return None
    return int(dimension - (1 << 64) if dimension >= 1 << 63 else dimension) % count


def _classes(node: Any) -> int:
    """Return over how many values a softmax is taken; 0 if unknown."""
    dimension = _dimension(node)
    return size_of(node)[dimension] if dimension is not None else 0


def _is_over_batch(node: Any) -> bool:
    size = size_of(node)
    return len(size) == _MATRIX and size[0] != size[1] and _dimension(node) == 0 and size[1] > 1
