"""Run a compiled part of a model once more without the compiler, to find the operator within that made a NaN or an infinity.

The compiled call is repeated as it was: its own arguments, its autocast, the parameters that no optimizer has changed since;
but with a copy of the module (``module_copies``), so that nobody who uses the module meanwhile, in whichever thread, notices.
For gradients that are not finite its backward pass is run, too, from gradients of the result that are made up: a derivative
that is infinite makes an infinity of any, and NaN of zero.
Nothing of the user's changes: random states are put back, hooks of the user's do not run, no step, loss or value is recorded.
The run is given up, and nothing is said, if an argument is gone or was changed, if the module holds what cannot be copied, or
as soon as it would write to a tensor that was there before, call a collective, or take too long or too much memory.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.probes.nonfinite.backward import LEAST_AGREEMENT, BackwardWatch
from torchobs.probes.nonfinite.compiled_calls import GoneError
from torchobs.probes.nonfinite.operators import COMPILED
from torchobs.probes.nonfinite.origin import GraphTracer
from torchobs.probes.nonfinite.replay import CallSites, placed
from torchobs.probes.nonfinite.values import Condition, condition
from torchobs.support import cgroup, signal_handlers
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.graph_safe import as_if_compiling
from torchobs.support.kept_state import random_states_kept
from torchobs.support.module_copies import ModuleCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import FrameType

    from torch import nn

    from torchobs.probes.core.training_state import TrainingState
    from torchobs.probes.nonfinite.compiled_calls import CompiledCall, CompiledCalls
    from torchobs.probes.nonfinite.graph import GraphNode
    from torchobs.probes.nonfinite.locate import ModuleNames
    from torchobs.probes.nonfinite.origin import NonfiniteOrigin

NOTE = "found by running the compiled part again without the compiler"
LONGEST_S = 5.0
"""For all runs of one trace"""
_SHARE_OF_MEMORY = 0.5
"""Of what is free: a run may make tensors of this size in all"""
_MOST_RUNS = 4
"""Calls that are repeated for one trace"""
_ATTEMPTS = 3
"""Where random numbers are drawn, which are others than those of the call"""
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor", "fsdp")
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"})
"""Classes whose forward pass prepares their backward pass"""
_MOST_OUTPUTS = 64


class _GivenUp(BaseException):
    """Ends a run. Not an ``Exception``, which a model's own code may catch."""


class _Bounds(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Ends a run before an operator that must not run, and after one that was too large."""

    def __init__(self, writable: set[int], until_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._own, self._until_s = {0} | writable, until_s
        self._left: dict[torch.device, float] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if monotonic() > self._until_s or function.namespace in _COLLECTIVES:
            raise _GivenUp
        schema = function._schema
        if schema.is_mutable:
            for place, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else keywords.get(argument.name)
                    if not all(_memory(each) in self._own for each in _tensors(value)):
                        raise _GivenUp
        result = function(*args, **keywords)
        given = {_memory(each) for each in _tensors([args, keywords])}
        for each in _tensors(result):
            if (key := _memory(each)) not in given and key not in self._own:
                self._own.add(key)
                self._spend(each)
        return result

    def _spend(self, tensor: torch.Tensor) -> None:
        left = self._left.get(tensor.device)
        left = _free_bytes(tensor.device) * _SHARE_OF_MEMORY if left is None else left
        self._left[tensor.device] = left = left - tensor.untyped_storage().nbytes()
        if left < 0:
            raise _GivenUp


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    import psutil  # needed nowhere else here

    groups = cgroup.of_process("memory")
    tightest = cgroup.tightest(groups) if groups is not None else None
    left = tightest[1].left if tightest is not None else None
    available = float(psutil.virtual_memory().available)
    return available if left is None else min(available, float(left))


class EagerReplay:
    """Finds what a traced graph does not show of its compiled parts."""

    def __init__(self, calls: CompiledCalls, training: TrainingState) -> None:
        self._calls, self._training = calls, training

    def within(self, tracer: GraphTracer, frames: Sequence[FrameType], step: int) -> NonfiniteOrigin | None:
        """Return the origin of a loss whose non-finite values come from a compiled part; ``None`` if it was not found."""
        until_s = monotonic() + LONGEST_S
        for each in self._suspects(tracer)[:_MOST_RUNS]:
            found = self._trace(each, tracer, frames, step, until_s)
            if found is not None or monotonic() > until_s:
                return found
        return None

    def _suspects(self, tracer: GraphTracer) -> list[CompiledCall]:
        """Return the calls that may have made the values, the likeliest first: the last one before any that was given them."""
        suspects: list[CompiledCall] = []
        for each in self._calls.among([node.number for node in tracer.nodes if node.operator == COMPILED]):
            try:
                given = _tensors(each.inputs())
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
        likely = [
            (each, own) for each in self._calls.latest()
            if not (own := {id(one) for one in _parameters(_uncompiled(each.module()))}).isdisjoint(bad)
        ]  # fmt: skip
        for each, own in likely[:_MOST_RUNS]:  # the first to spoil gradients is the last of those that would

            def look(outputs: list[torch.Tensor], sites: CallSites, own: set[int] = own) -> NonfiniteOrigin | None:
                return _backward_origin(outputs, own.intersection(bad), frames, step, names, sites)

            found = self._run(each, look, names, until_s)
            if found is not None or monotonic() > until_s:
                return found
        return None

    def _trace(
        self, made: CompiledCall, tracer: GraphTracer, frames: Sequence[FrameType], step: int, until_s: float
    ) -> NonfiniteOrigin | None:
        def look(outputs: list[torch.Tensor], sites: CallSites) -> NonfiniteOrigin | None:
            bad = [one for one in outputs if condition(one) is Condition.BAD]
            return _origin(bad, frames, step, tracer, sites) if bad else None

        return self._run(made, look, tracer.names, until_s)

    def _run(
        self, made: CompiledCall, look: Callable[[list[torch.Tensor], CallSites], NonfiniteOrigin | None],
        names: ModuleNames, until_s: float,
    ) -> NonfiniteOrigin | None:  # fmt: skip
        """Repeat a call and ``look`` at its outputs, until there is a result, or random numbers are not the reason for none."""
        module = _uncompiled(made.module())
        if module is None or not _is_whole(module) or _has_global_hooks():
            return None
        try:
            arguments, keywords = made.inputs()
        except GoneError:
            return None
        if {each.device.type for each in [*_tensors([arguments, keywords]), *module.parameters()]} - {"cpu", "cuda"}:
            return None  # whose random state is not known here
        if not _fit(list(module.buffers())):
            return None
        path = next((path for path, known in names.modules.items() if known is module), "")

        def run() -> NonfiniteOrigin | None:
            for _ in range(_ATTEMPTS):
                drawn, copier = _random_states(), ModuleCopier()
                copied, given, named = copier.copy(module), copier.copy_arguments(arguments), copier.copy_arguments(keywords)
                names.alias(copier.buffers)
                sites = CallSites(copied, path)
                with _Bounds({_memory(copy) for copy, _ in copier.buffers}, until_s):
                    with sites:
                        output = copied(*given, **named)
                    found = look([one for one in _tensors(output) if one.grad_fn is not None], sites)
                if found is not None or all(map(torch.equal, drawn, _random_states())):
                    return found
            return None

        return self._beside_the_training(made, run)

    def _beside_the_training(self, made: CompiledCall, run: Callable[[], NonfiniteOrigin | None]) -> NonfiniteOrigin | None:
        """Call ``run`` so that the training notices nothing of it, whatever it raises."""
        training, backwards = self._training, self._training.backwards

        def unnoticed() -> NonfiniteOrigin | None:
            with ExitStack() as stack:
                enter = stack.enter_context
                enter(torch.compiler.set_stance("force_eager"))
                enter(as_if_compiling())
                enter(random_states_kept())
                enter(torch.enable_grad())
                for kind, enabled, dtype in made.autocast or [("cpu", False, None), ("cuda", False, None)]:
                    enter(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                return run()

        # for a backward pass within a compiled step, from where Dynamo would go on to compile
        disabled: Callable[[], NonfiniteOrigin | None] = torch.compiler.disable(unnoticed)  # type: ignore[no-untyped-call]
        self._calls.paused, training.backwards = True, 1  # a backward pass within is not the training's
        try:
            return disabled()
        except _GivenUp:
            return None
        except Exception as error:
            if signal_handlers.raising(error) is not None:
                raise
            return None  # what the model raises says that it is not as it was
        finally:
            self._calls.paused, training.backwards = False, backwards


def _origin(
    outputs: list[torch.Tensor], frames: Sequence[FrameType], step: int, whole: GraphTracer, sites: CallSites
) -> NonfiniteOrigin | None:
    """Return the origin in the graph of a run's outputs. ``whole``: of the loss."""
    again = GraphTracer(outputs, frames, step, names=whole.names)
    origin = again.forward()
    if origin is None or again.node is None or (origin.kind, origin.parameter) == ("parameter", "unnamed"):
        return None  # the last: what came out of another part of the graph held it
    origin = placed(origin, again.node, sites)
    return replace(origin, note="; ".join(filter(None, (origin.note, NOTE))))


def _backward_origin(
    outputs: list[torch.Tensor], bad: set[int], frames: Sequence[FrameType], step: int, names: ModuleNames, sites: CallSites,
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


def _parameters(module: Any) -> list[Any]:
    return list(module.parameters()) if module is not None else []


def _uncompiled(module: Any) -> Any:
    """Return the module itself, without the compiler's wrapper, and without that of ``DistributedDataParallel``."""
    for name in ("_orig_mod", "module"):
        inner = dict(module.named_children()).get(name) if module is not None else None
        if inner is not None and (name == "_orig_mod" or type(module).__name__ in _WRAPPERS):
            module = inner
    return module


def _is_whole(module: nn.Module) -> bool:
    """Return True if all parameters are here, as plain tensors, and no part prepares a backward pass when it is called."""
    if any(kind.__name__ in _WRAPPERS for each in module.modules() for kind in type(each).__mro__):
        return False
    return all(
        type(each) in {torch.nn.Parameter, torch.Tensor} and (not each.numel() or each.untyped_storage().nbytes())
        for each in module.parameters()
    )


def _has_global_hooks() -> bool:
    has = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return has is None or bool(has())


def _fit(tensors: list[torch.Tensor]) -> bool:
    """Return True if there is room for copies of them."""
    sizes = Counter[torch.device]()
    for each in tensors:
        sizes[each.device] += each.untyped_storage().nbytes()
    return all(size < _SHARE_OF_MEMORY * _free_bytes(device) for device, size in sizes.items())


def _random_states() -> list[torch.Tensor]:
    """Return the states of the generators that dropout draws from."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else [])]


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples, dictionaries and objects such as a model's output."""
    waiting, found = [value], list[torch.Tensor]()
    while waiting and len(found) < _MOST_OUTPUTS:
        each = waiting.pop(0)
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, dict):
            waiting[:0] = list(each.values())
        elif isinstance(each, (list, tuple)):
            waiting[:0] = list(each)
        elif hasattr(type(each), "__dataclass_fields__"):
            waiting[:0] = list(vars(each).values())
    return found
