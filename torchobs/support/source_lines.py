"""The line of a stack that messages name: the innermost of the user's code, which is not a package's, Python's or ours."""

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


def innermost(trace: Traceback) -> str | None:
    """Return ``file:line`` of the innermost frame of the user's code; ``None`` for an allocation of ours.

    Where all frames are of libraries it is the innermost one. torch that is called by a wrapper of ours is the user's.
    """
    frames, package = list(trace)[::-1], False  # tracemalloc puts the innermost last
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
    """Return whether the file is the user's own."""
    return not (is_installed(file) or is_standard(file) or is_ours(file))


@lru_cache(maxsize=4096)
def is_standard(file: str) -> bool:
    """Return whether the file is Python's, or the code has none."""
    if file.startswith(("<frozen", "<string>", "<__array")):
        return True
    return file.startswith(_standard()) and not is_installed(file)


def is_installed(file: str) -> bool:
    """Return whether the file is a package's, in any environment: torch may be another Python's (PYTHONPATH, a .pth file)."""
    return "/site-packages/" in file or "/dist-packages/" in file


def is_ours(file: str) -> bool:
    """Return whether the file is torchobs' own."""
    return file.startswith(_OURS)


@lru_cache(maxsize=1)
def _packages() -> tuple[str, ...]:
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)
    return tuple(f"{Path(file).parent}/" for file in files if file)


@lru_cache(maxsize=1)
def _standard() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({f"{paths[name]}/" for name in ("stdlib", "platstdlib")})
