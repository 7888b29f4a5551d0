"""Name the module that a node of a graph belongs to, and the line of the user's code.

The graph says which nodes use which parameters, and parameters have names. A node without parameters lies between the last
module used before it and the next one used after it; of the modules that may have called the operator, the innermost one whose
``forward`` mentions it is taken.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.gradients.parameter_names import all_modules, clean, roots
from torchobs.probes.memory.source_lines import is_installed
from torchobs.probes.nonfinite.code import Line, is_users, lines_of, locals_of, used, visible
from torchobs.probes.nonfinite.operators import OPAQUE, spellings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType

    from torchobs.probes.nonfinite.graph import GraphNode

_PREPARING = frozenset({"t", "to_copy", "view", "transpose", "expand", "permute", "reshape", "unsqueeze"})
_INNER = frozenset({"module", "_orig_mod", "_orig_mod.module", "module._orig_mod"})
"""Paths of the model within what DDP and the compiler wrap around it"""
_CONTAINERS = frozenset({"ModuleList", "ModuleDict"})


class Place(NamedTuple):
    """``module``: the module's path; ``""`` outside of any module. ``line``: ``file:line``, ``""`` if it is not known."""

    module: str
    kind: str
    line: str


class ModuleNames:
    """The modules of the graph's parameters, by path."""

    def __init__(self, parameters: Iterable[Any], known: Iterable[Any] = ()) -> None:
        parameters = list(parameters)
        wanted = {id(parameter) for parameter in parameters}
        self.modules: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        found = self._holding(known, wanted)
        missing = wanted - {id(p) for root in found for p in (*root.parameters(), *(whole for _, whole in gathered(root)))}
        # a look through all objects for what is a module's alone: not for an input, a received activation, a loose tensor
        if any(id(parameter) in missing and _is_parameter(parameter) for parameter in parameters):
            found = self._holding(roots(all_modules(lambda: None)), wanted)
        for root in found:
            self._add(root, f"{type(root).__name__}." if len(found) > 1 else "")

    @staticmethod
    def _holding(modules: Iterable[Any], wanted: set[int]) -> list[Any]:
        """Return the modules that together hold these parameters; a part or a wrapper of another is left out."""
        held = []
        for module in modules:
            own = {id(parameter) for parameter in module.parameters()} | {id(whole) for _, whole in gathered(module)}
            held.append((module, wanted & own))
        found, missing = [], set(wanted)
        for module, own in sorted(held, key=lambda each: -len(each[1])):
            if own & missing:
                found.append(module)
                missing -= own
        return found

    def _add(self, root: Any, title: str) -> None:
        for path, module in root.named_modules():
            name = "" if path in _INNER else clean(path) if path else ""
            full = title + name if name else title.rstrip(".")
            self.modules[full] = module
            held = [*vars(module).get("_parameters", {}).items(), *vars(module).get("_buffers", {}).items()]
            for key, tensor in held:
                if tensor is not None:
                    whole = clean(f"{full}.{key}" if full else key)
                    self._names.setdefault(id(tensor), whole)
                    self._storages.setdefault(memory_of(tensor), whole)
        for shard, tensor in gathered(root):
            if (known := self._names.get(id(shard))) is not None:
                self._names.setdefault(id(tensor), known)

    def of(self, tensor: Any) -> str:
        """Return the name of a parameter or buffer, or of the one whose memory the tensor uses; ``""`` for any other."""
        return self._names.get(id(tensor)) or self._storages.get(memory_of(tensor) or -1, "")

    def owner(self, name: str) -> str:
        """Return the path of the module that holds this parameter."""
        return name.rpartition(".")[0]


def gathered(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter that FSDP2 shards, and the whole one that a graph has: its memory may be free."""
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in getattr(state and state(), "_fsdp_param_groups", ()):
            for one in getattr(group, "fsdp_params", ()):
                shard, whole = getattr(one, "sharded_param", None), getattr(one, "_unsharded_param", None)
                if shard is not None and whole is not None:
                    yield shard, whole


def _is_parameter(tensor: Any) -> bool:
    import torch  # torch is optional until training begins

    return isinstance(tensor, torch.nn.Parameter)


def memory_of(tensor: Any) -> int:
    """Return where a tensor's elements lie; 0 if that is not known."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, NotImplementedError, RuntimeError):
        return 0


class Locator:
    """Finds the places of nodes in one graph. ``frames``: the user's functions that run now, innermost first."""

    def __init__(self, nodes: Sequence[GraphNode], names: ModuleNames, frames: Sequence[FrameType]) -> None:
        self._names, self._frames = names, frames
        self._nodes = nodes
        self._own: dict[GraphNode, str] = {}
        self._sources: dict[GraphNode, GraphNode] = {}
        """The parameter that a node is a view or a cast of"""
        for node in nodes:  # leaves first
            source = node.inputs[0][0] if len(node.inputs) == 1 and node.operator in _PREPARING else None
            if source is not None and (source.parameter is not None or source in self._sources):
                self._sources[node] = self._sources.get(source, source)
            own = self._uses(node)
            if own is not None:
                self._own[node] = own

    def is_preparation(self, node: GraphNode) -> bool:
        """Return True if the node only makes a view or a cast of a parameter, for another operator."""
        return node in self._sources

    def _uses(self, node: GraphNode) -> str | None:
        """Return the module whose parameters the node uses, directly or through a view or a cast of them."""
        paths = []
        for producer, _ in node.inputs:
            source = self._sources.get(producer, producer) if producer is not None else None
            if source is not None and source.parameter is not None:
                name = self._names.of(source.parameter)
                if name:
                    paths.append(self._names.owner(name))
        if not paths or self.is_preparation(node):
            return None
        return common(paths)

    def place(self, node: GraphNode) -> Place:
        """Return where the node was made."""
        words = spellings(node.operator)
        if node.operator == "pow" and node.settings().get("exponent") != 2:  # noqa: PLR2004  # a square
            words = tuple(word for word in words if word != "square")
        own = self._own.get(node)
        if own is not None:
            module = self._names.modules.get(own)
            lines = module_lines(module, words) if module is not None else []
            users = [line for line in lines if line.is_users]
            begins = _first_line(module) if node.operator in OPAQUE else None
            return self._placed(own, users[0] if users else self._caller_line(own) or begins)
        before, after = self._around(node)
        for candidates in self._candidates(before, after):
            for apart in (1, 0):  # lines between those of the two neighbours, then theirs
                for path in candidates:
                    line = self._matching(path, words, before, after, apart)
                    if line is not None:
                        return self._placed(path, line if line.is_users else self._caller_line(path))
        line = self._in_frames(words)
        if line is not None or after is None or before is None:
            return Place("", "", "" if line is None else str(line))
        return self._placed(self._real(common([before, after])), None)

    def _placed(self, path: str, line: Line | None) -> Place:
        module = self._names.modules.get(path)
        kind = type(module).__name__ if module is not None else ""
        return Place(path or kind, kind, "" if line is None else str(line))

    def _around(self, node: GraphNode) -> tuple[str | None, str | None]:
        """Return the module used last before the node, and the one used first after it."""
        before = after = None
        for each, path in self._own.items():  # in the order of the forward pass
            if each.number < node.number:
                before = path
            elif each.number > node.number:
                after = path
                break
        return before, after

    def _candidates(self, before: str | None, after: str | None) -> tuple[list[str], list[str]]:
        """Return the modules that may have called an operator between these two, innermost first, and those that hardly have.

        The latter are used before ``before`` already, and perhaps again: what prepares a batch has no parameters, and may be
        an attribute that was set last.
        """
        modules = self._names.modules
        paths = list(modules)
        shared = common([before, after]) if before is not None and after is not None else ""
        start = paths.index(before) + 1 if before in modules else 0
        end = paths.index(after) if after in modules else len(paths)
        owners = set(self._own.values())
        within = [path for path in paths[start : max(end, start)] if not any(_inside(one, path) for one in owners)]
        earlier = [path for path in reversed(within) if self._is_used_before(path, before)]
        likely = [path for path in reversed(within) if path not in earlier]
        for side in (after, before):
            likely += (path for path in chain_of(side) if side is not None and path != shared and _inside(path, shared))
        return [*likely, *chain_of(shared)], earlier

    def _is_used_before(self, path: str, other: str | None) -> bool:
        """Return True if the module around both mentions ``path`` in its ``forward`` before it first mentions ``other``."""
        if other is None:
            return False
        outer = common([path, other])
        called = _child_lines(self._names.modules.get(outer))
        first, then = called.get(_child(outer, path), []), called.get(_child(outer, other), [])
        return first[:1] < then[:1] and bool(first)

    def _matching(self, path: str, words: Sequence[str], before: str | None, after: str | None, apart: int) -> Line | None:
        """Return the line of the module's ``forward`` with the operator, between the calls of the two neighbours.

        ``apart``: lines that it is away from these at least.
        """
        module = self._names.modules.get(path)
        if module is None or type(module).__name__ in _CONTAINERS:
            return None
        called = _child_lines(module)
        least = max(called.get(_child(path, before), [0])[:1]) if _child(path, before) else 0
        most = max(called.get(_child(path, after), [1 << 30])) if _child(path, after) else 1 << 30
        if not _is_written_by_user(module):  # in torch's own modules symbols are bookkeeping
            words = [word for word in words if word.isidentifier()]
        lines = module_lines(module, words)
        fitting = [line for line in lines if least + apart * (least > 0) <= line.at <= most - apart]
        return fitting[0] if fitting else None

    def _caller_line(self, path: str) -> Line | None:
        """Return the line of the parent's ``forward`` that calls this module of torch's."""
        while path:
            parent, _, name = path.rpartition(".")
            module = self._names.modules.get(parent)
            forward = getattr(type(module), "forward", None)
            if module is not None and isinstance(forward, FunctionType) and is_users(forward.__code__):
                found = [line for used_name, line in used(forward.__code__) if used_name == name]
                return Line(forward.__code__.co_filename, found[0], found[0]) if found else None
            path = parent
        return None

    def _in_frames(self, words: Sequence[str]) -> Line | None:
        # the loops of an installed trainer do much arithmetic that is none of the loss's; the function that begins the backward
        # pass may divide it by the number of micro-batches
        frames = [frame for frame in self._frames if not is_installed(frame.f_code.co_filename)] or self._frames
        for frame in dict.fromkeys([*self._frames[:1], *frames]):
            lines = lines_of(frame.f_code, {**frame.f_globals, **locals_of(frame)}, words)
            done = [line for line in lines if line.at <= frame.f_lineno] or lines
            if done:
                return done[-1]
        return None

    def _real(self, path: str) -> str:
        """Return the innermost module around this path that has a ``forward`` of its own."""
        while path and type(self._names.modules.get(path)).__name__ in _CONTAINERS:
            path = path.rpartition(".")[0]
        return path


def module_lines(module: Any, words: Sequence[str]) -> list[Line]:
    """Return the lines of a module's ``forward`` that use the operator, those of helper functions and methods included."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType):
        return []
    methods = {
        name: value for kind in reversed(type(module).__mro__) if is_own(kind)
        for name, value in vars(kind).items() if isinstance(value, FunctionType)
    }  # fmt: skip
    return lines_of(forward.__code__, {**visible(forward), **methods}, words)


def _first_line(module: Any) -> Line | None:
    """Return where a module's ``forward`` begins; ``None`` if the user has not written it."""
    if not _is_written_by_user(module):
        return None
    code = type(module).forward.__code__
    return Line(code.co_filename, code.co_firstlineno, code.co_firstlineno)


def _is_written_by_user(module: Any) -> bool:
    forward = getattr(type(module), "forward", None)
    return isinstance(forward, FunctionType) and is_users(forward.__code__)


def is_own(kind: type) -> bool:
    """Return True if the class is neither ``object`` nor ``torch.nn.Module``, whose methods every module has."""
    return kind.__module__ not in {"builtins", "torch.nn.modules.module"}


def _child_lines(module: Any) -> dict[str, list[int]]:
    """Return the lines where the module's ``forward`` mentions each of its attributes."""
    forward = getattr(type(module), "forward", None)
    found: dict[str, list[int]] = {}
    if isinstance(forward, FunctionType):
        for name, line in used(forward.__code__):
            found.setdefault(name, []).append(line)
    return found


def _child(path: str, inner: str | None) -> str:
    """Return the name of the child of ``path`` that holds ``inner``; ``""`` if none does."""
    if inner is None or not _inside(inner, path) or inner == path:
        return ""
    return inner[len(path) + 1 if path else 0 :].partition(".")[0]


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")


def chain_of(path: str | None) -> Iterator[str]:
    """Yield the path and those of the modules around it, the outermost, ``""``, last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def common(paths: Sequence[str]) -> str:
    """Return the innermost module around all of these."""
    parts = [path.split(".") for path in paths]
    shared = []
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)
