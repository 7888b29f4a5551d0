"""Trace a NaN or an infinity of one batch to where it is born."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.debug.call_sites import CallSites, placed
from torchobs.debug.reentrant_checkpoint import checkpoints_kept
from torchobs.debug.statistics import wide
from torchobs.debug.tensors import require_module
from torchobs.debug.value_flow import CONSTANT, UNREADABLE, ValueFlow
from torchobs.probes.nonfinite.backward import BackwardWatch
from torchobs.probes.nonfinite.origin import GraphTracer, NonfiniteOrigin, OriginKind, attributes_of
from torchobs.probes.nonfinite.values import Condition, condition
from torchobs.runtime.session import current
from torchobs.support.collectives import is_shared
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.kept_state import state_kept
from torchobs.support.model_calls import call, is_sequence, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from torchobs.debug.value_flow import Source
    from torchobs.probes.nonfinite.graph import GraphNode

_log = logging.getLogger(__name__)

_WRAPPED = ("_orig_mod", "module")


def trace_nan(model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor] | None = None) -> NonfiniteOrigin | None:
    """Run the forward and the backward pass of one batch and say where its first NaN or infinity is born.

    Nothing stays changed: random states, buffers (the statistics of BatchNorm) and gradients are restored, and no optimizer
    steps. The model's own forward hooks run as in any forward pass. A compiled model is run without the compiler, one within
    ``DistributedDataParallel`` without its wrapper, so that no collective is called; for a sharded one (FSDP) all ranks have
    to call it. Torch's reentrant checkpoints keep what they compute, which takes the memory that they were to spare.

    Args:
        model: in the mode (``train()`` or ``eval()``) that is to be traced.
        batch: what the model is called with: a tensor, a dictionary of keyword arguments, or a tuple of arguments. With
            ``loss_fn`` a tuple's last item is the target.
        loss_fn: called with the output, and with the target if the batch is a tuple; without it the output's own ``loss``, or
            the sum of its elements (of all tensors, however nested), is taken.

    Returns:
        The origin; ``None`` if the loss and all gradients are finite.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: nothing in the model or the batch takes a gradient, the loss is not one number, or it is on the device meta.
    """
    import torch

    require_module(model, "trace_nan")
    for name in _WRAPPED:
        inner = dict(model.named_children()).get(name)
        if inner is not None and (name == "_orig_mod" or type(model).__name__.endswith("DataParallel")):
            model = inner
    with state_kept(model), torch.inference_mode(mode=False), torch.enable_grad():
        sites = CallSites(model)
        flow = ValueFlow(sites)
        try:
            with checkpoints_kept(), sites, flow, torch.compiler.set_stance("force_eager"):
                loss = _loss(model, batch, loss_fn)
        finally:
            sites.remove()
        origin = _traced(model, loss, sites, flow, batch)
    session = current()
    if origin is not None and session is not None and session.context is not None:
        session.context.event(catalog.EVENT_NONFINITE_ORIGIN, attributes_of(origin))
    return origin


def _loss(model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor] | None) -> torch.Tensor:
    target: tuple[Any, ...] = ()
    if is_sequence(batch) and loss_fn is not None and len(batch) > 1:
        *batch, last = batch
        target = (last,)
    output = call(model, batch)
    loss = loss_fn(output, *target) if loss_fn is not None else _summed(output)
    if loss.numel() != 1 or loss.grad_fn is None:
        what = "has no gradient" if loss.grad_fn is None else f"has {loss.numel()} elements"
        raise ValueError(f"the loss {what}: trace_nan() needs one number that parameters have been used for; give loss_fn")
    if loss.is_meta:
        raise ValueError("the loss is on the device meta, where nothing is computed: move model and batch to a real one first")
    return loss


def _summed(output: Any) -> torch.Tensor:
    """Return the output's own loss, or the sum of its floating-point and complex elements, wherever they are nested."""
    import torch

    if isinstance(getattr(output, "loss", None), torch.Tensor):
        own: torch.Tensor = output.loss
        return own
    parts = [torch.view_as_real(x) if x.is_complex() else x for _, x in walk(output)]
    # in float64: the sum of finite numbers is to be finite
    sums = [x.sum(dtype=wide(torch, x.device)) for x in parts if x.is_floating_point()]
    if not sums:
        raise ValueError("the model's output holds no tensor of floating-point numbers: give loss_fn")
    return torch.stack([each.to(sums[0].device) for each in sums]).sum()


def _traced(model: nn.Module, loss: torch.Tensor, sites: CallSites, flow: ValueFlow, batch: Any) -> NonfiniteOrigin | None:
    import torch

    tracer = GraphTracer([loss], [], None, [model], variables=[{"batch": batch}])
    found: list[tuple[GraphNode, NonfiniteOrigin]] = []
    leaves = [node.parameter for node in tracer.nodes if node.parameter is not None and node.parameter.requires_grad]
    if condition(loss) is not Condition.FINITE:
        source = flow.source_of(loss)
        origin = _by_graph(tracer, sites) if source is None else _by_values(source, tracer, sites)
        if leaves and is_shared() and _is_sharded(model):
            _go_along(loss, leaves)
        return origin
    breaker = CircuitBreaker("trace_nan")
    watch = BackwardWatch(tracer.nodes, lambda node: found.append((node, tracer.seen(node))), breaker)
    try:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    finally:
        watch.remove()
    if not found:
        return None
    covered = _covered_up(found[0][0], flow)
    return placed(found[0][1], found[0][0], sites) if covered is None else _by_values(covered, tracer, sites)


def _is_sharded(model: nn.Module) -> bool:
    """Return True if ranks call collectives in a backward pass of the model itself: FSDP of either kind."""
    return any(hasattr(x, "set_requires_gradient_sync") or hasattr(x, "_fsdp_wrapped_module") for x in model.modules())


def _go_along(loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Go backward from a loss that is not finite: ranks whose loss is finite do, and wait for this one there."""
    import torch

    breaker = CircuitBreaker("trace_nan")
    try:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    except Exception as error:  # the user's own backward refuses gradients that are not finite: the origin is known already
        if not breaker.takes(error):
            raise
        _log.warning("trace_nan: the backward pass beside the other ranks raised %s: %s", type(error).__name__, error)


def _covered_up(node: GraphNode, flow: ValueFlow) -> Source | None:
    """Return where an input that is not finite came from, though the forward pass went on with finite numbers.

    Fused attention of torch on the CPU gives zeros for a query of NaN.
    """
    inputs = (value for name, value in node.kept.items() if not name.startswith(("result", "output")))
    sources = (flow.source_of(value) for value in inputs if value is not None and condition(value) is Condition.BAD)
    return next(filter(None, sources), None)


def _by_graph(tracer: GraphTracer, sites: CallSites) -> NonfiniteOrigin | None:
    """Return the origin that the graph of the loss tells."""
    origin = tracer.forward()
    return None if origin is None or tracer.node is None else placed(origin, tracer.node, sites)


def _by_values(source: Source, tracer: GraphTracer, sites: CallSites) -> NonfiniteOrigin | None:
    """Return the origin that was seen while the forward pass ran."""
    import torch

    given, place = source.given, source.place
    if given is not None:
        is_parameter = isinstance(given, torch.nn.Parameter)
        origin = tracer.held(given, source.operator, place, source.inputs, is_leaf=is_parameter)
        if origin is not None and origin.kind == "parameter":  # if most of them are not finite, the step before made them so
            by_graph = _by_graph(tracer, sites)
            return by_graph if by_graph is not None and by_graph.kind == "backward" else origin
        if origin is not None:
            return origin
    kind: OriginKind = "unknown" if source.note == UNREADABLE else "operator"
    return NonfiniteOrigin(
        kind, source.operator, place.module, place.kind, place.line, "", source.inputs, source.elements, None, None,
        source.note if given is None else CONSTANT,
    )  # fmt: skip
