"""Results of the toolboxes' functions: frozen data that prints well in a terminal and in a notebook and becomes JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any

from torchobs.support.text import duration, moment, rate, size


@dataclass(frozen=True)
class Result:
    """Base of the toolboxes' results: a frozen, slotted dataclass with numbers, texts, results or tuples of these as fields.

    ``repr()`` stays the dataclass's own unless a subclass says ``repr=False``; ``str()`` is a table for people.
    ``result["0.weight"]`` is its row with that ``name``, or with that first field.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that ``json.dumps`` takes; numbers that are not finite become their names."""
        return {name: _plain(value) for name, value in _items(self)}

    def __getitem__(self, name: str) -> Any:
        tables = [value for field, value in _items(self) if field != "problems" and isinstance(value, tuple)]
        rows = [row for table in tables for row in table if isinstance(row, Result)]
        names = [getattr(row, "name", _items(row)[0][1]) for row in rows]
        if name not in names:
            raise KeyError(f"there is no {name!r}; there is {', '.join(map(str, names)) or 'nothing'}")
        return rows[names.index(name)]  # of several the first

    def __str__(self) -> str:
        return "\n".join([type(self).__name__, *_lines(self, indent="  ")])

    def _repr_html_(self) -> str:
        return f"<div><pre>{escape(str(self))}</pre></div>"


@dataclass(frozen=True, slots=True)
class Problem(Result):
    """One thing that is wrong."""

    kind: str
    """A stable word for programs: ``"nonfinite"``"""
    where: str
    """What has it: a parameter, a module, an argument, a file; empty: the whole"""
    text: str
    """A sentence for people"""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True)
class Checked(Result):
    """Base of results of checks: each has a field ``problems``, which is empty if all is well."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def problems(self) -> tuple[Problem, ...]:
            """What is wrong."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Return ``ok``, ``problems`` and the fields, as :meth:`Result.to_dict` does."""
        return {"ok": self.ok, "problems": _plain(self.problems), **super().to_dict()}


@dataclass(frozen=True)
class Measured(Checked):
    """Base of results that describe something, without a verdict."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """None."""
        return ()


def fill(result: Result, **values: Any) -> None:
    """Set fields of a frozen result that are complete only after its block has ended."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _items(result: Result) -> list[tuple[str, Any]]:
    return [(field.name, getattr(result, field.name)) for field in fields(result) if not field.name.startswith("_")]


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _text(value: Any, name: str = "") -> str:  # noqa: PLR0911  # one for each kind
    """Return a field's value for people: numbers of ``*_bytes``, ``*_s`` and ``*_per_s`` with a readable unit."""
    if value is None:
        return "-"
    what, per_s, _ = name.rpartition("_per_s")
    units: dict[str, Any] = {"bytes": size, "s": moment if name == "timestamp_s" else duration}
    unit = partial(rate, what=what) if per_s else units.get(name.rpartition("_")[2])
    if unit is not None and isinstance(value, (int, float)):
        return str(unit(value))
    if unit is not None and hasattr(value, "text"):
        return str(value.text(unit))
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items()) or "-"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(map(_text, value)) or "-"
    return str(value)


def _table(value: Any) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows of a sequence of results of one class; None for anything else."""
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], Result):
        return None
    if any(type(item) is not type(value[0]) for item in value):
        return None
    return [name for name, _ in _items(value[0])], [[_text(item, name) for name, item in _items(row)] for row in value]


def _lines(result: Result, indent: str) -> list[str]:
    items = _items(result)
    width = max((len(name) for name, _ in items), default=0)
    lines = []
    for name, value in items:
        table = _table(value)
        if table is not None:
            lines += [f"{indent}{name}:", *(f"{indent}  {line}" for line in _aligned(*table))]
        elif isinstance(value, Result):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        elif "\n" in (text := _text(value, name)):
            lines += [f"{indent}{name}:", *text.splitlines()]
        else:
            lines.append(f"{indent}{name:<{width}}  {text}")
    return lines


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
