"""Find names of parameters: from the optimizer's groups, or from the modules that hold them.

The modules are those given to ``torchobs.watch(model)``, those built since ``init()`` (by torch's hooks for the registration of
parameters and children), and if that is not enough those found by a scan of all objects.

The scan is ``gc.get_objects()``, in the sampler thread: with 320,000 objects it holds the GIL for 130 ms, and the training
thread waits for it. So it is used only for models that were built before, copied, or loaded as a whole, and at most
eight times in a run. Types are checked by ``__mro__``, never ``isinstance``, which runs code of lazy objects.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs.support.graph_safe import no_hook_in_graphs
from torchobs.tensors.references import TensorReference, living

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torchobs.support.error_guard import CircuitBreaker

MAX_SCANS = 8
SCAN_AFTER_S, SCAN_AGAIN_S = 1.0, 30.0
"""Steps before the scans: not the first step, which users wait for; a second scan for parameters made later"""
LONGEST = 120
_CHUNK = 2_000
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_ddp_module"})
_PARAMETRIZED = re.compile(r"\.parametrizations\.([^.]+)\.(original\d*)$")


class ModelSize(NamedTuple):
    """The number of elements of trained models' parameters."""

    trainable: int
    frozen: int
    frozen_between: tuple[str, ...]
    """Layers without a trained parameter, though some before and after them have one"""


class ParameterNames:
    """Names by parameter. For the sampler thread, but :meth:`watch` for any. ``yield_gil``: the sampler's."""

    def __init__(self, yield_gil: Callable[[], None]) -> None:
        self.built_modules = BuiltModules()
        self._yield_gil = yield_gil
        self._names: dict[int, tuple[TensorReference, str]] = {}
        self._taken: dict[str, TensorReference] = {}
        self._roots: list[_Root] = []
        self._watched: list[ref[Any]] = []
        self._scans = 0
        self._first_s = self._last_s = 0.0

    def watch(self, model: Any) -> None:
        """Use the names of this module's parameters. Any thread."""
        self._watched.append(ref(model))

    def get(self, parameter: Any) -> str | None:
        """Return the parameter's qualified name, if it is known."""
        entry = self._names.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def outermost(self) -> list[Any]:
        """Return the outermost modules that are known without a scan."""
        modules = [module for root in list(self._roots) if (module := root.module()) is not None]
        return modules + roots(self.built_modules.modules())

    def count_layers(self, trained: Collection[int], stuck: Collection[str]) -> int:
        """Return the number of layers of all models that are known without a scan and have a trained parameter (ids).

        Those count that have a matrix: a normalisation's scale or a bias alone is no layer, unless it is one of ``stuck``.
        """
        from torchobs.tensors.values import shape_of  # which imports torch: there is a model by now

        layers, counted = set[tuple[int, str]](), set[int]()
        for number, module in enumerate(self.outermost()):
            names, matrices = dict[int, str](), set(stuck)
            with suppress(RuntimeError):  # a dictionary changed size
                named = [(layer_of(clean(name)), parameter) for name, parameter in self._parameters(module)]
                names = {id(parameter): name for name, parameter in named}
                matrices.update(name for name, parameter in named if len(shape_of(parameter)) > 1)
            if any(key in trained for key in names):
                fresh = {name for key, name in names.items() if key not in counted}  # not again as its wrapper's
                layers.update((number, name) for name in fresh & matrices or fresh)  # flattened ones are all vectors
                counted.update(names)
        return len(layers)

    def size(self, trained: Collection[int]) -> ModelSize | None:
        """Return the size of the models known without a scan that have a trained parameter (ids); ``None``: none is known.

        Also ``None`` where FSDP1 has flattened them: a rank has its shard alone.
        """
        sizes, frozen = dict[int, tuple[int, bool]](), list[str]()
        for module in self.outermost():
            with suppress(RuntimeError, ValueError):  # a dictionary changed size; a lazy parameter has no shape yet
                named = [(layer_of(clean(name)), parameter) for name, parameter in self._parameters(module)]
                if any(getattr(parameter, "_fsdp_flattened", False) for _, parameter in named):
                    return None
                if any(id(parameter) in trained for _, parameter in named):
                    # DeepSpeed's ZeRO 3 keeps the whole size beside an empty shard
                    elements = {id(x): (int(getattr(x, "ds_numel", x.numel())), x.requires_grad) for _, x in named}
                    is_new = not elements.keys() & sizes.keys()  # not a wrapper of one that has been seen
                    frozen += _frozen_between(named) if is_new else []
                    sizes |= elements
        amounts = [[number for number, trains in sizes.values() if trains is wanted] for wanted in (True, False)]
        return ModelSize(sum(amounts[0]), sum(amounts[1]), tuple(frozen)) if sizes else None

    def take_group(self, group: dict[str, Any]) -> None:
        """Use the names in an optimizer's group: made from ``named_parameters()``, on torch ≥ 2.6."""
        names = group.get("param_names")
        if names is not None and len(names) == len(group["params"]):
            for parameter, name in zip(group["params"], names, strict=True):
                self._name(parameter, clean(str(name)))

    def look_for(self, parameters: Iterable[Any], *, now: bool = False) -> bool:
        """Try to name the parameters; return whether that is final (the rest stays nameless). ``now``: the rank is ending."""
        watched, self._watched = self._watched, []
        self._add_roots([module for module in (reference() for reference in watched) if module is not None])
        parameters = list(parameters)
        self._walk(parameters)
        if any(self.get(parameter) is None for parameter in parameters):
            self._add_roots(roots(self.built_modules.modules()))
            self._walk(parameters)
        missing = [parameter for parameter in parameters if self.get(parameter) is None]
        if not missing or self._scans >= MAX_SCANS:
            return True
        time_s = monotonic()
        self._first_s = self._first_s or time_s
        wait_s = SCAN_AGAIN_S if self._scans else SCAN_AFTER_S
        if not now and time_s - (self._last_s or self._first_s) < wait_s:
            return False
        self._last_s = time_s
        self._scans += 1
        self._add_roots(roots(all_modules(self._yield_gil)))
        self._walk(missing)
        return True

    def _name(self, parameter: Any, name: str) -> None:
        if self.get(parameter) is not None:
            return
        number, free = 1, name
        while (other := self._taken.get(free)) is not None and other() is not None:
            number += 1
            free = f"model{number}.{name}"  # two models of the same class, or of unknown ones
        self._names[id(parameter)] = (TensorReference(parameter), free)
        self._taken[free] = TensorReference(parameter)

    def _add_roots(self, modules: list[Any]) -> None:
        present = {id(module) for module in (root.module() for root in self._roots) if module is not None}
        self._roots += [_Root(ref(module)) for module in modules if id(module) not in present]

    def _walk(self, parameters: list[Any]) -> None:
        """Name parameters by the modules that hold them; several models are distinguished by their classes."""
        wanted = {id(parameter) for parameter in parameters if self.get(parameter) is None}
        holders: list[tuple[_Root, Any, list[tuple[str, Any]]]] = []
        for root in self._roots if wanted else ():
            module = root.module()
            named = list[tuple[str, Any]]()
            with suppress(RuntimeError):  # a dictionary changed size: none of it, then
                named = [entry for entry in self._parameters(module) if id(entry[1]) in wanted] if module is not None else []
            wanted -= {id(parameter) for _, parameter in named}
            if named:
                holders.append((root, module, named))
        several = len(holders) > 1 or any(root.title is not None for root in self._roots)
        for root, module, named in holders:
            if root.title is None:
                root.title = title_of(module, [other.title for other in self._roots]) if several else ""
            for name, parameter in named:
                self._name(parameter, root.title + clean(name))

    def _parameters(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield a module's parameters by name; raise ``RuntimeError`` if the module is being changed meanwhile."""
        parameters = module.named_parameters()
        while chunk := list(islice(parameters, _CHUNK // 20)):
            yield from chunk
            self._yield_gil()


def _frozen_between(named: Sequence[tuple[str, Any]]) -> list[str]:
    trains = dict[str, bool]()
    for layer, parameter in named:
        trains[layer] = trains.get(layer, False) or parameter.requires_grad
    order = list(trains.values())
    if True not in order:
        return []
    first, last = order.index(True), len(order) - 1 - order[::-1].index(True)
    return [layer for layer in list(trains)[first:last] if not trains[layer]]


class BuiltModules:
    """Modules that have registered a parameter or a child since the hooks were installed."""

    def __init__(self) -> None:
        self._modules: dict[int, ref[Any]] = {}
        self._handles: list[Any] = []

    def install(self, breaker: CircuitBreaker) -> None:
        """Register the hooks. A compiled region that assigns a module or a parameter includes them; they do nothing there."""
        from torch.nn.modules import module

        note = no_hook_in_graphs(self._registration_hook(breaker))
        self._handles = [
            module.register_module_parameter_registration_hook(note),
            module.register_module_module_registration_hook(note),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def modules(self) -> list[Any]:
        """Return the living modules. From any thread."""
        return [module for reference in list(self._modules.values()) if (module := reference()) is not None]

    def _registration_hook(self, breaker: CircuitBreaker) -> Callable[[Any, str, object], None]:
        """Return the hook: for a known module one lookup, and nothing that can raise.

        FSDP1 with ``use_orig_params`` assigns every module's parameters anew, twice in each step.
        """
        modules, add = self._modules, breaker.guard(self._add)

        def note(module: Any, _name: str, _value: object) -> None:
            if id(module) not in modules:
                add(module)

        return note

    def _add(self, module: Any) -> None:
        modules, key = self._modules, id(module)
        modules[key] = ref(module, lambda _: modules.pop(key, None))


@dataclass(slots=True)
class _Root:
    """An outermost module, and the prefix of its parameters' names (``None`` until one is named)."""

    module: ref[Any]
    title: str | None = None


def title_of(module: Any, titles: Collection[str | None]) -> str:
    """Return the prefix of a model's names: its class, with a number if another model has that title."""
    kind = type(module).__name__
    return next(title for title in (f"{kind}{number or ''}." for number in (0, *range(2, 1 << 20))) if title not in titles)


def clean(name: str) -> str:
    """Return a parameter's name without what FSDP, DDP, compile and checkpointing have inserted."""
    words = [word for word in name.split(".") if word not in _WRAPPERS]
    while len(words) > 1 and words[0] == "module":
        words = words[1:]
    return _PARAMETRIZED.sub(r".\1", ".".join(words))


def layer_of(name: str) -> str:
    """Return the path of the parameter's module: a weight and its bias are one layer.

    Weights and biases of the outermost module, which has no path, are the layer ``model``; another parameter of its (a class
    token) is a layer by its own name. Overlong names are cut at the beginning.
    """
    path, _, last = name.rpartition(".")
    layer = path or ("model" if "weight" in last or "bias" in last else last)
    return layer if len(layer) <= LONGEST else f"…{layer[1 - LONGEST :]}"


def all_modules(yield_gil: Callable[[], None]) -> list[Any]:
    """Return all living ``torch.nn.Module`` objects."""
    import torch  # torch is optional until training begins

    yield_gil()
    modules = living(torch.nn.Module)
    yield_gil()
    return modules


def roots(modules: list[Any]) -> list[Any]:
    """Return the modules that are not children of another one."""
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    return [module for module in modules if id(module) not in inner and "_parameters" in vars(module)]
