"""Read the autograd graph of a loss: its nodes in the order of the forward pass, and the values that they have kept.

The values are those of the very forward pass that went wrong: nothing is run again. Values kept through hooks (non-reentrant
checkpointing, ``save_on_cpu``) are left alone: checkpointing raises if they are read twice.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


MOST_NODES = 100_000
_RAW, _SAVED = "_raw_saved_", "_saved_"
_NUMBERED = re.compile(r"Backward\d*$")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=\d)(?=[A-Z])(?![DP](?:[A-Z]|$))|(?<=[A-Z])(?=[A-Z][a-z])")
_LEAF = "AccumulateGrad"
OPAQUE = {"compiled_function": "compiled region", "checkpoint_function": "checkpointed region"}
"""Nodes that stand for many operators and keep nothing by name, each with a description"""
_fields: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}


class GraphNode:
    """One node: an operator of the forward pass, or a leaf (``parameter``)."""

    __slots__ = ("builtin", "function", "inputs", "kept", "number", "operator", "parameter")

    def __init__(self, function: Any) -> None:
        self.function = function
        self.number: int = -1
        """Place in the forward pass"""
        name = function.name()
        self.operator = operator_of(name)
        self.builtin = "" if hasattr(function, "_forward_cls") and self.operator not in OPAQUE else self.operator
        """The same, but empty for a function written in Python: that is no operator of torch, whatever its name"""
        self.operator = self.builtin or name.rpartition("::")[2].removesuffix("Backward")
        self.parameter: torch.Tensor | None = function.variable if _LEAF in name else None
        self.inputs: list[tuple[GraphNode | None, int]] = []
        """For each differentiable tensor argument the node that made it, and the index of the output; ``None``: no gradient"""
        self.kept: dict[str, Any] = {}
        """Tensors kept for the backward pass, by the names of the operator's arguments and results"""

    @property
    def is_python(self) -> bool:
        """Whether it is a ``torch.autograd.Function``, the user's or a library's."""
        return not self.builtin

    def take_kept(self) -> None:
        """Read the kept tensors, which the backward pass frees. Those of a function written in Python have no names."""
        self.kept = {} if self.is_python else dict(kept_tensors(self.function))

    def settings(self) -> dict[str, Any]:
        """Return the arguments that are not tensors and were kept."""
        function, settings = self.function, {}
        for name in _names(function)[1]:
            value = getattr(function, name)
            if value is not None:
                settings[name.removeprefix(_SAVED)] = _signed(value)
        return settings


def _signed(value: Any) -> Any:
    """Return the original integers: a node has negative ones (an embedding's ``padding_idx``, ``dim``) as unsigned."""
    if isinstance(value, tuple):
        return tuple(map(_signed, value))
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def operator_of(name: str) -> str:
    """Return the operator's name as torch spells it: ``NllLoss2DBackward0`` → ``nll_loss2d``."""
    return _HUMP.sub("_", _NUMBERED.sub("", name.rpartition("::")[2])).lower()


def size_of(node: Any, index: int = 0) -> list[int]:
    """Return the shape of a node's result; empty for a scalar, and if unknown."""
    results = getattr(node, "_input_metadata", ())
    return list(results[index].shape) if index < len(results) else []


def type_of(node: Any) -> Any:
    """Return the type of the elements of a node's first result; ``None`` if unknown."""
    return next((getattr(result, "dtype", None) for result in getattr(node, "_input_metadata", ())), None)


def accumulator_of(parameter: Any) -> Any:
    """Return the node that adds to a leaf's gradient; ``None`` if it gets none. It lives as long as it or a graph is held."""
    with torch.enable_grad():
        function = parameter.expand_as(parameter).grad_fn
    return function.next_functions[0][0] if function is not None else None


def read_graph(roots: Iterable[Any]) -> list[GraphNode]:
    """Return the nodes below these ``grad_fn``, leaves first, then in the order of the forward pass; at most 100,000."""
    nodes: dict[Any, GraphNode] = {}
    waiting = [root for root in roots if root is not None]
    while waiting and len(nodes) < MOST_NODES:
        function = waiting.pop()
        if function in nodes:
            continue
        nodes[function] = node = GraphNode(function)
        if node.parameter is None:
            node.number = function._sequence_nr()
        waiting += [following for following, _ in function.next_functions if following is not None]
    for function, node in nodes.items():
        node.inputs = [(nodes.get(following), index) for following, index in function.next_functions]
        if node.parameter is None:
            node.take_kept()
    return sorted(nodes.values(), key=lambda node: node.number)


def _names(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the attributes of kept tensors, and of other kept arguments."""
    kind = type(function)
    if kind not in _fields:
        names = dir(kind)
        raw = tuple(name for name in names if name.startswith(_RAW))
        kept = {_SAVED + name.removeprefix(_RAW) for name in raw}
        _fields[kind] = raw, tuple(name for name in names if name.startswith(_SAVED) and name not in kept)
    return _fields[kind]


def kept_tensors(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a node has kept, by the names of the operator's arguments and results."""
    for name in _names(function)[0]:
        try:
            raw = getattr(function, name)
        except RuntimeError:  # freed by an earlier backward pass
            continue
        for index, tensor in enumerate(raw if isinstance(raw, tuple) else ()):
            yield f"{name.removeprefix(_RAW)}[{index}]", _value(tensor)
        if not isinstance(raw, tuple):
            yield name.removeprefix(_RAW), _value(raw)


def _value(raw: Any) -> Any:
    if getattr(raw, "unpack_hook", raw) is not None:  # hooks, or a torch version that does not say
        return None
    try:
        return raw.data
    except RuntimeError:
        return None
