"""Name the module that a node of a graph belongs to, and the line of the user's code.

The graph says which nodes use which parameters, and parameters have names. A node without parameters lies between the last
module used before it and the next one used after it. Of the modules that may have called the operator, the innermost one that
mentions it in its ``forward`` is taken.
"""

from __future__ import annotations

import dis
import os
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs.support.source_lines import is_installed, is_ours
from torchobs.tensors.graph import OPAQUE
from torchobs.tensors.names import all_modules, clean, roots, title_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from torchobs.tensors.graph import GraphNode

_PREPARING = frozenset({"t", "to_copy", "view", "transpose", "expand", "permute", "reshape", "unsqueeze"})
_INNER = frozenset({"module", "_orig_mod", "_orig_mod.module", "module._orig_mod"})
"""Paths of the model within the wrappers of DDP and the compiler"""
_WRITTEN = {
    "add": ("+", "add"), "sub": ("-", "sub"), "rsub": ("-", "rsub"), "mul": ("*", "mul"), "div": ("/", "div", "true_divide"),
    "reciprocal": ("/", "reciprocal"), "pow": ("**", "pow", "square"), "mm": ("@", "matmul", "mm", "linear"),
    "bmm": ("@", "matmul", "bmm", "einsum", "baddbmm"), "addmm": ("linear", "addmm"), "native_layer_norm": ("layer_norm",),
    "native_batch_norm": ("batch_norm",), "native_group_norm": ("group_norm",), "linalg_vector_norm": ("norm", "vector_norm"),
    "log_softmax": ("log_softmax", "cross_entropy"), "nll_loss": ("nll_loss", "cross_entropy"),
    "nll_loss2d": ("nll_loss", "cross_entropy"), "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits",),
    "convolution": ("conv1d", "conv2d", "conv3d", "_conv_forward"), "neg": ("-", "neg"), "matmul": ("@", "matmul"),
    "index": ("[]",), "select": ("[]", "select"), "slice": ("[]",), "masked_fill": ("masked_fill", "masked_fill_"),
    "remainder": ("%", "remainder"), "logsumexp": ("logsumexp",), "euclidean_dist": ("cdist",), "special_logit": ("logit",),
    "linalg_inv_ex": ("inv", "inverse"), "linalg_cholesky_ex": ("cholesky",), "linalg_eigh": ("eigh", "eigvalsh"),
    "std_mean": ("std_mean", "std"), "var_mean": ("var_mean", "var"), "special_xlogy": ("xlogy",),
}  # fmt: skip
_CONTAINERS = frozenset({"ModuleList", "ModuleDict"})
DEEPEST = 3
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST")
_REWRITTEN = "@py_builtins"
"""Of functions with assertions that pytest has rewritten: these name ``locals``"""
_HIDDEN_LOCALS = frozenset({"locals", "vars"})


class Place(NamedTuple):
    """``module``: the module's path; ``""`` outside of any module. ``line``: ``file:line``, ``""`` if unknown."""

    module: str
    kind: str
    line: str


class ModuleNames:
    """The modules of the graph's parameters, by path."""

    def __init__(self, parameters: Iterable[Any], models: Iterable[Any] = ()) -> None:
        parameters, models = list(parameters), list(models)
        wanted = {id(parameter) for parameter in parameters}
        self.modules: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        owners = self._holding(models, wanted)
        missing = wanted - {id(p) for root in owners for p in (*root.parameters(), *(whole for _, whole in gathered(root)))}
        # a look through all objects for what is a module's alone: not for an input, a received activation, a loose tensor
        if any(id(parameter) in missing and isinstance(parameter, torch.nn.Parameter) for parameter in parameters):
            owners = self._holding(roots(all_modules(lambda: None)), wanted)
        order, titles = list(map(id, models)), list[str]()
        for root in sorted(owners, key=lambda owner: order.index(id(owner)) if id(owner) in order else len(order)):
            titles.append(title_of(root, titles) if len(owners) > 1 else "")
            self._add(root, titles[-1])

    @staticmethod
    def _holding(modules: Iterable[Any], wanted: set[int]) -> list[Any]:
        """Return the modules that together hold these parameters, without parts or wrappers of others."""
        holdings = []
        for module in modules:
            ids = {id(parameter) for parameter in module.parameters()} | {id(whole) for _, whole in gathered(module)}
            holdings.append((module, wanted & ids))
        chosen, missing = [], set(wanted)
        for module, ids in sorted(holdings, key=lambda holding: -len(holding[1])):
            if ids & missing:
                chosen.append(module)
                missing -= ids
        return chosen

    def _add(self, root: Any, title: str) -> None:
        for path, module in root.named_modules():
            name = "" if path in _INNER else clean(path) if path else ""
            full = title + name if name else title.rstrip(".")
            self.modules[full] = module
            tensors = [*vars(module).get("_parameters", {}).items(), *vars(module).get("_buffers", {}).items()]
            for key, tensor in tensors:
                if tensor is not None:
                    whole = clean(f"{full}.{key}" if full else key)
                    self._names.setdefault(id(tensor), whole)
                    self._storages.setdefault(memory_of(tensor), whole)
        for shard, tensor in gathered(root):
            if (sharded_name := self._names.get(id(shard))) is not None:
                self._names.setdefault(id(tensor), sharded_name)

    def name_of(self, tensor: Any) -> str:
        """Return the name of a parameter or buffer, also of one that shares memory with the tensor; ``""`` for any other."""
        return self._names.get(id(tensor)) or self._storages.get(memory_of(tensor) or -1, "")

    def owner(self, name: str) -> str:
        """Return the path of the module that holds this parameter."""
        return name.rpartition(".")[0]


def gathered(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter that FSDP2 shards, and the whole one that a graph uses, which may have no memory now."""
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in getattr(state and state(), "_fsdp_param_groups", ()):
            for sharded in getattr(group, "fsdp_params", ()):
                shard, whole = getattr(sharded, "sharded_param", None), getattr(sharded, "_unsharded_param", None)
                if shard is not None and whole is not None:
                    yield shard, whole


def memory_of(tensor: Any) -> int:
    """Return the address of a tensor's elements; 0 if unknown."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, NotImplementedError, RuntimeError):
        return 0


class Locator:
    """Finds the places of nodes in one graph. ``frames``: the user's functions that run now, innermost first."""

    def __init__(self, nodes: Sequence[GraphNode], names: ModuleNames, frames: Sequence[FrameType]) -> None:
        self._names, self._frames = names, frames
        self._nodes = nodes
        self._paths: dict[GraphNode, str] = {}
        self._sources: dict[GraphNode, GraphNode] = {}
        """The parameter that a node is a view or a cast of"""
        for node in nodes:  # leaves first
            source = node.inputs[0][0] if len(node.inputs) == 1 and node.operator in _PREPARING else None
            if source is not None and (source.parameter is not None or source in self._sources):
                self._sources[node] = self._sources.get(source, source)
            path = self._uses(node)
            if path is not None:
                self._paths[node] = path

    def is_preparation(self, node: GraphNode) -> bool:
        """Return whether the node only makes a view or a cast of a parameter, for another operator."""
        return node in self._sources

    def _uses(self, node: GraphNode) -> str | None:
        """Return the module with the parameters that the node uses, directly or through a view or a cast of them."""
        paths = []
        for producer, _ in node.inputs:
            source = self._sources.get(producer, producer) if producer is not None else None
            if source is not None and source.parameter is not None:
                name = self._names.name_of(source.parameter)
                if name:
                    paths.append(self._names.owner(name))
        if not paths or self.is_preparation(node):
            return None
        return common(paths)

    def place(self, node: GraphNode) -> Place:
        """Return the place where the node was created."""
        words = spellings(node.operator)
        if node.operator == "pow" and node.settings().get("exponent") != 2:  # noqa: PLR2004  # a square
            words = tuple(word for word in words if word != "square")
        owner = self._paths.get(node)
        if owner is not None:
            module = self._names.modules.get(owner)
            lines = module_lines(module, words) if module is not None else []
            users = [line for line in lines if line.is_users]
            begins = _first_line(module) if node.operator in OPAQUE else None
            return self._placed(owner, users[0] if users else self._caller_line(owner) or begins)
        before, after = self._around(node)
        candidates = [] if after is None and self._is_in_script(node) else self._candidates(before, after)
        for apart in (1, 0):  # lines between those of the two neighbours, then theirs
            for path in candidates:
                line = self._matching(path, words, before, after, apart)
                if line is not None:
                    return self._placed(path, line if line.is_users else self._caller_line(path))
        shared = None if after is None or before is None else common([before, after])
        line = None if shared is not None and self._calls_both(shared, before, after) else self._in_frames(words)
        if line is not None or shared is None:
            return Place("", "", "" if line is None else str(line))
        return self._placed(self._real(shared), None)

    def _is_in_script(self, node: GraphNode) -> bool:
        """Return whether an operator that only the script mentions lies between the last module and the node."""
        last = max((user.number for user in self._paths if user.number < node.number), default=0)
        kinds = {type(module): module for module in self._names.modules.values()}
        return any(
            self._in_frames(words) is not None and not any(module_lines(module, words) for module in kinds.values())
            for words in {spellings(other.operator) for other in self._nodes if last < other.number < node.number}
        )

    def _calls_both(self, path: str, before: str | None, after: str | None) -> bool:
        """Return whether the module's ``forward`` calls both: what lies between is in none of the running functions."""
        module = self._names.modules.get(path)
        return module is not None and {_child(path, before), _child(path, after)} <= _child_lines(module).keys()

    def _placed(self, path: str, line: Line | None) -> Place:
        module = self._names.modules.get(path)
        kind = type(module).__name__ if module is not None else ""
        return Place(path or kind, kind, "" if line is None else str(line))

    def _around(self, node: GraphNode) -> tuple[str | None, str | None]:
        """Return the last module used before the node, and the first one after it."""
        before = after = None
        for other, path in self._paths.items():  # in the order of the forward pass
            if other.number < node.number:
                before = path
            elif other.number > node.number:
                after = path
                break
        return before, after

    def _candidates(self, before: str | None, after: str | None) -> list[str]:
        """Return the modules that may have called an operator between these two, innermost first."""
        modules = self._names.modules
        paths = list(modules)
        shared = common([before, after]) if before is not None and after is not None else ""
        start = paths.index(before) + 1 if before in modules else 0
        end = paths.index(after) if after in modules else len(paths)
        owners = set(self._paths.values())
        within = [path for path in paths[start : max(end, start)] if not any(_inside(owner, path) for owner in owners)]
        likely = within[::-1]
        for side in (after, before):
            likely += (path for path in chain_of(side) if side is not None and path != shared and _inside(path, shared))
        return [*likely, *chain_of(shared)]

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
        """Return the line of the parent's ``forward`` that calls this module of torch."""
        while path:
            parent, _, name = path.rpartition(".")
            module = self._names.modules.get(parent)
            forward = getattr(type(module), "forward", None)
            if module is not None and isinstance(forward, FunctionType) and is_users(forward.__code__):
                lines = [line for used_name, line in used(forward.__code__) if used_name == name]
                return Line(forward.__code__.co_filename, lines[0], lines[0]) if lines else None
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
    """Return the lines of a module's ``forward``, helper functions and methods included, that use the operator."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType):
        return []
    methods = {
        name: value for kind in reversed(type(module).__mro__) if is_own(kind)
        for name, value in vars(kind).items() if isinstance(value, FunctionType)
    }  # fmt: skip
    return lines_of(forward.__code__, {**visible(forward), **methods}, words)


def _first_line(module: Any) -> Line | None:
    """Return the first line of a module's ``forward``; ``None`` if the user has not written it."""
    if not _is_written_by_user(module):
        return None
    code = type(module).forward.__code__
    return Line(code.co_filename, code.co_firstlineno, code.co_firstlineno)


def _is_written_by_user(module: Any) -> bool:
    forward = getattr(type(module), "forward", None)
    return isinstance(forward, FunctionType) and is_users(forward.__code__)


def is_own(kind: type) -> bool:
    """Return whether the class is neither ``object`` nor ``torch.nn.Module``: every module has their methods."""
    return kind.__module__ not in {"builtins", "torch.nn.modules.module"}


def _child_lines(module: Any) -> dict[str, list[int]]:
    """Return the lines where the module's ``forward`` mentions each of its attributes."""
    forward = getattr(type(module), "forward", None)
    lines: dict[str, list[int]] = {}
    if isinstance(forward, FunctionType):
        for name, line in used(forward.__code__):
            lines.setdefault(name, []).append(line)
    return lines


def _child(path: str, inner: str | None) -> str:
    """Return the name of the child of ``path`` that holds ``inner``; ``""`` if none does."""
    if inner is None or not _inside(inner, path) or inner == path:
        return ""
    return inner[len(path) + 1 if path else 0 :].partition(".")[0]


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")


def chain_of(path: str | None) -> Iterator[str]:
    """Yield the path and the paths of the modules around it; the outermost, ``""``, is last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def common(paths: Sequence[str]) -> str:
    """Return the innermost module that contains all of these."""
    parts = [path.split(".") for path in paths]
    shared = []
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def spellings(operator: str) -> tuple[str, ...]:
    """Return the names of an operator in Python code: functions and methods, or symbols."""
    return _WRITTEN.get(operator, (operator, operator + "_"))


class Line(NamedTuple):
    """A line of code. ``at``: the line of the outermost function through which it is reached."""

    file: str
    number: int
    at: int
    is_users: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@lru_cache(maxsize=1024)
def used(code: CodeType) -> tuple[tuple[str, int], ...]:
    """Return the names and symbols (``+``, ``[]``) that the code uses, each with its line, in order."""
    uses: list[tuple[str, int]] = []
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = getattr(instruction, "positions", None)
        starts = instruction.starts_line
        line = (positions.lineno if positions is not None else starts) or line
        name = instruction.opname
        if name.startswith("BINARY_SUBSCR") or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            uses.append(("[]", line))
        elif name == "BINARY_OP":
            uses.append((instruction.argrepr.rstrip("="), line))
        elif name == "UNARY_NEGATIVE":
            uses.append(("-", line))
        elif name.startswith(_LOADS) and isinstance(instruction.argval, str):
            uses.append((instruction.argval, line))
    return tuple(uses)


def lines_of(code: CodeType, names: Mapping[str, Any], spellings: Iterable[str], depth: int = 0) -> list[Line]:
    """Return the lines that use one of these names, in order.

    Args:
        code: of the function.
        names: objects by the names that the code may use: globals, locals, attributes of ``self``.
        spellings: names or symbols of the operator.
        depth: how many functions deep this one is reached.
    """
    wanted, lines = set(spellings), list[Line]()
    for name, line in used(code):
        if name in wanted:
            lines.append(Line(code.co_filename, line, line, is_users(code)))
            continue
        helper = names.get(name)
        if depth < DEEPEST and isinstance(helper, FunctionType) and helper.__code__ is not code and is_users(helper.__code__):
            lines += [x._replace(at=line) for x in lines_of(helper.__code__, visible(helper), wanted, depth + 1)]
        elif hasattr(type(helper), "forward") and _calls(helper, wanted):
            lines.append(Line(code.co_filename, line, line, is_users(code)))
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType) and _runs_within(constant, code)]
    for function in inner if depth < DEEPEST else ():
        lines += lines_of(function, names, wanted, depth + 1)
    return sorted(lines, key=lambda line: line.at)


def _runs_within(inner: CodeType, code: CodeType) -> bool:
    """Return whether this is a lambda, a comprehension, or a function within a function."""
    return inner.co_name.startswith("<") or bool(code.co_flags & inner.co_flags & CO_OPTIMIZED)


def _calls(module: Any, wanted: Iterable[str]) -> bool:
    """Return whether the module has no parameters, as losses have none, and its ``forward`` uses one of these names."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or is_users(forward.__code__) or vars(module).get("_modules"):
        return False
    return not vars(module).get("_parameters") and not {name for name, _ in used(forward.__code__)}.isdisjoint(wanted)


def visible(function: FunctionType) -> dict[str, Any]:
    """Return the global and closed-over names of a function."""
    cells = dict[str, Any]()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not yet set
            continue
    return {**function.__globals__, **cells}


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a running function's variables, as a copy.

    Before Python 3.13 the frame itself would keep a dictionary of them, and with it a loss, a batch, for as long as it runs; it
    is emptied. A function that asks for ``locals()`` itself has that very dictionary in its hands, and is left alone.
    """
    names = frame.f_code.co_names
    if not _HIDDEN_LOCALS.isdisjoint(names) and _REWRITTEN not in names:
        return {}
    variables = dict(frame.f_locals)
    if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(frame.f_locals, dict):
        frame.f_locals.clear()
    return variables


def is_users(code: CodeType) -> bool:
    """Return whether the code is neither torch's nor ours."""
    return is_users_file(code.co_filename)


def is_users_file(file: str) -> bool:
    """Return whether the code in a file of that name is neither torch's nor ours."""
    return not (file.startswith(("<frozen", _torch())) or is_ours(file))


@lru_cache(maxsize=1)
def _torch() -> str:
    return str(Path(torch.__file__).parent) + os.sep
