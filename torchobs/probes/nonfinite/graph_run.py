"""Run a captured graph once more, operator by operator, so that nothing but the tensors it makes changes.

The run is given up before an operator that would write to a tensor that was there before, or that is not one of torch's own,
and as soon as it takes too long or too much memory. Random numbers are drawn from a state of its own, which is in the place of
the program's for the length of one operator.
"""

from __future__ import annotations

from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.probes.nonfinite.captured_graph import NAMESPACES, CapturedGraph, ModulePaths, Site
from torchobs.probes.nonfinite.replay import CallSite, SitesOfNodes
from torchobs.support import cgroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SHARE_OF_MEMORY = 0.5
"""Of what is free: a run may make tensors of this size in all"""


class GivenUp(BaseException):  # no error: it ends a run
    """Ends a run. Not an ``Exception``, which torch's functions may catch."""


class _Bounds(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Ends a run before an operator that must not run, and after one that was too large."""

    def __init__(self, writable: set[int], until_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._own, self._until_s = {0} | writable, until_s
        self._left: dict[torch.device, float] = {}
        self._random: dict[str, torch.Tensor] = {}

    @property
    def is_random(self) -> bool:
        """Whether random numbers were drawn, which are others than those of the call."""
        return bool(self._random)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if monotonic() > self._until_s or function.namespace not in NAMESPACES:
            raise GivenUp
        schema = function._schema
        if schema.is_mutable:
            for place, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else keywords.get(argument.name)
                    if not all(memory(each) in self._own for each in tensors(value)):
                        raise GivenUp
        if torch.Tag.nondeterministic_seeded in function.tags:
            with self._own_random_state():
                result = function(*args, **keywords)
        else:
            result = function(*args, **keywords)
        given = {memory(each) for each in tensors([args, keywords])}
        for each in tensors(result):
            if (key := memory(each)) not in given and key not in self._own:
                self._own.add(key)
                self._spend(each)
        return result

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        before = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if on_gpu else {})
        _set_random_states(self._random or before)
        try:
            yield
        finally:
            self._random = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if on_gpu else {})
            _set_random_states(before)

    def _spend(self, tensor: torch.Tensor) -> None:
        left = self._left.get(tensor.device)
        left = free_bytes(tensor.device) * SHARE_OF_MEMORY if left is None else left
        self._left[tensor.device] = left = left - tensor.untyped_storage().nbytes()
        if left < 0:
            raise GivenUp


class GraphRun(SitesOfNodes):
    """One run of a captured graph; afterwards it knows which module and line each node of autograd's graph is from."""

    def __init__(self, captured: CapturedGraph, paths: ModulePaths, modules: Mapping[str, Any]) -> None:
        """``modules``: by their paths."""
        super().__init__()
        self._captured, self._paths, self._modules = captured, paths, modules
        self.is_random = False
        self.outputs: list[torch.Tensor] = []

    @contextmanager
    def run(self, inputs: Sequence[Any], writable: set[int], until_s: float) -> Iterator[None]:
        """Run it, and remain within its bounds for the block. Raises :class:`GivenUp`.

        ``inputs``: cut off from the graph that they come from. ``writable``: memory (addresses) that the run may change.
        """
        with _Bounds(writable, until_s) as bounds:
            result = _Interpreter(self, self._captured).run_balanced(inputs)
            self.outputs = tensors(result)
            self.is_random = bounds.is_random
            yield

    def note(self, first: int, last: int, site: Site) -> None:
        """Note the nodes ``first`` to ``last`` (exclusive)."""
        path = self._paths.of(site)
        kind = type(self._modules[path]).__name__ if path is not None and path in self._modules else ""
        self.sites.append(CallSite(first, last, path or kind, kind, site.line))


class _Interpreter(fx.Interpreter):
    """Runs a graph with those that it calls, without what surrounds such a call."""

    def __init__(self, of: GraphRun, captured: CapturedGraph) -> None:
        super().__init__(torch.nn.Module(), graph=captured.graph)
        self._of, self._captured = of, captured
        self._autocasts: list[Any] = []

    def run_balanced(self, inputs: Sequence[Any]) -> Any:
        """Run, and leave autocast as it was, also if it ends within a region of it."""
        try:
            return self.run(*inputs)
        finally:
            while self._autocasts:
                self._autocasts.pop().__exit__(None, None, None)

    def run_node(self, n: fx.Node) -> Any:
        """See :class:`torch.fx.Interpreter`."""
        number = torch._C._autograd._get_sequence_nr
        first, site = number(), n.meta.get("site")
        result = self._called(n) if self._captured.is_inlined(n) else super().run_node(n)
        if number() > first and site is not None:
            self._of.note(first, number(), site)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See :class:`torch.fx.Interpreter`."""
        result = super().call_function(target, args, kwargs)
        name = getattr(target, "__name__", "")
        if name == "_enter_autocast":
            self._autocasts.append(result)
            torch.set_autocast_cache_enabled(False)  # a cast that is kept would be used by the program's next operator
        elif name == "_exit_autocast":
            self._autocasts.remove(args[0])
        return result

    def fetch_attr(self, target: str) -> Any:
        """See :class:`torch.fx.Interpreter`."""
        return self._captured.attributes[target]

    def _called(self, node: fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(node)
        return _Interpreter(self._of, args[0]).run_balanced(args[1:])


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def free_bytes(device: torch.device) -> float:
    """Return how much memory is free on a device, of the host within its cgroup."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    import psutil  # needed nowhere else here

    groups = cgroup.of_process("memory")
    tightest = cgroup.tightest(groups) if groups is not None else None
    left = tightest[1].left if tightest is not None else None
    available = float(psutil.virtual_memory().available)
    return available if left is None else min(available, float(left))


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for item in items for each in tensors(item)]
