"""Compute a node's output again from what it has kept, so that values which nobody kept are known as well.

The operator is found by its name and arguments among torch's schemas. Only operators that neither change their arguments nor
draw random numbers are computed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.probes.nonfinite.graph import GraphNode

RESULTS = ("result", "output", "output[0]", "result0", "out", "values")
"""Names under which a node keeps its first output"""
_DERIVED = (
    "_sym_sizes", "_sym_strides", "_sym_numel", "_sizes", "_options", "_args", "_sym_sizes_opt", "_sym_argsize_0",
    "_sym_argsize_1",
)  # fmt: skip
_NO_GRADIENT = frozenset({"mask", "index", "indices", "condition"})
_NOT_AGAIN = ("batch_norm", "dropout", "rrelu", "bernoulli", "rnn", "embedding_bag", "embedding_renorm")
_TENSOR, _LIST = "Tensor", "Tensor[]"
_MOST_ELEMENTS = 1 << 26


def _without_memory(value: Any) -> Any:
    import torch  # torch is optional until training begins

    if isinstance(value, (list, tuple)):
        return [_without_memory(each) for each in value]
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _elements(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_elements, value))
    numel = getattr(value, "numel", None)
    return int(numel()) if numel is not None else 0


@lru_cache(maxsize=512)
def overloads(operator: str) -> tuple[Any, ...]:
    """Return the overloads of an aten operator that make new tensors; its name may begin with an underscore."""
    import torch  # torch is optional until training begins

    found = []
    for name in (operator, "_" + operator):
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        for overload_name in packet.overloads():
            overload = getattr(packet, overload_name)
            if not (overload._schema.is_mutable or any(argument.is_out for argument in overload._schema.arguments)):
                found.append(overload)
    return tuple(found)


def argument_names(node: GraphNode) -> tuple[str, ...]:
    """Return the name of the argument that each of the node's inputs is; empty if unknown."""
    if node.is_python:
        return tuple(f"input[{index}]" for index in range(len(node.inputs)))
    overload = _overload(node)
    if overload is None:
        return ()
    tensors = _differentiable(overload)
    if len(tensors) == 1 and _kind(tensors[0]) == _LIST:
        return tuple(f"{tensors[0].name}[{index}]" for index in range(len(node.inputs)))
    return tuple(argument.name for argument in tensors[: len(node.inputs)])


@lru_cache(maxsize=2048)
def _differentiable(overload: Any) -> list[Any]:
    arguments = overload._schema.arguments
    return [a for a in arguments if _kind(a) in {_TENSOR, _LIST} and a.name not in _NO_GRADIENT]


def _overload(node: GraphNode) -> Any:
    """Return the overload whose arguments fit best what the node has kept."""
    if node.is_python:
        return None
    kept = {name.partition("[")[0] for name in node.kept} | {name for name in node.settings() if not name.endswith(_DERIVED)}
    kept = {name for name in kept if name not in RESULTS and not name.startswith("result")} - {"total_weight"}
    best, fewest = None, 1 << 10
    for overload in overloads(node.operator):
        arguments = overload._schema.arguments
        names = {argument.name for argument in arguments}
        tensors = _differentiable(overload)
        lists = any(_kind(argument) == _LIST for argument in tensors)
        if not kept <= names or (len(tensors) < len(node.inputs) and not lists):
            continue
        more = sum(name not in kept for name in names) + 100 * (len(tensors) != len(node.inputs) and not lists)
        if more < fewest:
            best, fewest = overload, more
    return best


def _kind(argument: Any) -> str:
    return str(argument.type).removeprefix("Optional[").removesuffix("]").replace("List[Tensor", _LIST)


def compute(node: GraphNode, operands: Mapping[str, Any], stand_ins: Sequence[str] = ()) -> Any:
    """Return the operator's result (a tensor, or a tuple of results); ``None`` if it cannot be computed.

    Args:
        node: the node.
        operands: values of tensor arguments, by name.
        stand_ins: constants that nobody kept and that change nothing if they are left out, as 0.
    """
    import torch  # torch is optional until training begins

    overload = _overload(node)
    if overload is None or torch.Tag.nondeterministic_seeded in overload.tags or any(w in node.operator for w in _NOT_AGAIN):
        return None
    settings = node.settings()
    given: list[Any] = []
    by_name: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        name = argument.name
        if name in operands:
            value = operands[name]
        elif name in settings:
            value = settings[name]
        elif name in stand_ins and _kind(argument) == _TENSOR:
            value = torch.zeros(())
        elif argument.has_default_value():
            continue
        else:
            return None
        if argument.kwarg_only or by_name or len(given) < overload._schema.arguments.index(argument):
            by_name[name] = value
        else:
            given.append(value)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            # a small operand may become a large result: its size is known without its memory
            made = overload(*map(_without_memory, given), **{name: _without_memory(value) for name, value in by_name.items()})
            if _elements(made) + sum(map(_elements, operands.values())) > _MOST_ELEMENTS:
                return None
            return overload(*given, **by_name)
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):  # its arguments were others
        return None
