"""Find the first node of a graph that makes a non-finite result of finite operands, on the way to a non-finite loss.

Every node's result is looked at as it was kept, by itself or by a node that used it, or is computed again. From the loss the
search follows operands that are not finite, back to where all are. Negative infinity that masks attention is not a fault by
itself: a softmax that gives NaN of it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from torchobs.tensors.graph import OPAQUE, size_of, type_of
from torchobs.tensors.values import Condition, condition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchobs.tensors.graph import GraphNode

STRONG = frozenset({
    "log", "log2", "log10", "log1p", "div", "reciprocal", "exp", "exp2", "expm1", "pow", "sqrt", "rsqrt", "acos", "asin",
    "acosh", "atanh", "tan", "sinh", "cosh", "lgamma", "digamma", "polygamma", "logit", "special_logit", "xlogy",
    "special_xlogy", "logsumexp", "softmax", "log_softmax", "std", "var", "std_mean", "var_mean", "remainder", "fmod",
    "linalg_inv_ex", "linalg_vector_norm", "norm", "linalg_solve_ex", "linalg_cholesky_ex", "linalg_eigh", "linalg_svd",
    "cumprod", "prod", "logcumsumexp", "erfinv", "binary_cross_entropy", "nll_loss", "nll_loss_nd", "nll_loss2d",
    "poisson_nll_loss", "kl_div", "addcdiv", "scaled_dot_product_attention", "hypot", "ldexp",
})  # fmt: skip
"""Operators that make infinity or NaN of ordinary finite values; all others do so by overflow only, or not at all"""

PASSING = frozenset({
    "view", "reshape", "unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select",
    "clone", "to_copy", "contiguous", "cat", "stack", "split", "split_with_sizes",
    "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "unbind", "chunk", "alias", "as_strided",
    "repeat", "flip", "roll", "gather", "index", "index_select", "neg", "abs", "relu", "leaky_relu", "gelu", "silu", "tanh",
    "sigmoid", "max_pool2d_with_indices", "adaptive_avg_pool2d", "avg_pool2d", "unfold", "narrow", "copy_slices", "flatten",
    "constant_pad_nd", "reflection_pad2d", "diagonal", "tril", "triu", "sin", "cos", "clamp", "elu", "hardtanh", "threshold",
    "native_layer_norm", "native_batch_norm", "native_group_norm", "cudnn_batch_norm", "embedding", "movedim", "detach",
    "upsample_nearest2d", "upsample_bilinear2d", "amax", "amin", "max", "min", "sort", "topk",
})  # fmt: skip
"""Operators that produce nothing non-finite from finite operands: their results only pass it on"""

RESHAPING = frozenset({
    "view", "reshape", "unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "clone", "to_copy",
    "contiguous", "alias", "flatten", "neg", "movedim", "detach", "flip", "roll", "repeat",
})  # fmt: skip
"""The ones among them that keep all elements of the operand"""

MASKABLE = frozenset({"softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"})
"""Operators for which negative infinity is a mask, and that give NaN if everything is masked"""

ADDITIVE = frozenset({"add", "sub", "rsub", "addmm", "baddbmm"})

CHOOSING = frozenset({"cat", "stack", "where", "maximum", "minimum"})
"""Operators of several tensors that only choose among their elements"""

_HARMLESS = PASSING | CHOOSING | ADDITIVE | {"masked_fill"}
"""Operators that make nothing of ordinary finite values but what they are given by a constant: a mask"""

LONGEST_S = 5.0
"""Time after which nothing is recomputed; then kept values alone decide"""
_MOST_BIRTHS = 64
_SOUND = frozenset({Condition.FINITE, Condition.MASKED})
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


@dataclass(frozen=True, slots=True)
class Birth:
    """Where values that are not finite came from. ``operand``: the tensor that was so before the node used it."""

    node: GraphNode
    certain: bool
    operand: Any = None
    is_leaf: bool = False
    is_constant: bool = False
    """An operand without a gradient, which was not kept; ``operand`` is the first result of it that was"""
    is_unread: bool = False
    """The values of ``operand``, a parameter, are unknown: FSDP frees them after the forward pass"""
    is_unseen: bool = False
    """It may be such an operand of a function that does not keep them all, or its own fault; ``operand`` as before"""


class ForwardTrace:
    """The values of one graph, its nodes in the order of the forward pass."""

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self._nodes, self._until_s = nodes, monotonic() + LONGEST_S
        self._conditions: dict[tuple[GraphNode, int], Condition] = {}
        self._values: dict[tuple[GraphNode, int], Any] = {}
        self._names = {node: argument_names(node) for node in nodes if node.parameter is None}
        self._uses = Counter(producer for node in nodes for producer in {producer for producer, _ in node.inputs})
        self._outputs: dict[GraphNode, set[int]] = {}
        self._guessed: set[GraphNode] = set()
        """Sums with a constant that was not kept, taken for 0, and what is computed of them"""
        self._at_birth: dict[GraphNode, dict[str, Any]] = {}
        for node in nodes:
            for producer, index in node.inputs:
                if producer is not None:
                    self._outputs.setdefault(producer, set()).add(index)
        self._take_kept()
        for node in nodes:
            self._judge(node)

    def _take_kept(self) -> None:
        for node in self._nodes:
            for name, edge in zip(self._names.get(node, ()), node.inputs, strict=False):
                value = node.kept.get(name)
                if value is not None and edge[0] is not None:
                    self._values[edge] = value  # type: ignore[index]  # checked
            result = self._result(node, None)
            if result is not None:
                self._values.setdefault((node, 0), result)

    def _judge(self, node: GraphNode) -> None:
        if node.parameter is not None:
            self._values[node, 0] = node.parameter
        elif (node, 0) not in self._values and 0 in (size := size_of(node.function)):
            self._values[node, 0] = torch.empty(size, dtype=type_of(node.function))
        elif (node, 0) not in self._values and monotonic() < self._until_s:
            constants = self._constants(node) if node.builtin in ADDITIVE else []
            results = compute(node, self.operands(node), constants)
            if constants:
                self._guessed.add(node)
            for index, value in enumerate(results):
                self._values.setdefault((node, index), value)
            if results and any(producer in self._guessed for producer, _ in node.inputs):
                self._guessed.add(node)
        outputs = self._outputs.get(node, {0}) | ({0} if (node, 0) in self._values else set())
        for index in outputs:
            state = condition(self._values.get((node, index)))
            self._conditions[node, index] = self._inherited(node) if state is Condition.UNKNOWN else state
        if len(self._at_birth) < _MOST_BIRTHS and self._begins(node, outputs):
            self._at_birth[node] = self.operands(node)
        self._release(node)

    def _constants(self, node: GraphNode) -> list[str]:
        """Return the operands without a gradient that a sum or a choice has passed on."""
        if node.builtin not in ADDITIVE | CHOOSING:
            return []
        named = zip(self._names.get(node, ()) or [""] * len(node.inputs), node.inputs, strict=False)
        return [name for name, (producer, _) in named if producer is None and not name.startswith(("mat", "batch"))]

    def _inherited(self, node: GraphNode) -> Condition:
        """Return the condition that follows from the operands for an unknown result."""
        states = {self.get(edge) if edge[0] is not None else Condition.UNKNOWN for edge in node.inputs}  # type: ignore[arg-type]  # checked
        passes = node.builtin in PASSING and not _narrows(node) if states == {Condition.FINITE} else node.builtin in RESHAPING
        return states.pop() if passes and len(states) == 1 else Condition.UNKNOWN

    def _begins(self, node: GraphNode, outputs: Iterable[int]) -> bool:
        """Return whether the node may have produced non-finite values from finite ones."""
        if node.parameter is not None or all(self._conditions[node, index] is Condition.FINITE for index in outputs):
            return False
        return all(edge[0] is None or self.get(edge) is not Condition.BAD for edge in node.inputs)  # type: ignore[arg-type]  # checked

    def _release(self, node: GraphNode) -> None:
        """Drop the values that no later node uses, as the forward pass itself did."""
        for producer in {producer for producer, _ in node.inputs if producer is not None}:
            self._uses[producer] -= 1
            if not self._uses[producer]:
                for index in self._outputs[producer]:
                    self._values.pop((producer, index), None)

    def operands(self, node: GraphNode) -> dict[str, Any]:
        """Return the known values of the node's tensor arguments, by name."""
        if node in self._at_birth:
            return self._at_birth[node]
        values = {name: value for name, value in node.kept.items() if value is not None and name not in RESULTS}
        for name, edge in zip(self._names.get(node, ()), node.inputs, strict=False):
            if name not in values and edge[0] is not None and edge in self._values:
                values[name] = self._values[edge]
        return values

    def get(self, edge: tuple[GraphNode, int]) -> Condition:
        """Return the condition of a node's result."""
        return self._conditions.get(edge, Condition.UNKNOWN)

    def births(self, root: GraphNode) -> Iterator[Birth]:
        """Yield the origins of the non-finite values in the root's result."""
        waiting, visited = [(root, True, None)], {root}
        while waiting:
            node, certain, result = waiting.pop()
            operands = list(self._bad_operands(node, certain=certain))
            yield from operands
            following = self._origins(node)
            if not operands and not following:
                # an operand without a gradient that was not kept: a sum or a choice makes none of finite ones
                chooses = bool(self._constants(node))
                if (node.is_python or node.operator in OPAQUE) and any(producer is None for producer, _ in node.inputs):
                    yield Birth(node, certain=False, operand=self._result(node, result), is_unseen=True)
                else:
                    certain = certain and (not self._may_be_older(node) or self._is_proven(node))
                    yield Birth(node, certain, result if chooses else None, is_constant=chooses)
            for origin, sure in following:
                if origin not in visited:
                    visited.add(origin)
                    waiting.append((origin, certain and sure, self._kept_result(node, origin, result)))

    def _may_be_older(self, node: GraphNode) -> bool:
        """Return whether an operator before the node, of unknown result, may have made what is not finite in its own."""
        before = [producer for producer, index in node.inputs if self._is_unread(producer, index)]
        return any(maker.builtin not in _HARMLESS or _narrows(maker) for maker in self._unread(before))

    def _is_proven(self, node: GraphNode) -> bool:
        """Return whether the operator makes such values of what is left of its operands."""
        return any(condition(value) is Condition.BAD for value in compute(node, self.operands(node)))

    def _kept_result(self, node: GraphNode, producer: GraphNode, before: Any) -> Any:
        """Return the producer's result as the node has kept it, or else a later form of it."""
        for name, edge in zip(self._names.get(node, ()), node.inputs, strict=False):
            if edge[0] is producer and node.kept.get(name) is not None:
                return node.kept[name]
        return before

    def _result(self, node: GraphNode, later: Any) -> Any:
        """Return the node's own result if it has kept it, or else a later form of it."""
        return next((node.kept[name] for name in RESULTS if node.kept.get(name) is not None), later)

    def _bad_operands(self, node: GraphNode, *, certain: bool) -> Iterator[Birth]:
        """Yield operands that are no node's result: the batch, a constant, a parameter."""
        for producer, _ in node.inputs:
            if producer is not None and producer.parameter is not None and (state := self.get((producer, 0))) not in _SOUND:
                yield Birth(node, certain, producer.parameter, is_leaf=True, is_unread=state is Condition.UNKNOWN)
        yield from (Birth(node, certain, value) for value in self._bad_constants(node))

    def _bad_constants(self, node: GraphNode) -> Iterator[Any]:
        """Yield operands without a gradient that are not finite: of the batch, the target of a loss."""
        names = self._names.get(node, ())
        constants = {name for name, (producer, _) in zip(names, node.inputs, strict=False) if producer is None}
        for name, value in node.kept.items():
            is_operand = name in constants or (name in {"target", "weight"} and name not in names)
            if is_operand and value is not None and condition(value) is Condition.BAD:
                yield value

    def _origins(self, node: GraphNode) -> list[tuple[GraphNode, bool]]:
        """Return the nodes that the node's non-finite result comes from, and whether that is certain; none if it began here."""
        edges = [(producer, index) for producer, index in node.inputs if producer is not None and producer.parameter is None]
        bad = [edge for edge in edges if self.get(edge) is Condition.BAD]
        masked = [edge for edge in edges if self.get(edge) is Condition.MASKED]
        unknown = [edge for edge in edges if self.get(edge) is Condition.UNKNOWN]
        if bad or (masked and node.builtin not in MASKABLE):
            return [(producer, True) for producer, _ in bad or masked]
        guessed = [edge for edge in edges if edge[0] in self._guessed]
        if guessed and not unknown and node.builtin not in STRONG:
            return [(producer, True) for producer, _ in guessed]
        if node.builtin in PASSING and unknown:
            return [(producer, len(unknown) == 1) for producer, _ in unknown]
        strong = node.builtin in STRONG
        return [
            (producer, False) for producer, _ in unknown
            if producer.operator in OPAQUE or self._may_begin(producer, only_bad=strong)
        ]  # fmt: skip

    def _may_begin(self, node: GraphNode, *, only_bad: bool) -> bool:
        """Return whether the fault may lie in the nodes before it that have unknown results.

        There is a non-finite value, or (unless ``only_bad``) an operator that makes NaN of finite values.
        """
        for current in self._unread([node]):
            has_names = current.parameter is not None or (self._names.get(current) and not current.is_python)
            if not only_bad and (current.builtin in STRONG or not has_names):
                return True
            odd = {Condition.BAD} if current.builtin in MASKABLE else {Condition.BAD, Condition.MASKED}
            if any(edge[0] is not None and self.get(edge) in odd for edge in current.inputs):  # type: ignore[arg-type]  # checked
                return True
            if any(True for _ in self._bad_constants(current)):
                return True
        return False

    def _is_unread(self, producer: GraphNode | None, index: int) -> bool:
        return producer is not None and (producer in self._guessed or self.get((producer, index)) is Condition.UNKNOWN)

    def _unread(self, waiting: list[Any]) -> Iterator[GraphNode]:
        """Yield these nodes, and those before them that are reached by unknown results alone."""
        visited = set(waiting)
        while waiting:
            current = waiting.pop()
            yield current
            fresh = {producer for producer, index in current.inputs if self._is_unread(producer, index)} - visited
            visited |= fresh
            waiting += fresh


def first_birth(nodes: Sequence[GraphNode], root: GraphNode, *, earliest: bool) -> tuple[Birth, dict[str, Any]]:
    """Return the birth of the root's non-finite result, and the operands of that node by name.

    ``earliest``: the first in the forward pass, even if another one is more certain.
    """
    trace = ForwardTrace(nodes)
    births = list(trace.births(root)) or [Birth(root, certain=False)]

    def rank(birth: Birth) -> tuple[bool, bool, bool, int]:
        passing = not earliest and birth.node.builtin in PASSING
        return birth.is_unread, not (birth.certain or earliest), passing, birth.node.number

    birth = min(births, key=rank)
    return birth, trace.operands(birth.node)


def _narrows(node: GraphNode) -> bool:
    """Return whether it is a cast to float16, in which 65,520 is infinity."""
    return node.builtin == "to_copy" and type_of(node.function) is torch.float16


@lru_cache(maxsize=512)
def overloads(operator: str) -> tuple[Any, ...]:
    """Return the overloads of an aten operator that make new tensors; its name may begin with an underscore."""
    packets = [getattr(torch.ops.aten, name, None) for name in (operator, "_" + operator)]
    every = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
    return tuple(x for x in every if not (x._schema.is_mutable or any(argument.is_out for argument in x._schema.arguments)))


def argument_names(node: GraphNode) -> tuple[str, ...]:
    """Return the argument's name for each input of the node; empty if unknown."""
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
    """Return the overload with the arguments that fit the kept values of the node best."""
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


def compute(node: GraphNode, operands: Mapping[str, Any], stand_ins: Sequence[str] = ()) -> Sequence[Any]:
    """Return the operator's results; empty if they cannot be computed.

    Args:
        node: the node.
        operands: values of tensor arguments, by name.
        stand_ins: constants that were not kept and that change nothing if they are left out, as 0.
    """
    overload = _overload(node)
    if overload is None or torch.Tag.nondeterministic_seeded in overload.tags or any(w in node.operator for w in _NOT_AGAIN):
        return ()
    values: dict[str, Any] = {name: torch.zeros(()) for name in stand_ins}
    values |= {"dtype": type_of(node.function), "size": size_of(node.function), **node.settings(), **operands}  # of a view
    arguments = overload._schema.arguments
    if not all(argument.name in values or argument.has_default_value() for argument in arguments):
        return ()
    try:
        results = node.function._input_metadata  # a small operand may become a large result
        if sum(value.numel() for value in operands.values()) + sum(prod(result.shape) for result in results) > _MOST_ELEMENTS:
            return ()
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            result = overload(**{argument.name: values[argument.name] for argument in arguments if argument.name in values})
            return result if isinstance(result, (tuple, list)) else (result,)
    except (AttributeError, RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):  # its arguments were others
        return ()


def is_mean_of_nothing(node: GraphNode) -> bool:
    """Return whether a mean, or a loss with one, has elements though its operands with a gradient have none: each is NaN."""
    operands = [(producer, index) for producer, index in node.inputs if producer is not None]
    sizes = [x.parameter.shape if x.parameter is not None else size_of(x.function, index) for x, index in operands]
    return bool(sizes) and not any(map(prod, sizes)) and prod(size_of(node.function)) != 0
