"""The compiled part of the writer (``torchobs/_native.c``), where it was built; a writer does without it as well."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


INTERFACE = 5
"""Of the module that this version calls: a checkout may still have one that was compiled before an update"""


@cache
def compiled() -> ModuleType | None:
    """Return the module; ``None`` where there is none for this version and this Python (free-threaded ones)."""
    try:
        module = importlib.import_module("torchobs._native")
    except ImportError:
        return None
    return module if getattr(module, "INTERFACE", 0) == INTERFACE else None


ELSEWHERE = object()
"""What a compiled hook's ``run`` returns where it has left the call to the same hook in Python"""


def make_hook(module: ModuleType | None, name: str, owners: tuple[object, ...], held: tuple[object, ...]) -> Any:
    """Return that hook of the module; ``None`` without one, or where a Python keeps ``__slots__`` in a way unknown to it."""
    if module is None:
        return None
    try:
        return getattr(module, name)(owners, held)
    except (TypeError, ValueError, AttributeError):
        return None
