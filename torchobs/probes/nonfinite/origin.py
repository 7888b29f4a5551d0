"""The origin of a value that is not finite, by the graph of a loss and the weights, and why an operator produced it.

A float16 is at most 65504, and a gradient may be larger though the loss itself fits. A loss scaler skips such steps
(Micikevicius et al. 2018, section 3.2). Without one the optimizer steps with infinity, and the next loss is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchobs.catalog.findings import OTHER_RANKS, origin_of
from torchobs.probes.nonfinite.backward import bad_gradients, likely_node
from torchobs.probes.nonfinite.forward import STRONG, Birth, first_birth, is_mean_of_nothing
from torchobs.probes.nonfinite.locate import Locator, ModuleNames, Place, is_users, locals_of, memory_of
from torchobs.support.process_group import is_shared
from torchobs.support.result import Result
from torchobs.tensors.graph import OPAQUE, GraphNode, read_graph, type_of
from torchobs.tensors.statistics import TensorRow, statistics
from torchobs.tensors.values import Condition, bad_elements, condition, explains, is_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType

OriginKind = Literal["input", "parameter", "operator", "backward", "overflow", "unknown"]
UNSEEN = "not all inputs of this function were seen: it may have been given them, or have made them"
"""Reason for a function written in Python"""
UNREAD = "what went into it was not kept, and may have held it already"
LATER = "or a later one"
"""Reason for a compiled region that leads to another one: its results are unknown"""
UNNAMED = "unnamed"
"""A parameter that neither a module nor a variable holds"""
_MOST_INPUTS = 6
_MOST_NAMED = 8
_MOST_ITEMS = 64
SHARE_OF_STEP = 2
"""So many parameters, or more, are the result of a step with bad gradients, not one bad weight"""
MASKED_ROW = (
    "a whole row of its result is NaN: every value of the row was masked (negative infinity: a sequence that is padding "
    "alone), or a value was infinite or NaN already"
)
BEYOND_FLOAT16 = "its result is beyond 65,504, the largest number in float16"
BY_ZERO = "it divides by 0"
CAST = "in float16 numbers beyond 65,504 are infinite"
OVER_NOTHING = "it is over nothing, since the batch, or what was selected of it, is empty, and the mean over none is NaN"
NAME = "{name}"
_MEAN = 1
"""``reduction`` of a loss"""


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin(Result):
    """Where a NaN or an infinity first appeared."""

    kind: OriginKind
    """``input``: the batch held it; ``parameter``: a weight did already; ``operator``: the forward pass produced it;
    ``backward``: a derivative did, of a finite loss; ``overflow``: its gradients did not fit into float16; ``unknown``"""
    operator: str
    """The operator that produced it, or got it"""
    module: str
    """Path of the module that called the operator; empty outside of any module"""
    module_class: str
    line: str
    """``file:line`` of the user's code"""
    parameter: str
    """Name of the parameter or buffer, or of the variable that holds the input"""
    inputs: tuple[TensorRow, ...]
    """Statistics of the operator's known inputs"""
    elements: tuple[tuple[int, ...], ...]
    """Indices of the first non-finite elements of the input, parameter or result"""
    sample: int | None
    """Index of the sample in the batch, for an input"""
    step: int | None
    note: str

    def sentence(self) -> str:
        """Return the finding in words."""
        return origin_of(attributes_of(self)).long


def attributes_of(origin: NonfiniteOrigin) -> dict[str, Any]:
    """Return the attributes of the event: names, places and numbers, no data of the user's."""
    attributes: dict[str, Any] = {
        "origin": origin.kind, "operator": origin.operator, "module": origin.module, "parameter": origin.parameter,
        "location": origin.line, "note": origin.note,
    }  # fmt: skip
    attributes = {name: value for name, value in attributes.items() if value}
    if origin.sample is not None:
        attributes["sample"] = origin.sample
    if origin.elements:
        attributes["element"] = list(origin.elements[0])
    inputs = [
        f"{row.name} {list(row.shape)} {row.dtype}: {_range(row)}, {row.nan_count} NaN,"
        f" {row.inf_count} inf, {row.zero_count} zeros" for row in origin.inputs
    ]  # fmt: skip
    return attributes | ({"inputs": inputs} if inputs else {})


def _range(row: TensorRow) -> str:
    return "nothing finite" if row.min is None or row.max is None else f"{row.min:.4g} to {row.max:.4g}"


def from_overflow(bad: Sequence[Any], models: Iterable[Any], step: int) -> NonfiniteOrigin:
    """Return the origin if an overflow in float16 made these parameters or their gradients non-finite."""
    return replace(of_parameters(bad, models, step), kind="overflow", elements=())


def of_parameters(bad: Sequence[Any], models: Iterable[Any], step: int) -> NonfiniteOrigin:
    """Return the origin for parameters that are not finite and have no graph left."""
    names = ModuleNames(bad, models)
    name = names.name_of(bad[0]) or UNNAMED
    module = names.owner(name)
    kind = type(names.modules[module]).__name__ if module in names.modules else ""
    several = len(bad) > 1  # an optimizer made them of gradients that are gone
    note = f"and {len(bad) - 1} more" if several else ""
    origin: OriginKind = "unknown" if several else "parameter"
    return NonfiniteOrigin(origin, "", module, kind, "", name, (), bad_elements(bad[0]), None, step, note)


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's code from this one on, innermost first."""
    frames = []
    while frame is not None:
        if is_users(frame.f_code):
            frames.append(frame)
        frame = frame.f_back
    return frames[:_MOST_NAMED]


class GraphTracer:
    """Traces non-finite values in the graph of one loss. Reads only; nothing is run again."""

    def __init__(
        self, losses: Iterable[Any], frames: Sequence[FrameType], step: int | None, models: Iterable[Any] = (),
        others: Iterable[Any] = (), variables: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """``models``: the known ones. ``others``: parameters of other models that are trained.

        ``variables``: where to look for an input, instead of the variables of the functions that run.
        """
        losses = [loss for loss in losses if getattr(loss, "grad_fn", None) is not None]
        self.nodes = read_graph(loss.grad_fn for loss in losses)
        self._frames, self._step, self._variables = frames, step, variables
        parameters = [node.parameter for node in self.nodes if node.parameter is not None]
        self.names = ModuleNames([*parameters, *others], models)
        self.locator = Locator(self.nodes, self.names, frames)
        self.node: GraphNode | None = None
        """Of the origin"""
        by_function = {node.function: node for node in self.nodes}
        self._root = next((by_function[loss.grad_fn] for loss in losses if condition(loss) is not Condition.FINITE), None)

    def forward(self, *, earliest: bool = False, of_step: bool = True) -> NonfiniteOrigin | None:
        """Return the origin of a loss that is not finite; ``None`` without one that has a graph.

        ``earliest``: parameters are known to be what an optimizer made of an earlier loss; what came first is the cause.
        ``of_step``: parameters may be what the last step made of gradients in the same graph, for the caller to judge.
        """
        if self._root is None:
            return None
        birth, operands = first_birth(self.nodes, self._root, earliest=earliest)
        node = birth.node
        self.node = self._user_of(node)
        bad = {
            id(n.parameter) for n in self.nodes if n.parameter is not None and condition(n.parameter) is not Condition.FINITE
        }
        if birth.is_leaf and of_step and not earliest and len(bad) >= SHARE_OF_STEP:
            likely = likely_node(self.nodes, bad)
            if likely is not None:
                return self._backward(likely, f"{len(bad)} parameters are not finite since the last step")
        place, inputs = self.locator.place(self.node), _described(operands)
        if birth.is_unseen:
            return self._through_python(birth, place, inputs)
        if birth.operand is not None or birth.is_constant:
            return self._operand(birth.operand, self.node, place, inputs, is_leaf=birth.is_leaf)
        if node.operator in OPAQUE:
            return self._within(node, place)
        origin = self._origin("operator" if birth.certain else "unknown", node, place, inputs, UNREAD)
        return self._explained(origin, node) if birth.certain else origin

    def _explained(self, origin: NonfiniteOrigin, node: GraphNode) -> NonfiniteOrigin:
        """Return the origin with the reason why the operator produced such values, and the variable that explains it."""
        words, name = cause_of(node), ""
        if NAME in words and (memory := memory_of(node.kept.get("target"))):
            name = next((path for path, item in self._named_variables() if memory_of(item) == memory), "")
        return replace(origin, note=words.replace(NAME, f" ({name})" if name else ""), parameter=name)

    def _user_of(self, node: GraphNode) -> GraphNode:
        """Return the operator that a cast, or a view of a parameter, leads to."""
        users = [n for n in self.nodes if any(producer is node for producer, _ in n.inputs)]
        is_passed = self.locator.is_preparation(node) or node.builtin == "to_copy"
        return self._user_of(users[0]) if is_passed and users else node

    def gradients(self, bad: set[int]) -> NonfiniteOrigin | None:
        """Return the origin of non-finite gradients of these parameters (ids), of a finite loss."""
        node = likely_node(self.nodes, bad)
        if node is None:
            return None
        if is_shared():
            return self._origin("unknown", node, self.locator.place(node), (), OTHER_RANKS)
        return self._backward(node, "from the graph's structure: the values were freed by the backward")

    def release(self) -> None:
        """Drop the kept values, so that the backward pass frees them as usual."""
        for node in self.nodes:
            node.kept = {}

    def node_origin(self, node: GraphNode) -> NonfiniteOrigin:
        """Return the origin for a node that produced a non-finite gradient; its kept values are still there."""
        node.take_kept()
        return self._backward(node, "")

    def _backward(self, node: GraphNode, note: str) -> NonfiniteOrigin:
        return self._origin("backward", node, self.locator.place(node), _described(node.kept), note)

    def _origin(
        self, kind: OriginKind, node: GraphNode, place: Place, inputs: tuple[TensorRow, ...], note: str
    ) -> NonfiniteOrigin:
        result = next((v for name, v in node.kept.items() if name.startswith(("result", "output")) and v is not None), None)
        elements = bad_elements(result) if result is not None else ()
        return NonfiniteOrigin(
            kind, node.operator, place.module, place.kind, place.line, "", inputs, elements, None, self._step, note
        )

    def _through_python(self, birth: Birth, place: Place, inputs: tuple[TensorRow, ...]) -> NonfiniteOrigin:
        """Return the origin for values from a function written in Python that has some inputs without a gradient.

        A variable with bad values in the same samples was one of these; else the function's inputs are unknown.
        """
        node = birth.node
        variables = (item for _, item in self._named_variables() if condition(item) is Condition.BAD)
        item = next((item for item in variables if explains(item, birth.operand)), None)
        if item is not None:
            return self._operand(item, node, place, inputs, is_leaf=False)
        return self._within(node, place) if node.operator in OPAQUE else self._origin("unknown", node, place, inputs, UNSEEN)

    def _within(self, node: GraphNode, place: Place) -> NonfiniteOrigin:
        """Return the origin for values from within a compiled or checkpointed region, which is not in the graph."""
        later = any(other.operator in OPAQUE and other.number > node.number for other in self.nodes)
        return self._origin("unknown", node, place, (), LATER if later else "")

    def _named_variables(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors without a graph that variables hold, by their names."""
        for scope in self._variables if self._variables is not None else map(locals_of, self._frames):
            for name, value in scope.items():
                yield from _tensors(name, value)

    def _operand(
        self, tensor: Any, node: GraphNode, place: Place, inputs: tuple[TensorRow, ...], *, is_leaf: bool
    ) -> NonfiniteOrigin:
        """Return the origin for a tensor that was not finite before the first operator used it."""
        if tensor is None:
            return self._origin("input", node, place, inputs, "")
        origin = self.tensor_origin(tensor, node.operator, place, inputs, is_leaf=is_leaf)
        return origin or self._origin("operator", node, place, inputs, "an operand is a constant that is not finite")

    def tensor_origin(
        self, tensor: Any, operator: str, place: Place, inputs: tuple[TensorRow, ...], *, is_leaf: bool
    ) -> NonfiniteOrigin | None:
        """Return the origin for a tensor that held the values before this operator; ``None`` for a number in the code."""
        name = self.names.name_of(tensor)
        if name or is_leaf:
            module = self.names.owner(name)
            kind = type(self.names.modules[module]).__name__ if module in self.names.modules else ""
            # one that belongs to no module, as of a stacked ensemble (``torch.func``), may be a variable
            name = name or next((path for path, item in self._named_variables() if item is tensor), UNNAMED)
            return NonfiniteOrigin(
                "parameter", operator, module, kind, place.line, name, inputs, bad_elements(tensor), None, self._step, "",
            )  # fmt: skip
        name, whole = _variable(tensor, self._named_variables())
        if not name and not whole.dim():
            return None
        is_cast = tensor.dtype is torch.float16 and not bool(tensor.isnan().any()) and (not name or is_finite(whole))
        elements = bad_elements(tensor if is_cast else whole)
        sample = elements[0][0] if elements and elements[0] else None
        return NonfiniteOrigin(
            "input", operator, place.module, place.kind, place.line, name, inputs, elements, sample, self._step,
            CAST if is_cast else "",
        )  # fmt: skip


def _described(operands: dict[str, Any]) -> tuple[TensorRow, ...]:
    described = [statistics(name, value) for name, value in operands.items() if value is not None]
    return tuple(row for row in described if row is not None)[:_MOST_INPUTS]


def _variable(tensor: Any, variables: Iterable[tuple[str, Any]]) -> tuple[str, Any]:
    """Return the variable that holds this tensor, or the first one with values that are not finite; else only the tensor."""
    candidates = list(variables)
    whole = tensor._base if getattr(tensor, "_base", None) is not None else tensor
    pointer = memory_of(whole)
    for path, item in candidates:
        if item is whole or (pointer and memory_of(item) == pointer):
            return path, item
    bad = [(path, item) for path, item in candidates if condition(item) is Condition.BAD]  # before it was copied, or cast
    if not bad and tensor.dtype is torch.float16:
        casts = ((path, item) for path, item in candidates if item.is_floating_point() and item.numel() == tensor.numel())
        bad = [(path, item) for path, item in casts if not is_finite(item.half())]
    return next(iter(bad), ("", whole))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors without a graph that a variable is or holds, by name: in a list, a dictionary, or a list of those."""
    for path, item in _items(name, value):
        for inner, tensor in _items(path, item) if type(item) is dict and item is not value else ((path, item),):
            plain = isinstance(tensor, torch.Tensor) and tensor.grad_fn is None and tensor.layout == torch.strided
            if plain and not tensor.is_meta:
                yield inner, tensor


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in {list, tuple}:
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value[:_MOST_ITEMS]))
    elif isinstance(value, dict):
        if len(value) <= _MOST_ITEMS:  # a batch, not a state
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    else:
        yield name, value


def computes_in_float16(parameters: Iterable[Any], nodes: Iterable[GraphNode] = ()) -> bool:
    """Return whether parameters are float16, or results in the graph are, as under autocast."""
    return torch.float16 in {*(parameter.dtype for parameter in parameters), *(type_of(node.function) for node in nodes)}


def gradients_were_finite(bad: Sequence[Any], optimizers: Iterable[Any]) -> bool | None:
    """Return whether the gradients of these parameters were finite, by the state of an optimizer, or by those that remain.

    ``None`` if nothing is: plain SGD keeps nothing, and its weights may have become what they are after the step.
    """
    optimizers = list(optimizers)
    kept = [values for parameter in bad for optimizer in optimizers if (values := _kept_of(optimizer, parameter))]
    if any(all(map(is_finite, values)) for values in kept):
        return True
    return False if kept or bad_gradients(bad) else None


def _kept_of(optimizer: Any, parameter: Any) -> list[Any]:
    state = optimizer.state.get(parameter)
    values = list(state.values()) if isinstance(state, dict) else []
    return [value for value in values if isinstance(value, torch.Tensor) and value.shape == parameter.shape]


def cause_of(node: GraphNode) -> str:
    """Return why an operator produced NaN from finite operands; empty if unseen. :data:`NAME` is the variable's place."""
    if node.builtin.startswith("nll_loss") and (words := _ignored_targets(node)):
        return words
    if node.builtin in {"softmax", "log_softmax"}:
        return MASKED_ROW if _has_masked_row(node) else ""
    if node.builtin == "div" and (divisor := node.kept.get("other")) is not None and not bool(divisor.all()):
        return BY_ZERO
    if type_of(node.function) is torch.float16 and node.builtin not in STRONG:
        return BEYOND_FLOAT16
    return OVER_NOTHING if is_mean_of_nothing(node) else ""


def _ignored_targets(node: GraphNode) -> str:
    target, settings = node.kept.get("target"), node.settings()
    ignored = settings.get("ignore_index")
    if target is None or not target.numel() or settings.get("reduction") != _MEAN or bool((target != ignored).any()):
        return ""
    return (
        f"all {target.numel():,} targets of the batch{NAME} are ignored (ignore_index={ignored}), and the mean over none is NaN"
    )


def _has_masked_row(node: GraphNode) -> bool:
    """Return whether a whole row of a softmax is NaN. The search has found its operand without NaN."""
    result = node.kept.get("result")
    return result is not None and bool(result.dim()) and bool(result.isnan().all(node.settings().get("dim", -1)).any())
