"""What code a pickle would run if it were loaded; nothing of it is run.

Names come from two readings: Python's own unpickler, in which every class is an inert stand-in, so that it takes exactly the
pickles that Python takes; and fickling's analysis, which knows attacks. What is not read to its end is never called clean.
"""

from __future__ import annotations

import ast
import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MOST_BYTES = 64 * 1024 * 1024
"""Longest part of a file that is read for pickles. In a torch file the tensors are beside the pickle."""
MOST_OPCODES = 5_000_000
"""A checkpoint has some twenty for each of its tensors"""
OLD_TORCH = 5
"""Pickles in a row at the start of a file of torch's format before 1.6: magic number, protocol, system, object, storage keys"""
_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True, slots=True)
class PickleCode:
    """``imports`` are the names that it asks for; ``malicious`` says that their use is an attack, by fickling's rules."""

    imports: tuple[str, ...]
    malicious: bool
    problem: str | None = None
    """why it could not be read to its end"""


class TooLongError(ValueError):
    """A pickle has more opcodes than are read."""


class _StandIn:
    """Takes the place of every class and function that a pickle names; does nothing, whatever is done to it."""

    def __new__(cls, *_args: object, **_named: object) -> _StandIn:  # noqa: PYI034  # typing.Self needs Python 3.11
        return super().__new__(cls)

    def __init__(self, *args: object, **named: object) -> None:
        """Take any arguments."""

    def __call__(self, *_args: object, **_named: object) -> _StandIn:
        return self

    def __setstate__(self, _state: object) -> None:
        """Take any state."""

    def __setitem__(self, _key: object, _value: object) -> None:
        """Take any item."""

    def append(self, _item: object) -> None:
        """Take any item."""

    extend = add = update = append


def _counting(run: Callable[[Any], None]) -> Callable[[Any], None]:
    def counted(reader: _NameReader) -> None:
        reader.opcodes += 1
        if reader.opcodes > MOST_OPCODES:
            raise TooLongError(f"more than {MOST_OPCODES:,} operations")
        run(reader)

    return counted


class _NameReader(pickle._Unpickler):  # noqa: SLF001  # the reference, in Python
    """Collects the names that a pickle asks for."""

    dispatch = {code: _counting(run) for code, run in pickle._Unpickler.dispatch.items()}  # noqa: RUF012, SLF001  # as above

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: list[str] = []
        self.opcodes = 0

    def find_class(self, module: str, name: str) -> type[_StandIn]:
        """Note the name; import nothing."""
        self.names.append(f"{module}.{name}")
        return _StandIn

    def get_extension(self, code: int) -> None:
        """Note a name that ``copyreg`` would give."""
        self.names.append(f"extension {code}")
        self.stack.append(_StandIn)  # type: ignore[attr-defined]

    def persistent_load(self, _pid: object) -> _StandIn:
        """Take a reference to a tensor's memory."""
        return _StandIn()


def analyse(content: bytes) -> PickleCode:
    """Analyse the pickle that a file begins with, or the five of torch's old format; what follows is not for a loader.

    Raises:
        ImportError: fickling is not installed.
    """
    from fickling.fickle import StackedPickle  # noqa: F401  # asked for at once

    file = io.BytesIO(content)
    names: list[str] = []
    first = attempt(lambda: _read(file, names))
    problem = first if isinstance(first, str) else None
    if problem is None and first == (_MAGIC,):
        for _ in range(OLD_TORCH - 1):
            part = attempt(lambda: _read(file, names))
            problem = problem or (part if isinstance(part, str) else None)
    known = attempt(lambda: _by_fickling(content[: file.tell()]))
    imports, malicious = ([], False) if isinstance(known, str) else known
    return PickleCode(tuple(dict.fromkeys([*names, *imports])), malicious, problem)


class FirstPickle(NamedTuple):
    """What a file of pickles begins with."""

    is_torch: bool
    """it is torch's format before 1.6"""
    names: tuple[str, ...]
    """names that it asks for"""


def first_of(content: bytes) -> FirstPickle | None:
    """Return what the pickle is that a file begins with, of torch's old format all of them; None if it begins with none."""
    file, names = io.BytesIO(content), list[str]()
    first = attempt(lambda: _read(file, names))
    if isinstance(first, str):
        return None
    for _ in range(OLD_TORCH - 1 if first == (_MAGIC,) else 0):
        attempt(lambda: _read(file, names))
    return FirstPickle(first == (_MAGIC,), tuple(dict.fromkeys(names)))


def attempt(read: Callable[[], T]) -> T | str:
    """Return what reading a damaged file gives, or why it failed."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # a damaged file raises anything, which the verdict says
        return f"{type(error).__name__}: {error}"[:200]


def unknown(imports: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that torch's own restricted loader (``weights_only=True``) does not allow."""
    from torch import _weights_only_unpickler

    allowed = _weights_only_unpickler._get_allowed_globals().keys() | _ALSO_HARMLESS  # noqa: SLF001  # there is no public list
    return tuple(name for name in imports if name not in allowed)


_TORCHSCRIPT = frozenset(
    {
        "build_boollist", "build_doublelist", "build_intlist", "build_tensor_from_id", "build_tensorlist", "restore_type_tag",
    }
)  # fmt: skip
"""Functions of ``torch.jit._pickle`` that TorchScript's writer names (torch/csrc/jit/serialization/pickler.cpp); each returns
what it is given"""
_TORCHSCRIPT_ARGUMENTS = frozenset(f"torch.jit._pickle {name}" for name in _TORCHSCRIPT)
_ALSO_HARMLESS = frozenset(
    {"__builtin__.set", "collections.OrderedDict", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"}
) | {f"torch.jit._pickle.{name}" for name in _TORCHSCRIPT}
"""Names of Python 2 in old files, classes of storages, and TorchScript's"""


def _read(file: io.BytesIO, names: list[str]) -> tuple[Any]:
    reader = _NameReader(file)
    try:
        return (reader.load(),)
    finally:
        names += reader.names


def _by_fickling(content: bytes) -> tuple[list[str], bool]:
    import contextlib

    from fickling.analysis import Severity, check_safety
    from fickling.fickle import Global, StackedPickle

    imports: list[str] = []
    malicious = False
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # its warnings are in the answer
        for part in StackedPickle.load(content, fail_on_decode_error=False):
            imports += [name for node in part.properties.imports for name in _names(node)]
            # fickling calls all of torch.jit an attack: it judges the rest with a class of data in their places
            for index, opcode in enumerate(part):
                if isinstance(opcode, Global) and opcode.arg in _TORCHSCRIPT_ARGUMENTS:
                    part[index] = Global.create("collections", "OrderedDict")
            malicious = malicious or check_safety(part).severity >= Severity.LIKELY_OVERTLY_MALICIOUS
    return imports, malicious


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names]
