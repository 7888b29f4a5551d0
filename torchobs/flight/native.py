"""The compiled part (``torchobs/_native.c``), where it was built; everything does without it as well."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


INTERFACE = 8
"""Of the module that this version calls: a checkout may still have one that was compiled before an update"""


@cache
def compiled() -> ModuleType | None:
    """Return the module; ``None`` where there is none for this version and this Python (free-threaded ones)."""
    try:
        module = importlib.import_module("torchobs._native")
    except ImportError:
        return None
    return module if getattr(module, "INTERFACE", 0) == INTERFACE else None
