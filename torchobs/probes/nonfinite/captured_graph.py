"""Keep the graph that Dynamo has made of a compiled region, so that it can be run again operator by operator.

Such a graph has torch's operators and nothing else: no Python code of the user's, no hook, no attribute of an object. A graph
that could have an effect beyond its tensors is not kept: one with operators of libraries, collectives, kernels, or functions
that set a state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from torchobs.probes.gradients.parameter_names import clean

if TYPE_CHECKING:
    from collections.abc import Container

MOST_NODES = 20_000
NAMESPACES = frozenset({"aten", "prims", "prim"})
"""Of operators that do nothing but compute"""
_PYTHON = ("functional", "nn.functional", "_jit_internal", "_tensor", "amp.autocast_mode")
_COMPILED = ("_C", "_C._nn", "_C._linalg", "_C._fft", "_C._special", "_C._VariableFunctions")
_MODULES = frozenset({"torch", *(f"torch.{name}" for name in _PYTHON + _COMPILED), "_operator", "operator", "math", "builtins"})
"""Where the functions of a graph come from that may be called once more"""
_SETTERS = re.compile(r"set_(?!grad_enabled$)|seed|rng|init_|destroy|register")
"""Names of functions in these modules that change a state of torch's, but for the one that ends with the run"""
_METHODS = frozenset({"set_", "requires_grad_", "retain_grad", "register_hook", "share_memory_", "backward"})
"""Methods of tensors that do more than to compute"""
HIGHER_ORDER, OPERATOR = "HigherOrderOperator", "OpOverload"
_INLINED = frozenset({"tag_activation_checkpoint", "wrap"})
"""Operators that call a graph, whose other effects (recomputation) a run does not need"""
_COUNT = "num_batches_tracked"
"""The buffer of batch normalisation's in which it counts"""
_KEYS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


class NotRepeatableError(TypeError):
    """The graph has something that must not run, or is too large."""


class Site(NamedTuple):
    """Where in the user's program a node of the graph comes from."""

    modules: tuple[str, ...]
    """Those that call each other, innermost first, as Dynamo writes them: ``L['self'].blocks.0``"""
    line: str


class Input(NamedTuple):
    """What Dynamo calls an input of the graph, in two parts: ``L['self']`` and ``blocks.0.weight``."""

    root: str
    path: str
    is_tensor: bool
    is_parameter: bool
    is_statistic: bool
    """Whether it is a buffer that a call may have changed without changing what a run of it computes: no index, no flag"""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph of its own, whose nodes know their :class:`Site` and nothing else; the autocast around it when it was made."""

    graph: fx.Graph
    inputs: tuple[Input, ...]
    attributes: dict[str, Any]
    """Tensors and graphs that nodes refer to"""
    autocast: tuple[tuple[str, bool, Any], ...]
    """For each type of device whether autocast was enabled, and its data type"""

    def is_inlined(self, node: fx.Node) -> bool:
        """Return True for a call of another graph that is run in its place."""
        return node.op == "call_function" and _kind(node.target) == HIGHER_ORDER


def capture(module: fx.GraphModule) -> CapturedGraph:
    """Return a copy of what a compiler is about to be given. Raises :class:`NotRepeatableError`."""
    if len(module.graph.nodes) > MOST_NODES:
        raise NotRepeatableError(len(module.graph.nodes))
    attributes = {node.target: _attribute(module, node) for node in module.graph.nodes if node.op == "get_attr"}
    for node in module.graph.nodes:
        _require_repeatable(node, attributes)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for original, copy in copies.items():
        copy.meta = {"site": _site(original.meta)}
    inputs = tuple(_input(node) for node in module.graph.nodes if node.op == "placeholder")
    return CapturedGraph(graph, inputs, attributes, _autocast())


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    if isinstance(value, fx.GraphModule):
        return capture(value)
    if not isinstance(value, torch.Tensor):
        raise NotRepeatableError(type(value))
    return value


def _require_repeatable(node: fx.Node, attributes: dict[Any, Any]) -> None:
    target: Any = node.target
    if node.op in {"placeholder", "output", "get_attr"} or (node.op == "call_method" and target not in _METHODS):
        return
    if node.op == "call_function":
        kind = _kind(target)
        if kind == HIGHER_ORDER:
            called = attributes.get(getattr(node.args[0], "target", None)) if node.args else None
            if target.__name__ in _INLINED and isinstance(called, CapturedGraph):
                return
        elif kind == OPERATOR:
            if str(target).partition(".")[0] in NAMESPACES:
                return
        elif getattr(target, "__module__", None) in _MODULES and not _SETTERS.search(getattr(target, "__name__", "set_")):
            return
    raise NotRepeatableError(target)


def _kind(target: Any) -> str:
    """Return what is called, by its class, which has no public name."""
    names = {kind.__name__ for kind in type(target).__mro__}
    return HIGHER_ORDER if HIGHER_ORDER in names else OPERATOR if names & {OPERATOR, "OpOverloadPacket"} else ""


def _site(meta: dict[str, Any]) -> Site:
    modules = [str(path) for path, *_ in (meta.get("nn_module_stack") or {}).values()]
    lines = _LINE.findall(meta.get("stack_trace") or "")
    return Site(tuple(reversed(modules)), f"{lines[-1][0]}:{lines[-1][1]}" if lines else "")


def _input(node: fx.Node) -> Input:
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    text = str(name() if callable(name) else name)  # a method in earlier versions
    keys = _KEYS.findall(text)
    root = _KEYS.split(text, maxsplit=1)[0] if keys else text
    example: Any = node.meta.get("example_value")
    path, is_tensor = ".".join(keys), isinstance(example, torch.Tensor)
    is_statistic = is_tensor and "._buffers[" in text and (example.is_floating_point() or path.endswith(_COUNT))
    return Input(root, path, is_tensor, "._parameters[" in text, is_statistic)


def _autocast() -> tuple[tuple[str, bool, Any], ...]:
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


class ModulePaths:
    """Names a graph's modules as the model does, by those of its inputs that are parameters."""

    def __init__(self, captured: CapturedGraph, names: list[str], known: Container[str]) -> None:
        """``names``: of the inputs, as parameters or buffers of the model; ``""`` for others. ``known``: the model's paths."""
        self._known = known
        self._prefixes: dict[str, str] = {}
        for each, name in zip(captured.inputs, names, strict=True):
            path = clean(each.path)
            if path and name.endswith(path) and each.root not in self._prefixes:
                self._prefixes[each.root] = name[: len(name) - len(path)].rstrip(".")

    def of(self, site: Site) -> str | None:
        """Return the path of the innermost module that is the model's; ``None`` if none is."""
        found = (path for module in site.modules if (path := self._path(module)) in self._known)
        alone = next(iter(self._prefixes.values())) if len(self._prefixes) == 1 else None
        return next(found, alone)  # the region's own module is in no node's list

    def _path(self, module: str) -> str:
        root = max((root for root in self._prefixes if module.startswith(root)), key=len, default=None)
        return "?" if root is None else ".".join(filter(None, (self._prefixes[root], clean(module[len(root) :].lstrip(".")))))
