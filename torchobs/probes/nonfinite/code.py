"""Find the lines of a function's code that call an operator, without running or parsing its source.

A forward pass keeps no record of which line made which node of its graph. The line follows from the operator's name among the
names that the code uses; helper functions of the user's are followed.
"""

from __future__ import annotations

import dis
import os
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

DEEPEST = 3
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST")
_REWRITTEN = "@py_builtins"
"""In functions whose assertions pytest has rewritten: it is these that name ``locals``"""
_HIDDEN_LOCALS = frozenset({"locals", "vars"})
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep


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
    found: list[tuple[str, int]] = []
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = getattr(instruction, "positions", None)
        starts = instruction.starts_line
        line = (positions.lineno if positions is not None else starts) or line
        name = instruction.opname
        if name.startswith("BINARY_SUBSCR") or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            found.append(("[]", line))
        elif name == "BINARY_OP":
            found.append((instruction.argrepr.rstrip("="), line))
        elif name == "UNARY_NEGATIVE":
            found.append(("-", line))
        elif name.startswith(_LOADS) and isinstance(instruction.argval, str):
            found.append((instruction.argval, line))
    return tuple(found)


def lines_of(code: CodeType, names: Mapping[str, Any], spellings: Iterable[str], depth: int = 0) -> list[Line]:
    """Return the lines that use one of these names, in order.

    Args:
        code: of the function.
        names: objects by the names that the code may use: globals, locals, attributes of ``self``.
        spellings: names or symbols of the operator.
        depth: how many functions deep this one is reached.
    """
    wanted, found = set(spellings), list[Line]()
    for name, line in used(code):
        if name in wanted:
            found.append(Line(code.co_filename, line, line, is_users(code)))
            continue
        helper = names.get(name)
        if depth < DEEPEST and isinstance(helper, FunctionType) and helper.__code__ is not code and is_users(helper.__code__):
            found += [each._replace(at=line) for each in lines_of(helper.__code__, visible(helper), wanted, depth + 1)]
        elif hasattr(type(helper), "forward") and _calls(helper, wanted):
            found.append(Line(code.co_filename, line, line, is_users(code)))
    inner = [each for each in code.co_consts if isinstance(each, CodeType) and depth < DEEPEST and _runs_within(each, code)]
    for each in inner:
        found += lines_of(each, names, wanted, depth + 1)
    return sorted(found, key=lambda line: line.at)


def _runs_within(inner: CodeType, code: CodeType) -> bool:
    """Return True for lambdas and comprehensions, and for functions within functions; the others of a script have names."""
    return inner.co_name.startswith("<") or bool(code.co_flags & inner.co_flags & CO_OPTIMIZED)


def _calls(module: Any, wanted: Iterable[str]) -> bool:
    """Return True for a module without parameters, as losses are, whose ``forward`` uses one of these names."""
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
    found = dict(frame.f_locals)
    if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(frame.f_locals, dict):
        frame.f_locals.clear()
    return found


def is_users(code: CodeType) -> bool:
    """Return True if the code is neither torch's nor ours."""
    file = code.co_filename
    return not file.startswith(("<frozen", _OURS, _torch()))


@lru_cache(maxsize=1)
def _torch() -> str:
    import torch  # torch is optional until training begins

    return str(Path(torch.__file__).parent) + os.sep
