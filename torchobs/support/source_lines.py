"""Which line of a stack is named: the innermost of the user's own code, which is no package's, not Python's and not ours."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracemalloc import Traceback

_OURS = f"{Path(__file__).resolve().parents[1]}/"
_LIBRARIES = ("torch", "numpy")


def innermost(made: Traceback) -> str | None:
    """Return ``file:line`` of that frame; ``None`` for an allocation of ours.

    Where all frames are of libraries it is the innermost one. torch that is called by a wrapper of ours is the user's.
    """
    frames, package = list(made)[::-1], False  # tracemalloc puts the innermost last
    for frame in frames:
        file = frame.filename
        if is_ours(file):
            if not package:
                return None
        elif file.startswith(_packages()):
            package = True
        elif not is_standard(file):
            return f"{file}:{frame.lineno}"
    return f"{frames[0].filename}:{frames[0].lineno}"


def is_users(file: str) -> bool:
    """Return True for a file of the user's own."""
    return not (is_installed(file) or is_standard(file) or is_ours(file))


@lru_cache(maxsize=4096)
def is_standard(file: str) -> bool:
    """Return True for a file of Python's, and for code without one."""
    if file.startswith(("<frozen", "<string>", "<__array")):
        return True
    return file.startswith(_standard()) and not is_installed(file)


def is_installed(file: str) -> bool:
    """Return True for a package's file in any environment: torch's may not be this Python's (PYTHONPATH, a .pth file)."""
    return "/site-packages/" in file or "/dist-packages/" in file


def is_ours(file: str) -> bool:
    """Return True for a file of torchobs."""
    return file.startswith(_OURS)


@lru_cache(maxsize=1)
def _packages() -> tuple[str, ...]:
    known = (getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)
    return tuple(f"{Path(file).parent}/" for file in known if file)


@lru_cache(maxsize=1)
def _standard() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({f"{paths[name]}/" for name in ("stdlib", "platstdlib")})
