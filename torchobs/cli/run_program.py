"""Run a program in this process exactly like ``python script.py`` and ``python -m module``.

``runpy.run_path`` is unsuitable: it restores the old ``__main__``, so that objects pickled by name afterwards (classes in
the queues of DataLoader workers, in ``atexit`` handlers) are not found, and clears the program's globals at its end.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NamedTuple

_HOOKS = tuple(str(Path(__file__).parent.parent / name) for name in ("probes", "flight", "support", "runtime/profiler.py"))
"""Where a hook's frames are. A signal's handler, of the user's, may run within any of them"""


class ProgramKind(Enum):
    """The form of the Python command line."""

    SCRIPT = "python script.py"
    PACKAGE = "python directory-or-zip"
    MODULE = "python -m module"


class NoSuchProgramError(Exception):
    """The program does not exist; the message is Python's own."""


class Program(NamedTuple):
    """What to run: the path or the module's name, and the program's arguments."""

    kind: ProgramKind
    name: str
    arguments: tuple[str, ...]


def find(path: str, arguments: tuple[str, ...]) -> Program:
    """Return the program at ``path``. Raises :class:`NoSuchProgramError` when it is not a readable file."""
    if pkgutil.get_importer(path) is not None:
        return Program(ProgramKind.PACKAGE, path, arguments)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as problem:
        raise NoSuchProgramError(f"can't open file {_absolute(path)!r}: [Errno {problem.errno}] {problem.strerror}") from None
    return Program(ProgramKind.SCRIPT, path, arguments)


def enter(program: Program) -> None:
    """Set ``sys.argv``, ``sys.path`` and ``sys.modules['__main__']`` as Python does before the program's first line."""
    sys.argv[:] = ["-m" if program.kind is ProgramKind.MODULE else program.name, *program.arguments]
    if not _safe_path() or program.kind is ProgramKind.PACKAGE:
        _enter_path(program)
    main = _new_main(sys.modules["__main__"])
    # multiprocessing keeps the main module of its import time, and looks up objects from spawned workers there
    sys.modules.update({name: main for name in ("__main__", "__mp_main__") if name in sys.modules})


def execute(program: Program) -> None:
    """Run the program to its end, in ``__main__``. Its exceptions propagate, and are shown without our frames."""
    with _AsItsOwn():
        if program.kind is ProgramKind.MODULE:
            runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]  # noqa: SLF001  # what `python -m` itself calls
        elif program.kind is ProgramKind.PACKAGE:
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001  # as above
        else:
            main = vars(sys.modules["__main__"])
            exec(_load(_absolute(program.name), main), main)  # noqa: S102  # running the user's script is the purpose


def _load(path: str, main: dict[str, object]) -> CodeType:
    main["__file__"] = path
    if path.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", path)
        main["__loader__"] = compiled
        if (code := compiled.get_code("__main__")) is not None:
            return code
    main["__loader__"] = SourceFileLoader("__main__", path)
    # not by the loader, which would add its own frames to a SyntaxError
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _enter_path(program: Program) -> None:
    first = {
        ProgramKind.SCRIPT: lambda: str(Path(os.path.realpath(program.name)).parent),
        ProgramKind.PACKAGE: lambda: _absolute(program.name),
        ProgramKind.MODULE: os.getcwd,
    }[program.kind]
    started_with_one = not _safe_path()
    sys.path[: 1 if started_with_one else 0] = [first()]


def _safe_path() -> bool:
    """Return True if Python was started with -P or -I, which leave the script's directory out of ``sys.path``."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _absolute(path: str) -> str:
    # joined and not normalised, as Python keeps the "./" in its own __file__
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118  # pathlib normalises


def _new_main(old: ModuleType) -> ModuleType:
    main = ModuleType("__main__")
    if "__annotations__" in vars(old):  # present or not depending on the Python version
        vars(main)["__annotations__"] = {}
    vars(main).update({"__builtins__": builtins, "__file__": None, "__cached__": None})
    return main


class _AsItsOwn:
    """Passes exceptions on to the interpreter (status 1, or SIGINT), with tracebacks that start at the program's frame."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        for each in _chain(error):
            each.__traceback__ = _without_hooks(each.__traceback__)
        _show_once_from(_without_hooks(trace))


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception with its causes, contexts and group members."""
    found, waiting = list[BaseException](), [error]
    while waiting:
        each = waiting.pop()
        if not any(each is known for known in found):
            found.append(each)
            members = getattr(each, "exceptions", ())  # of a BaseExceptionGroup (Python 3.11)
            waiting += [one for one in (each.__cause__, each.__context__, *members) if isinstance(one, BaseException)]
    return found


def _without_hooks(trace: TracebackType | None) -> TracebackType | None:
    """Remove our hooks' frames from a traceback, except one that raised."""
    kept = [each for each in _entries(trace) if each.tb_next is None or not each.tb_frame.f_code.co_filename.startswith(_HOOKS)]
    for entry, following in zip(kept, [*kept[1:], None], strict=True) if kept else ():
        entry.tb_next = following
    return kept[0] if kept else None


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _show_once_from(trace: TracebackType | None) -> None:
    """Shorten the traceback that the interpreter is about to show, then restore the program's own ``sys.excepthook``."""
    its_own = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = its_own
        error.__traceback__ = sys.last_traceback = trace
        its_own(kind, error, trace)

    sys.excepthook = show
