"""Say why an operator made NaN of finite values: a mean over nothing, a division of 0 by 0, a softmax of what is all masked.

All is read from what the graph has kept of the very values, after a loss was not finite.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.nonfinite.graph import GraphNode, size_of
from torchobs.probes.nonfinite.operators import OPAQUE, PASSING, STRONG
from torchobs.probes.nonfinite.values import plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


MASKED_ROW = (
    "every value of a row that it was given was masked (negative infinity), and of such a row it makes NaN; "
    "is a sequence of the batch padding alone?"
)
NAME = "{name}"
LIKELY = "most likely: "
"""How a cause begins that is known by the graph's structure alone"""
_SOFTMAX = frozenset({"softmax", "log_softmax"})
_MEAN = 1
"""``reduction`` of a loss"""
_SELECTING = frozenset({"index", "masked_select", "index_select", "gather", "slice", "narrow", "take", "select"})
_SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})
_MASKING = frozenset({"masked_fill", "where", "index_put", "copy_slices", "masked_scatter", "index_fill"})
_ADDING = frozenset({"add", "sub", "rsub", "baddbmm", "addmm"})
"""Operators by which a mask is put on: the second kind with an operand that has no gradient"""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "convolution": 0}
"""Products, with the place of the first factor"""


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
    if node.builtin.startswith("scaled_dot_product"):
        return _masked_attention(node)
    return _of_nothing(node)


def likely_masked(nodes: Sequence[GraphNode], bad: Collection[int]) -> GraphNode | None:
    """Return the first softmax of masked values, if nothing else in the graph of a finite loss makes NaN of finite values.

    The loss left the sample with the NaN out, and the backward pass did not: all parameters (ids) before it are ``bad``.
    """
    masked = next((node for node in nodes if node.builtin == "softmax" and _is_masked(node)), None)
    if masked is None or not all(map(_is_harmless, nodes)):
        return None
    parameters = [node.parameter for node in _below(masked) if node.parameter is not None]
    spoiled = all(id(parameter) in bad and _is_nan(parameter.grad) for parameter in parameters)
    return masked if parameters and spoiled else None


def _is_nan(gradient: Any) -> bool:
    """Return whether a gradient has a NaN: too large a step leaves infinity."""
    values = plain(gradient)
    return values is not None and bool(values.isnan().any())


def _is_harmless(node: GraphNode) -> bool:
    """Return whether a node makes no NaN of finite values, but for a softmax, and has no data of the batch in it."""
    if node.parameter is not None:
        return True
    if node.is_python or node.operator in OPAQUE:
        return False
    if node.builtin in _PRODUCTS:
        return all(producer is not None for producer, _ in node.inputs[_PRODUCTS[node.builtin] :])
    return node.builtin not in STRONG - _SOFTMAX or node.builtin.startswith("nll_loss") or _has_sound_operand(node)


def _has_sound_operand(node: GraphNode) -> bool:
    """Return whether a division is by a constant, a power at least 1, or a root that of a sum with a constant (RMSNorm's)."""
    if node.builtin == "pow":
        exponent = node.settings().get("exponent")
        return isinstance(exponent, (int, float)) and exponent >= 1
    if node.builtin == "div":
        return _has_constant(node)
    producer = node.inputs[0][0] if node.builtin in {"sqrt", "rsqrt"} else None
    return producer is not None and producer.builtin == "add" and _has_constant(producer)


def _has_constant(node: GraphNode) -> bool:
    """Return whether the second operand has no gradient."""
    return len(node.inputs) == 1 or node.inputs[1][0] is None


def _below(node: GraphNode) -> set[GraphNode]:
    below, waiting = set[GraphNode](), [node]
    while waiting:
        node = waiting.pop()
        if node not in below:
            below.add(node)
            waiting += [producer for producer, _ in node.inputs if producer is not None]
    return below


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


def _masked_attention(node: GraphNode) -> Cause | None:
    """Return the cause if a fused attention has a NaN in a row that is all masked, as older versions of torch have."""
    mask = next((node.kept[name] for name in ("attn_mask", "attn_bias") if node.kept.get(name) is not None), None)
    output = node.kept.get("output")
    if mask is None or output is None or mask.shape[-2] not in {1, output.shape[-2]}:
        return None
    masked = (mask == -inf if mask.is_floating_point() else ~mask).all(-1)
    return Cause(MASKED_ROW) if bool((masked & output.isnan().any(-1)).any()) else None


def _is_masked(node: GraphNode) -> bool:
    """Return whether a mask was put on the operand of a softmax."""
    seen, waiting = set[GraphNode](), list(_producers(node))
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.builtin in _MASKING or (node.builtin in _ADDING and any(producer is None for producer, _ in node.inputs)):
            return True
        if node.builtin in PASSING or node.builtin in {"mul", "div", "add"}:
            waiting += _producers(node)
    return False


def _producers(node: GraphNode) -> Iterator[GraphNode]:
    return (producer for producer, _ in node.inputs if producer is not None and producer.parameter is None)
