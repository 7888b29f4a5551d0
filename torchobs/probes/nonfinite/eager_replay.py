"""Run a compiled part of a model once more without the compiler, to find the operator within that made a NaN or an infinity.

The graph that Dynamo had made for the call is run as it was (``graph_run``): with its own inputs, its autocast, the parameters
that no optimizer has changed since, and copies of the buffers. No Python code of the user's runs again, and no hook.
For gradients that are not finite its backward pass is run, too, from gradients of the result that are made up: a derivative
that is infinite makes an infinity of any, and NaN of zero.
Nothing is said if an input is gone or was changed, or if the run would have an effect on anything but its own tensors.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from torchobs.probes.nonfinite.backward import LEAST_AGREEMENT, BackwardWatch
from torchobs.probes.nonfinite.captured_graph import ModulePaths
from torchobs.probes.nonfinite.compiled_calls import GoneError
from torchobs.probes.nonfinite.graph_run import SHARE_OF_MEMORY, GivenUp, GraphRun, free_bytes, memory, tensors
from torchobs.probes.nonfinite.operators import COMPILED
from torchobs.probes.nonfinite.origin import UNNAMED, GraphTracer
from torchobs.probes.nonfinite.replay import SitesOfNodes, placed
from torchobs.probes.nonfinite.values import Condition, condition
from torchobs.support import signal_handlers
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.graph_safe import as_if_compiling, dispatch_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from types import FrameType

    from torchobs.probes.core.training_state import TrainingState
    from torchobs.probes.nonfinite.compiled_calls import CompiledCall, CompiledCalls
    from torchobs.probes.nonfinite.graph import GraphNode
    from torchobs.probes.nonfinite.locate import ModuleNames
    from torchobs.probes.nonfinite.origin import NonfiniteOrigin

    Look = Callable[[list[torch.Tensor], SitesOfNodes], NonfiniteOrigin | None]

NOTE = "found by running the compiled part again without the compiler"
LONGEST_S = 5.0
"""For all runs of one trace"""
_MOST_RUNS = 4
"""Calls that are repeated for one trace"""
_ATTEMPTS = 3
"""Where random numbers are drawn, which are others than those of the call"""


class EagerReplay:
    """Finds what a traced graph does not show of its compiled parts."""

    def __init__(self, calls: CompiledCalls, training: TrainingState) -> None:
        self._calls, self._training = calls, training

    def within(self, tracer: GraphTracer, frames: Sequence[FrameType], step: int) -> NonfiniteOrigin | None:
        """Return the origin of a loss whose non-finite values come from a compiled part; ``None`` if it was not found."""
        until_s = monotonic() + LONGEST_S

        def look(outputs: list[torch.Tensor], sites: SitesOfNodes) -> NonfiniteOrigin | None:
            bad = [one for one in outputs if condition(one) is Condition.BAD]
            return _origin(bad, frames, step, tracer, sites) if bad else None

        for each in self._suspects(tracer)[:_MOST_RUNS]:
            found = self._run(each, look, tracer.names, until_s)
            if found is not None or monotonic() > until_s:
                return found
        return None

    def _suspects(self, tracer: GraphTracer) -> list[CompiledCall]:
        """Return the calls that may have made the values, the likeliest first: the last one before any that was given them."""
        suspects: list[CompiledCall] = []
        for each in self._calls.among([node.number for node in tracer.nodes if node.operator == COMPILED]):
            try:
                given = tensors(each.inputs())
            except GoneError:
                given = []
            if any(one.grad_fn is not None and condition(one) is Condition.BAD for one in given):
                break
            suspects.append(each)
        return suspects[::-1]

    def gradients(
        self, bad: Collection[int], names: ModuleNames, frames: Sequence[FrameType], step: int
    ) -> NonfiniteOrigin | None:
        """Return the origin of non-finite gradients of these parameters (ids); ``None`` if it was not found.

        No optimizer must have stepped since. ``names``: of the parameters.
        """
        until_s = monotonic() + LONGEST_S
        likely = [(each, own) for each in self._calls.latest() if not (own := _parameters(each)).isdisjoint(bad)]
        for each, own in likely[:_MOST_RUNS]:  # the first to spoil gradients is the last of those that would

            def look(outputs: list[torch.Tensor], sites: SitesOfNodes, own: set[int] = own) -> NonfiniteOrigin | None:
                return _backward_origin(outputs, own.intersection(bad), frames, step, names, sites)

            found = self._run(each, look, names, until_s)
            if found is not None or monotonic() > until_s:
                return found
        return None

    def _run(self, made: CompiledCall, look: Look, names: ModuleNames, until_s: float) -> NonfiniteOrigin | None:
        """Repeat a call and ``look`` at its outputs, until there is a result, or random numbers are not the reason for none."""
        try:
            inputs = made.inputs()
        except GoneError:
            return None
        buffers = [one for about, one in zip(made.captured.inputs, inputs, strict=True) if about.is_statistic]
        if not all(map(_is_whole, tensors(inputs))) or not _fit(buffers) or dispatch_modes()() or _has_hooks_on_saved_tensors():
            return None
        named = [names.of(one) if isinstance(one, torch.Tensor) else "" for one in inputs]
        paths = ModulePaths(made.captured, named, names.modules)

        def run() -> NonfiniteOrigin | None:
            for _ in range(_ATTEMPTS):
                copies = {id(one): one.detach().clone() for one in buffers}
                names.alias((copies[id(one)], one) for one in buffers)
                once = GraphRun(made.captured, paths, names.modules)
                with once.run(
                    [copies.get(id(one), _cut_off(one)) for one in inputs], set(map(memory, copies.values())), until_s
                ):
                    found = look([one for one in once.outputs if one.grad_fn is not None], once)
                if found is not None or not once.is_random:
                    return found
            return None

        return self._beside_the_training(made, run)

    def _beside_the_training(self, made: CompiledCall, run: Callable[[], NonfiniteOrigin | None]) -> NonfiniteOrigin | None:
        """Call ``run`` so that the training notices nothing of it, whatever it raises."""
        training, backwards = self._training, self._training.backwards

        def unnoticed() -> NonfiniteOrigin | None:
            with ExitStack() as stack:
                enter = stack.enter_context
                enter(torch._C.DisableTorchFunction())  # which a mode of the user's would be called by
                enter(as_if_compiling())
                enter(torch.enable_grad())
                for kind, enabled, dtype in made.captured.autocast:
                    enter(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                return run()

        # for a backward pass within a compiled step, from where Dynamo would go on to compile
        disabled: Callable[[], NonfiniteOrigin | None] = torch.compiler.disable(unnoticed)  # type: ignore[no-untyped-call]
        training.backwards = 1  # a backward pass within is not the training's
        try:
            return disabled()
        except GivenUp:
            return None
        except Exception as error:
            if signal_handlers.raising(error) is not None:
                raise
            return None  # what an operator raises says that something is not as it was
        finally:
            training.backwards = backwards


def _origin(
    outputs: list[torch.Tensor], frames: Sequence[FrameType], step: int, whole: GraphTracer, sites: SitesOfNodes
) -> NonfiniteOrigin | None:
    """Return the origin in the graph of a run's outputs. ``whole``: of the loss."""
    again = GraphTracer(outputs, frames, step, names=whole.names)
    origin = again.forward()
    if origin is None or again.node is None or (origin.kind, origin.parameter) == ("parameter", UNNAMED):
        return None  # the last: what came out of another part of the graph held it
    origin = placed(origin, again.node, sites)
    return replace(origin, note="; ".join(filter(None, (origin.note, NOTE))))


def _backward_origin(
    outputs: list[torch.Tensor], bad: set[int], frames: Sequence[FrameType], step: int, names: ModuleNames, sites: SitesOfNodes,
) -> NonfiniteOrigin | None:  # fmt: skip
    """Return the origin of non-finite gradients of these parameters (ids) in the backward pass of a run's outputs."""
    outputs = [one for one in outputs if one.is_floating_point() and condition(one) is Condition.FINITE]
    tracer = GraphTracer(outputs, frames, step, names=names)
    leaves = [node.parameter for node in tracer.nodes if node.parameter is not None and node.parameter.requires_grad]
    if not outputs or not leaves or any(getattr(leaf, "_backward_hooks", None) for leaf in leaves):
        return None  # the last: hooks of the user's, which autograd.grad runs
    if any(node.parameter is None and node.number < sites.first for node in tracer.nodes):
        return None  # the user's own graph, to which something has led
    found: list[tuple[GraphNode, NonfiniteOrigin]] = []
    watch = BackwardWatch(tracer.nodes, lambda node: found.append((node, tracer.seen(node))), CircuitBreaker("eager_replay"))
    try:
        made: Sequence[Any] = torch.autograd.grad(outputs, leaves, [_made_up(one) for one in outputs], allow_unused=True)
    finally:
        watch.remove()
    spoiled = {id(leaf) for leaf, one in zip(leaves, made, strict=True) if one is not None and condition(one) is Condition.BAD}
    if not found or not spoiled or len(spoiled & bad) < LEAST_AGREEMENT * len(spoiled | bad):
        return None
    node, origin = found[0]
    return replace(placed(origin, node, sites), note=NOTE)


def _made_up(output: torch.Tensor) -> torch.Tensor:
    """Return a gradient without zeros: of as many values as the output has, none of them alike."""
    return torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)


def _parameters(made: CompiledCall) -> set[int]:
    held = zip(made.captured.inputs, made.held, strict=True)
    return {id(one) for about, each in held if about.is_parameter and (one := each()) is not None}


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor whose values are here, on a device whose random state is known."""
    has_values = not tensor.numel() or bool(tensor.untyped_storage().nbytes())
    return type(tensor) in {torch.nn.Parameter, torch.Tensor} and tensor.device.type in {"cpu", "cuda"} and has_values


def _fit(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if there is room for copies of them."""
    sizes = Counter[torch.device]()
    for each in tensors:
        sizes[each.device] += each.untyped_storage().nbytes()
    return all(size < SHARE_OF_MEMORY * free_bytes(device) for device, size in sizes.items())


def _cut_off(value: Any) -> Any:
    """Return an input without the graph that it comes from."""
    return value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def _has_hooks_on_saved_tensors() -> bool:
    """Return True if hooks of the user's would be called with what a run keeps for its backward pass."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    return hooks(True) is not None  # noqa: FBT003  # torch's own signature: whether to ignore that a graph is traced
