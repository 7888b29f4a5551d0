"""``trace_nan``: where the NaN or infinity of one batch is born, by one forward pass under two modes of torch."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import logging
from dataclasses import replace
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs import catalog
from torchobs.debug.operator_watch import UNWRITTEN, user_line
from torchobs.debug.tensors import require
from torchobs.probes.nonfinite.backward import BackwardWatch
from torchobs.probes.nonfinite.forward import MASKABLE, RESHAPING
from torchobs.probes.nonfinite.locate import Place, memory_of
from torchobs.probes.nonfinite.origin import GraphTracer, NonfiniteOrigin, OriginKind, attributes_of
from torchobs.runtime.session import current
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.process_group import is_shared
from torchobs.tensors.batches import walk
from torchobs.tensors.losses import compute_loss
from torchobs.tensors.names import clean
from torchobs.tensors.running import checkpoints_kept, running_modules, state_kept
from torchobs.tensors.statistics import TensorRow, statistics
from torchobs.tensors.values import COMPRESSED, Condition, bad_elements, condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from torchobs.tensors.graph import GraphNode


class CallSites(TorchFunctionMode):
    """Records each call of a torch function, with the running module and the line of the user's code."""

    def __init__(self, running: list[tuple[str, str]]) -> None:
        """``running``: paths and classes of the modules that run now."""
        super().__init__()
        self._sites: list[tuple[int, int, Place]] = []
        """Number of a call's first autograd node, number after its last one, and place of the call"""
        self._running = running

    def find(self, number: int) -> Place | None:
        """Return the innermost call that made the node with this sequence number."""
        fitting = [(last - first, place) for first, last, place in self._sites if first <= number < last]
        return min(fitting, key=itemgetter(0))[1] if fitting else None

    @property
    def here(self) -> Place:
        """The innermost module that runs now, if any, and the line."""
        path, kind = self._running[-1] if self._running else ("", "")
        return Place(clean(path) or kind, kind, user_line())

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = torch._C._autograd._get_sequence_nr
        first = number()
        result = function(*args, **(kwargs or {}))
        if number() > first:
            self._sites.append((first, number(), self.here))
        return result


def placed(origin: NonfiniteOrigin, node: GraphNode, sites: CallSites) -> NonfiniteOrigin:
    """Return the origin with the module and the line of the call that made the node."""
    place = sites.find(node.number)
    if place is None or origin.kind == "parameter":
        return origin
    return replace(origin, module=place.module, module_class=place.kind, line=place.line)


CONSTANT = "an operand is a constant that is not finite"
UNREADABLE = "not all inputs of this operator can be read: it may have been given them, or have made them"
"""A sentence that follows; inputs that are nested tensors, for example"""
_ALL_MASKED = "a row in which everything is masked (negative infinity) gives NaN"
_ATTENTION = "scaled_dot_product"
_PARTS = frozenset({
    "select", "slice", "narrow", "expand", "unbind", "split", "split_with_sizes", "chunk", "as_strided", "diagonal", "unfold",
    "lift_fresh",
})  # fmt: skip
"""Besides ``RESHAPING``, operators that return a part of their input"""
_RUNNING = ("running_mean", "running_var")
_MOST_INPUTS = 6


class Source(NamedTuple):
    """Where values that are not finite came from."""

    order: int
    """Number of the operator in the forward pass; 0 if the values existed before it"""
    operator: str
    """The operator that made them, or the first one that used them"""
    place: Place
    tensor: Any
    """The tensor that had them before the forward pass; ``None`` if the operator made them"""
    inputs: tuple[TensorRow, ...]
    elements: tuple[tuple[int, ...], ...]
    """Indices in the result, if the operator made them"""
    note: str


class _Input(NamedTuple):
    """An operand of an operator, and the condition of its values before the operator ran."""

    name: str
    tensor: Any
    condition: Condition
    is_overwritten: bool


class ValueFlow(TorchDispatchMode):
    """Records the :class:`Source` of every tensor that is not finite, by its memory. It waits for a device at each operator."""

    supports_higher_order_operators = True

    def __init__(self, sites: CallSites) -> None:
        """``sites``: has the running module and the user's line."""
        super().__init__()
        self._sites, self._number = sites, 0
        self._sources: dict[int, Source] = {}

    def source_of(self, tensor: Any) -> Source | None:
        """Return the source of a tensor that is not finite; ``None`` if no operator has written it."""
        return self._sources.get(memory_of(tensor) or -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and check its results."""
        kwargs = kwargs or {}
        self._number += 1
        name = _name(func)
        written = [(path, x) for path, x, is_written in _arguments(func, args, kwargs) if is_written]
        overwritten = [_Input(path, x, self._condition_before(x), is_overwritten=True) for path, x in written]
        result = func(*args, **kwargs)
        outputs = [_stored(x) for _, x in walk(result)]
        results = outputs[:1] if name.startswith(_ATTENTION) else outputs  # the others serve its derivative alone
        for x in {id(x): x for x in [*results, *(x for _, x in written)]}.values():
            if name in UNWRITTEN or _condition(x) is not Condition.FINITE:
                self._record_source(name, x, func, (args, kwargs), overwritten)
            elif not written and not getattr(func, "is_view", False):  # memory that was freed may be used again
                self._sources.pop(memory_of(x), None)
        return result

    def _condition_before(self, x: Any) -> Condition:
        """Return the condition of a tensor that is about to be overwritten; finite if it was never written."""
        source = self.source_of(x)
        return Condition.FINITE if source is not None and source.operator in UNWRITTEN else _condition(x)

    def _record_source(self, name: str, result: Any, func: Any, arguments: Any, overwritten: list[_Input]) -> None:
        key = memory_of(result)
        if not key:
            return
        args, kwargs = arguments
        inputs = overwritten + [
            _Input(path, x, _condition(x), is_overwritten=False)
            for path, x, is_written in _arguments(func, args, kwargs) if not is_written
        ]  # fmt: skip
        sources = [self._trace_input(operand.tensor, name, inputs) for operand in _culprits(name, result, inputs)]
        if sources:
            self._sources[key] = min(sources, key=lambda source: source.order)
            return
        note = _ALL_MASKED if any(operand.condition is Condition.MASKED for operand in inputs) else ""
        note = CONSTANT if any(isinstance(x, float) and not isfinite(x) for x in [*args, *kwargs.values()]) else note
        note = UNREADABLE if any(operand.condition is Condition.UNKNOWN for operand in inputs) else note
        elements = bad_elements(result)
        self._sources[key] = Source(self._number, name, self._sites.here, None, _describe_inputs(inputs), elements, note)

    def _trace_input(self, x: Any, name: str, inputs: list[_Input]) -> Source:
        """Return the source of an input that is not finite; for values older than the forward pass, their first use."""
        source = self.source_of(x)
        if source is None or (source.tensor is not None and source.operator in RESHAPING | _PARTS):
            tensor = x if source is None else source.tensor
            return Source(0, name, self._sites.here, tensor, _describe_inputs(inputs), (), "")
        return source


def _describe_inputs(inputs: list[_Input]) -> tuple[TensorRow, ...]:
    rows = (statistics(operand.name, operand.tensor) for operand in inputs if not operand.is_overwritten)
    return tuple(row for row in rows if row is not None)[:_MOST_INPUTS]


def _culprits(name: str, result: Any, inputs: list[_Input]) -> list[_Input]:
    """Return the inputs that made the result not finite."""
    if name in UNWRITTEN:
        return []
    bad = [operand for operand in inputs if operand.condition is Condition.BAD]
    masked = [operand for operand in inputs if operand.condition is Condition.MASKED]
    makes_nan = (name in MASKABLE or name.startswith(_ATTENTION)) and _condition(result) is not Condition.MASKED
    return bad or ([] if makes_nan else masked)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and value of each tensor argument, and whether the operator writes to it."""
    schema = getattr(func, "_schema", None)
    declared = list(schema.arguments) if schema is not None else []
    by_name = {argument.name: argument for argument in declared}
    values = {argument.name: value for argument, value in zip(declared, args, strict=False)} | kwargs
    # batch normalisation in training writes its running statistics, and computes with the batch's own
    unread = _RUNNING if values.get("training", _name(func) == "batch_norm_with_update") else ()
    pairs = [(declared[place] if place < len(declared) else None, str(place), value) for place, value in enumerate(args)]
    pairs += [(by_name.get(name), name, value) for name, value in kwargs.items()]
    for argument, name, value in pairs:
        if argument is not None and argument.name in unread:
            continue
        is_written = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        for path, x in walk(value, name if argument is None else argument.name):
            yield path, _stored(x), is_written


def _stored(x: Any) -> Any:
    """Return the tensor that is checked: for a sparse one, its stored elements."""
    if x.layout == torch.sparse_coo:
        return x.detach()._values()  # values() needs a coalesced one
    return x.detach().values() if x.layout in COMPRESSED else x


def _name(func: Any) -> str:
    """Return an operator's name, as nodes of the graph spell it."""
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", packet)).strip("_")


def _condition(x: Any) -> Condition:
    """Return the condition of a tensor's values; integers are finite."""
    return condition(x) if x.is_floating_point() or x.is_complex() else Condition.FINITE


_log = logging.getLogger(__name__)

_WRAPPED = ("_orig_mod", "module")


def trace_nan(model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor] | None = None) -> NonfiniteOrigin | None:
    """Run the forward and the backward pass of one batch and say where its first NaN or infinity is born.

    Random states, buffers (the statistics of BatchNorm) and gradients are restored, and no optimizer steps. The model's own
    forward hooks run as in any forward pass. A compiled model runs without the compiler, one in ``DistributedDataParallel``
    without its wrapper, so that no collective is called; for a sharded one (FSDP) all ranks have to call it. Torch's reentrant
    checkpoints keep what they compute here, and save no memory.

    Args:
        model: the module, in the mode (``train()`` or ``eval()``) to be traced.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments; the last may be the target for ``loss_fn``.
        loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(output, target)``; without it the output's own ``loss``, or the sum of
            its tensors.

    Returns:
        The origin; ``None`` if the loss and all gradients are finite.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: nothing in model or batch requires a gradient, the loss is not one number, or it is on the device meta.
    """
    require(model, "nn.Module", "trace_nan")
    for name in _WRAPPED:
        inner = dict(model.named_children()).get(name)
        if inner is not None and (name == "_orig_mod" or type(model).__name__.endswith("DataParallel")):
            model = inner
    with state_kept(model), torch.inference_mode(mode=False), torch.enable_grad():
        with running_modules(model) as running:
            sites = CallSites(running)
            flow = ValueFlow(sites)
            with checkpoints_kept(), sites, flow, torch.compiler.set_stance("force_eager"):
                loss: Any = compute_loss(model, batch, loss_fn)
        if loss is None or loss.numel() != 1 or loss.grad_fn is None:
            what = "there is no loss" if loss is None else "the loss has no gradient, or more than one element"
            raise ValueError(f"{what}: trace_nan() needs one number that parameters have been used for; give loss_fn")
        if loss.is_meta:
            raise ValueError("the loss is on the device meta, where nothing is computed: move model and batch first")
        origin = _find_origin(model, loss, sites, flow, batch)
    session = current()
    if origin is not None and session is not None and session.context is not None:
        session.context.event(catalog.EVENT_NONFINITE_ORIGIN, attributes_of(origin))
    return origin


def _find_origin(model: nn.Module, loss: torch.Tensor, sites: CallSites, flow: ValueFlow, batch: Any) -> NonfiniteOrigin | None:
    tracer = GraphTracer([loss], [], None, [model], variables=[{"batch": batch}])
    births: list[tuple[GraphNode, NonfiniteOrigin]] = []
    leaves = [node.parameter for node in tracer.nodes if node.parameter is not None and node.parameter.requires_grad]
    if condition(loss) is not Condition.FINITE:
        source = flow.source_of(loss)
        origin = _origin_by_graph(tracer, sites) if source is None else _origin_by_values(source, tracer, sites)
        # FSDP of either kind calls collectives in the model's own backward pass
        sharded = ("set_requires_gradient_sync", "_fsdp_wrapped_module")
        if leaves and is_shared() and any(hasattr(x, name) for x in model.modules() for name in sharded):
            _join_backward(loss, leaves)
        return origin
    breaker = CircuitBreaker("trace_nan")
    watch = BackwardWatch(tracer.nodes, lambda node: births.append((node, tracer.node_origin(node))), breaker)
    try:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    finally:
        watch.remove()
    if not births:
        return None
    hidden = _hidden_source(births[0][0], flow)
    return placed(births[0][1], births[0][0], sites) if hidden is None else _origin_by_values(hidden, tracer, sites)


def _join_backward(loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Run the backward pass of a loss that is not finite, since ranks with a finite loss wait for this one there."""
    breaker = CircuitBreaker("trace_nan")
    try:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    except Exception as error:  # the user's own backward may refuse such gradients: the origin is found already
        if not breaker.takes(error):
            raise
        _log.warning("trace_nan: the backward pass beside the other ranks raised %s: %s", type(error).__name__, error)


def _hidden_source(node: GraphNode, flow: ValueFlow) -> Source | None:
    """Return the source of an input that is not finite although the operator's result was finite.

    Torch's fused attention on the CPU gives zeros for a query of NaN.
    """
    inputs = (value for name, value in node.kept.items() if not name.startswith(("result", "output")))
    sources = (flow.source_of(value) for value in inputs if value is not None and condition(value) is Condition.BAD)
    return next(filter(None, sources), None)


def _origin_by_graph(tracer: GraphTracer, sites: CallSites) -> NonfiniteOrigin | None:
    """Return the origin by the graph of the loss."""
    origin = tracer.forward(of_step=False)
    return None if origin is None or tracer.node is None else placed(origin, tracer.node, sites)


def _origin_by_values(source: Source, tracer: GraphTracer, sites: CallSites) -> NonfiniteOrigin | None:
    """Return the origin by the values of the forward pass."""
    tensor, place = source.tensor, source.place
    if tensor is not None:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        origin = tracer.tensor_origin(tensor, source.operator, place, source.inputs, is_leaf=is_parameter)
        if origin is not None and origin.kind == "parameter":  # if most of them are not finite, the step before made them so
            by_graph = _origin_by_graph(tracer, sites)
            return by_graph if by_graph is not None and by_graph.kind == "backward" else origin
        if origin is not None:
            return origin
    kind: OriginKind = "unknown" if source.note == UNREADABLE else "operator"
    return NonfiniteOrigin(
        kind, source.operator, place.module, place.kind, place.line, "", source.inputs, source.elements, None, None,
        source.note if tensor is None else CONSTANT,
    )  # fmt: skip
