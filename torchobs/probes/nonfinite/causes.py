"""Say why an operator made NaN of finite values: a mean over nothing, a division of 0 by 0, a softmax of what is all masked.

All is read from what the graph has kept of the very values, after a loss was not finite.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.nonfinite.graph import GraphNode, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping


MASKED_ROW = (
    "every value of a row that it was given was masked (negative infinity), and of such a row it makes NaN; "
    "is a sequence of the batch padding alone?"
)
NAME = "{name}"
_SOFTMAX = frozenset({"softmax", "log_softmax"})
_MEAN = 1
"""``reduction`` of a loss"""
_SELECTING = frozenset({"index", "masked_select", "index_select", "gather", "slice", "narrow", "take", "select"})
_SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})


class Cause(NamedTuple):
    """Why an operator made NaN. ``tensor``: what was given to it that explains this; ``elements``: where it shows."""

    words: str
    """with :data:`NAME` where the variable's name belongs"""
    tensor: Any = None
    elements: tuple[tuple[int, ...], ...] = ()


def cause_of(node: GraphNode, operands: Mapping[str, Any]) -> Cause | None:
    """Return why an operator made NaN of its operands, known ones by name; ``None`` if that is not seen."""
    if node.builtin.startswith("nll_loss"):
        return _ignored_targets(node)
    if node.builtin == "div":
        return _zero_by_zero(node, operands)
    if node.builtin in _SOFTMAX:
        return _masked_row(node)
    return _of_nothing(node)


def _ignored_targets(node: GraphNode) -> Cause | None:
    target, weight, total = (node.kept.get(name) for name in ("target", "weight", "total_weight"))
    settings = node.settings()
    if target is None or settings.get("reduction") != _MEAN or (total is not None and bool((total != 0).any())):
        return None
    count, ignored = target.numel(), settings.get("ignore_index")
    if not count:
        return Cause(f"it is over nothing, since {_why_empty(node)}, and the mean over none is NaN")
    counted = target[target != ignored]
    if not counted.numel():
        words = f"all {count:,} targets of the batch{NAME} are ignored (ignore_index={ignored}), and the mean over none is NaN"
        return Cause(words, target)
    if weight is not None and not bool((weight[counted] != 0).any()):
        words = f"the class weights of all {counted.numel():,} targets of the batch{NAME} are 0, and 0 / 0 is NaN"
        return Cause(words, target)
    return None


def _zero_by_zero(node: GraphNode, operands: Mapping[str, Any]) -> Cause | None:
    other, numerator, summed = operands.get("other"), operands.get("self"), node.inputs[0][0]
    if other is None or not other.numel() or bool((other != 0).all()):
        return None
    if summed is not None and is_over_nothing(summed):
        return Cause(f"it divided 0 by 0: the sum is over nothing, since {_why_empty(summed)}")
    zero = other == 0
    if numerator is not None:
        zero = zero & (numerator == 0)
    if numerator is None or not bool(zero.any()):
        return Cause("its divisor is 0, as that of a mean over a mask that leaves nothing is")
    many = "" if zero.numel() == 1 else f" in {int(zero.sum()):,} of {zero.numel():,} elements"
    return Cause(f"it divided 0 by 0{many}, as a mean over a mask that leaves nothing does")


def _of_nothing(node: GraphNode) -> Cause | None:
    """Return the cause of a mean, or of a loss with one, that had no element."""
    if node.builtin in _SPREADS and prod(_given_size(node)) == 1:
        return Cause("the deviation of a single value is NaN (0 / 0)")
    if not is_mean_of_nothing(node):
        return None
    return Cause(f"it is over nothing, since {_why_empty(node)}, and the mean over none is NaN")


def _given_size(node: GraphNode, place: int = 0) -> list[int]:
    """Return the shape of an operand; ``[1]`` if it is not known."""
    producer, index = node.inputs[place] if place < len(node.inputs) else (None, 0)
    if producer is None:
        return [1]
    return list(producer.parameter.shape) if producer.parameter is not None else size_of(producer.function, index)


def is_over_nothing(node: GraphNode) -> bool:
    """Return whether no operand that has a gradient has an element."""
    places = [place for place, (producer, _) in enumerate(node.inputs) if producer is not None]
    return bool(places) and all(prod(_given_size(node, place)) == 0 for place in places)


def is_mean_of_nothing(node: GraphNode) -> bool:
    """Return whether a mean, or a loss with one, has elements though its operands have none: each is NaN."""
    return is_over_nothing(node) and prod(size_of(node.function)) != 0


def _why_empty(node: GraphNode) -> str:
    """Return why an operand has no element: by a selection, or from the start."""
    while True:
        empty = (place for place in range(len(node.inputs)) if prod(_given_size(node, place)) == 0)
        place = next(empty, None)
        producer = node.inputs[place][0] if place is not None else None
        if producer is None:
            break
        node = producer
    return f"the selection ({node.operator}) before it left no element" if node.builtin in _SELECTING else "the batch is empty"


def _masked_row(node: GraphNode) -> Cause | None:
    """Return the cause if a whole row of a softmax is NaN: its operand was not, by the search that came here."""
    import torch  # torch is optional until training begins

    result = node.kept.get("result")
    if result is None or not result.dim():
        return None
    dim = node.settings().get("dim", -1)
    rows = torch.nonzero(result.isnan().all(dim))[:3].tolist()
    if not rows:
        return None
    dim %= result.dim()
    return Cause(MASKED_ROW, None, tuple((*row[:dim], 0, *row[dim:]) for row in rows))
